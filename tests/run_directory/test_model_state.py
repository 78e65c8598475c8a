"""Models whose state is more, or less, than tensors: a checkpoint gives the state back, or the run does not start."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from fl_lightning import ConfigurationError, FederatedModule, Run
from fl_lightning.batch_norm.kinds import buffer_kinds
from fl_lightning.callbacks import ClassifierBias
from fl_lightning.experiments.run_directory.checkpoint_io import check_run, load_checkpoint
from fl_lightning.models.weights import load_weights
from tests.support.command_line import message_of, run
from tests.support.helpers import SGD, blobs, small_cnn


class Extra(nn.Sequential):
    """A model with state that is no tensor."""

    def __init__(self, extra):
        super().__init__(*small_cnn("bn").double())
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Counter:
    """State that torch loads only as code."""


class WithoutBias(nn.Sequential):
    def __init__(self):
        super().__init__(*small_cnn("bn").double())

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        state.pop("8.bias")
        return state


class Forgiving(WithoutBias):
    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state, strict=False, assign=assign)


class Renamed(nn.Sequential):
    """Names its tensors as another library does, and has a buffer beside BN's."""

    def __init__(self):
        super().__init__(*small_cnn("bn").double())
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.scale *= x.detach().mean()
        return super().forward(x)

    def state_dict(self, *args, **kwargs):
        return {f"net.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state, strict=True, assign=False):
        state = {name.removeprefix("net."): value for name, value in state.items()}
        return super().load_state_dict(state, strict=strict, assign=assign)


def a_run(model, rounds=2, callbacks=(), **settings):
    module = FederatedModule(model, SGD, local_steps=1)
    quiet = {"enable_progress_bar": False, "accelerator": "cpu", "precision": "64-true"}
    return Run(
        module, blobs(), name="state", max_epochs=rounds, callbacks=[*callbacks], **{**quiet, **settings}
    )


def test_state_that_is_no_tensor_is_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_run(Extra({"classes": ["a", "b"]}), callbacks=[ClassifierBias(mean_of=2)]).fit()
    (path,) = tmp_path.glob("runs/**/last.ckpt")
    other = Extra({"classes": []})
    check_run(path, load_checkpoint(path), other)
    load_weights(other, str(path))
    assert other.extra == {"classes": ["a", "b"]}
    again = a_run(Extra({"classes": []}), rounds=3, callbacks=[ClassifierBias(mean_of=2)])
    again.fit(resume=path)
    assert again.module.model.extra == {"classes": ["a", "b"]}


def test_a_module_tells_as_torch_does_which_tensors_a_state_lacks():
    module = FederatedModule(small_cnn("bn"), SGD, local_steps=1)
    state = module.state_dict()
    del state["8.bias"]
    assert module.load_state_dict(state, strict=False).missing_keys == ["8.bias"]


def test_two_ranks_train_a_model_with_state_that_is_no_tensor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = a_run(Extra({"classes": ["a"]}), devices=2).fit()
    assert result["rounds"] == 2


class Objects(Callback):
    def state_dict(self):
        return {"counter": Counter()}


@pytest.mark.parametrize(
    ("model", "callbacks", "words"),
    [
        (lambda: Extra(Counter()), [], "Unsupported global: GLOBAL .*Counter was not an allowed global"),
        (lambda: Extra(lambda: 1), [], "Can't pickle"),
        (WithoutBias, [], r"Missing key\(s\) in state_dict: \"8.bias\""),
        (
            Forgiving,
            [],
            r"could not be loaded \(state_dict\(\) of Forgiving loses: '8.bias'\); return all tensors",
        ),
        (lambda: small_cnn("bn").double(), [Objects()], "Unsupported global: GLOBAL .*Counter was not"),
    ],
)
def test_what_a_checkpoint_cannot_give_back_is_refused_before_round_1(
    model, callbacks, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    refusing = a_run(model(), callbacks=callbacks)
    with pytest.raises(ConfigurationError, match=words) as refused:
        refusing.fit()
    assert "\n" not in str(refused.value)
    assert not refusing.module.record.samples


SET = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    def get_extra_state(self):
        return torch.nn.ReLU()
    def set_extra_state(self, state):
        assert isinstance(state, torch.nn.ReLU)
"""


def test_objects_are_loaded_with_weights_only_false(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "objects_net.py").write_text(SET)
    monkeypatch.syspath_prepend(tmp_path)
    settings = ("--model.model", "objects_net.Net", "--trainer.callbacks", "null", "--trainer.max_epochs", 1)
    assert "could not be loaded (WeightsUnpickler error" in message_of(capsys, lambda: run(*settings))
    run(*settings, "--weights_only", "false")
    run(*settings[:-1], 2, "--weights_only", "false", "--ckpt_path", "last")


def test_names_of_a_models_own_are_loaded_and_its_buffers_averaged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    renamed = a_run(Renamed())
    renamed.fit()
    assert buffer_kinds(renamed.module.model)["scale"] == "buffer"
    assert float(renamed.module.model.scale) != 1
