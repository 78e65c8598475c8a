"""A model that starts from the weights of a file."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_lightning import FederatedModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.models import LeNet, ResNet8
from fl_lightning.models.weights import load_weights
from tests.support.helpers import SGD, blobs, fit, small_cnn

pytestmark = pytest.mark.first_steps


def trained(**settings):
    """A model none of whose tensors is as it starts."""
    model = small_cnn(seed=5, **settings)
    for value in model.state_dict().values():
        value += 1
    return model


def same(one, other, without=()):
    return all(torch.equal(value, other[name]) for name, value in one.items() if name not in without)


def legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


def of_checkpoint(state, path):
    torch.save({"state_dict": state, "global_step": 3}, path)


def uncounted(state, path):
    torch.save({name: value for name, value in state.items() if "num_batches" not in name}, path)


def safe(state, path):
    pytest.importorskip("safetensors.torch").save_file(state, path)


@pytest.mark.parametrize("write", [torch.save, legacy, of_checkpoint, uncounted, safe])
def test_weights_of_every_format_are_taken(write):
    path = "w.safetensors" if write is safe else "w.pth"
    source, model = trained(), small_cnn()
    write(source.state_dict(), path)
    assert load_weights(model, path) == f"initial_weights: the model starts from {path}"
    left = {name for name in model.state_dict() if "num_batches" in name} if write is uncounted else ()
    assert same(model.state_dict(), source.state_dict(), without=left)


def test_a_head_of_another_number_of_classes_keeps_its_initial_values():
    source, model, fresh = trained(classes=7), small_cnn(), small_cnn()
    torch.save(source.state_dict(), "w.pt")
    assert load_weights(model, "w.pt") == (
        "initial_weights: the model starts from w.pt, except that 8.weight, 8.bias keep their initial values: [7, 24] in the file, "
        "[3, 24] in the model"
    )
    head = ("8.weight", "8.bias")
    assert same(model.state_dict(), source.state_dict(), without=head)
    assert same({name: model.state_dict()[name] for name in head}, fresh.state_dict())


def cut(state, path):
    torch.save(state, path)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("write", "model", "message"),
    [
        (None, LeNet(), "initial_weights: w.pth does not exist; give a state dict"),
        (cut, LeNet(), r"initial_weights: w.pth is truncated, damaged or holds .* use another one"),
        (lambda s, path: torch.save({}, path), LeNet(), "initial_weights: w.pth holds no weights"),
        (lambda s, path: torch.save([1, 2], path), LeNet(), "initial_weights: w.pth holds no weights"),
        (lambda s, path: Path(path).mkdir(), LeNet(), "initial_weights: w.pth is no file; give a state dict"),
        (
            lambda s, path: torch.save({0: torch.zeros(3), 1: torch.zeros(2)}, path),
            LeNet(),
            "LeNet: missing in the file: features.0.weight, features.2.weight, features.2.bias and 14 more; only in the file: 0, 1; use",
        ),
        (
            torch.save,
            LeNet(norm="gn"),
            r"w.pth does not fit model.model LeNet: only in the file: features.2.running_mean, features.2.running_var, features.2.num_batches_tracked and 6 more; use the model settings",
        ),
        (torch.save, ResNet8(), r"does not fit model.model ResNet8: missing in the file: conv.weight, "),
        (
            torch.save,
            LeNet(in_channels=1),
            r"LeNet: of another shape: features.0.weight \(\[32, 3, 5, 5\] in the file, \[32, 1, 5, 5\] in the model\); use",
        ),
    ],
)
def test_weights_that_cannot_be_used_are_refused_in_one_line(write, model, message):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if write is not None:
        write(LeNet().state_dict(), "w.pth")
    with pytest.raises(ConfigurationError, match=message) as error:
        load_weights(model, "w.pth")
    assert "\n" not in str(error.value)
    assert same(before, model.state_dict())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (ResNet8(width=4), ResNet8(width=8)),
        (
            nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 4)]),
            nn.ModuleList([nn.Linear(2, 4), nn.Linear(2, 5)]),
        ),
    ],
)
def test_layers_of_other_widths_are_no_heads(theirs, ours):
    torch.save(theirs.state_dict(), "w.pth")
    with pytest.raises(ConfigurationError, match=r"does not fit model.model"):
        load_weights(ours, "w.pth")


@pytest.mark.filterwarnings("ignore:.*(Sparse|quantize|TypedStorage)")
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to("meta"),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ],
)
def test_tensors_that_torch_cannot_copy_are_one_line(change):
    state = LeNet().state_dict()
    torch.save({**state, "features.0.weight": change(state["features.0.weight"])}, "w.pth")
    line = r"^initial_weights: w.pth cannot be loaded: .*features.0.weight.*; give dense tensors$"
    with pytest.raises(ConfigurationError, match=line):
        load_weights(LeNet(), "w.pth")


def test_a_module_starts_from_them_once():
    source = trained().double()
    torch.save(source.state_dict(), "w.pt")
    still, module = (
        partial(SGD, lr=0.0),
        FederatedModule(small_cnn(), SGD, local_steps=1, initial_weights="w.pt"),
    )
    expected = dict(source.named_parameters())
    for optimizer in (still, SGD, still):
        module.client.optimizer = optimizer
        fit(module, blobs(), 1)
        if optimizer is SGD:
            assert not same(expected, module.state_dict())
            expected = {
                name: value.clone() for name, value in module.state_dict().items() if name in expected
            }
        for name, value in expected.items():
            torch.testing.assert_close(module.state_dict()[name], value.detach())
