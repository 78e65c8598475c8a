"""The order of a round is data: all hook calls of a run as one list."""

import re

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers.logger import DummyLogger

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule, FederatedModule
from fl_lightning.models import FBNCNN
from tests.support.helpers import SGD, blobs, federated_run, fit, small_cnn

OURS = [
    "on_round_start",
    "on_after_local_backward",
    "on_local_step_end",
    "on_before_aggregate",
    "on_after_aggregate",
    "on_round_end",
]
RECORDED = [
    *OURS,
    "setup",
    "configure_batch_norm",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_before_optimizer_step",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
]


def recorder():
    """A callback that notes the name of each hook, and the local step where a hook has one."""
    calls = []

    def hook(name):
        def note(self, *args, **kwargs):
            step = [args[-1]] if name in ("on_after_local_backward", "on_local_step_end") else []
            calls.append(" ".join(map(str, [name, *step])))
            return getattr(super(Recorder, self), name)(*args, **kwargs)

        return note

    Recorder = type("Recorder", (FederatedCallback,), {name: hook(name) for name in RECORDED})
    return Recorder(), calls


class Rows(DummyLogger):
    """Keeps the rows of metrics that it is given."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


def fitted(rounds, callbacks=(), local_steps=2, **trainer):
    return federated_run(*callbacks, rounds=rounds, trainer=trainer, local_steps=local_steps).module


def loss(model, inputs, targets):
    return torch.nn.functional.cross_entropy(model(inputs), targets).item()


def test_all_hooks_of_two_rounds_with_two_local_steps_in_order():
    callback, calls = recorder()
    fitted(2, [callback], limit_val_batches=1)
    one_round = [
        "on_train_epoch_start",
        "on_round_start",
        "on_after_local_backward 0",
        "on_local_step_end 0",
        "on_after_local_backward 1",
        "on_local_step_end 1",
        "on_before_aggregate",
        "on_after_aggregate",
        "on_before_optimizer_step",
        "on_round_end",
        "on_validation_start",
        "on_validation_end",
        "on_train_epoch_end",
    ]
    assert calls == [
        "setup",
        "configure_batch_norm",
        "on_fit_start",
        "on_train_start",
        *one_round,
        *one_round,
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_the_state_that_each_hook_sees_is_what_its_documentation_says():
    class Watches(FederatedCallback):
        def on_round_start(self, trainer, pl_module, cohort):
            self.start = {name: p.detach().clone() for name, p in pl_module.model.named_parameters()}
            for name, value in cohort.params.items():
                assert torch.equal(value, self.start[name].expand_as(value))
                assert torch.equal(cohort.server[name], self.start[name])

        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            self.before = {name: value.clone() for name, value in cohort.params.items()}
            assert cohort.step == step

        def on_local_step_end(self, trainer, pl_module, cohort, step):
            for name, value in cohort.params.items():
                assert torch.allclose(value, self.before[name] - 0.1 * cohort.grads[name], atol=1e-15)

        def on_before_aggregate(self, trainer, pl_module, cohort):
            assert cohort.step == 1  # the last of two
            self.mean = {name: cohort.mean(value) for name, value in cohort.params.items()}

        def on_after_aggregate(self, trainer, pl_module, cohort):
            assert cohort.pseudo_gradient.keys() == self.mean.keys()
            for name, gradient in cohort.pseudo_gradient.items():
                assert torch.equal(gradient[0], self.start[name] - self.mean[name])

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for name, parameter in pl_module.model.named_parameters():
                assert torch.equal(parameter, self.start[name])
                assert torch.equal(parameter.grad, self.start[name] - self.mean[name])

        def on_round_end(self, trainer, pl_module, cohort):
            for name, parameter in pl_module.model.named_parameters():
                assert torch.allclose(parameter, self.mean[name], atol=1e-14)

    fitted(3, [Watches()])


@pytest.mark.parametrize(
    ("name", "near"), [("on_rond_start", "on_round_start"), ("on_local_steps_end", "on_local_step_end")]
)
def test_a_misspelt_hook_fails_when_the_class_is_made_and_names_the_near_one(name, near):
    with pytest.raises(ConfigurationError, match=rf"Mine\.{name} is not a hook.*did you mean .*{near}"):
        type("Mine", (FederatedCallback,), {name: lambda self, *args: None})


@pytest.mark.parametrize("mixin_first", [True, False])
def test_a_misspelt_hook_in_a_mixin_fails_when_the_class_is_made(mixin_first):
    mixin = type("M", (), {"on_rond_start": lambda self, *args: None})
    bases = (mixin, FederatedCallback) if mixin_first else (FederatedCallback, mixin)
    with pytest.raises(
        ConfigurationError, match=r"Mine\.on_rond_start is not a hook.*did you mean on_round_start"
    ):
        type("Mine", bases, {})


def test_mixins_with_real_hooks_and_callbacks_of_lightning_are_no_misspellings():
    mixin = type("M", (), {"on_round_start": lambda self, *args: None, "helper": 1})
    type("Mine", (mixin, FederatedCallback, EarlyStopping), {"on_train_start": lambda self, *args: None})


def test_hooks_of_lightning_and_of_a_base_class_are_no_misspellings():
    base = type("Base", (FederatedCallback,), {"on_train_start": lambda self, *args: None, "helper": 1})
    type("Derived", (base,), {"on_train_start": lambda self, *args: None})


def test_every_hook_of_ours_stands_in_the_documentation_of_the_round_in_order():
    own = [name for name in vars(FederatedCallback) if name.startswith("on_")]
    assert own == [*OURS, "on_round_skipped"]
    text = FederatedCallback.__doc__.partition("Example:")[0]
    mentioned = re.findall(r"\bon_\w+(?=\()", text)
    assert [name for name in mentioned if name in own] == own


def test_weights_still_change_after_a_validation():
    class Weights(FederatedCallback):
        kept: list = []  # noqa: RUF012  # one run only

        def on_train_epoch_end(self, trainer, pl_module):
            self.kept.append(pl_module.model[0].weight.detach().clone())

    fitted(3, [Weights()], limit_val_batches=1.0)
    first, second, third = Weights.kept
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


@pytest.mark.parametrize("local_steps", [1, 3])
def test_the_global_step_counts_rounds(local_steps):
    trainer = fitted(4, local_steps=local_steps).trainer
    assert trainer.global_step == trainer.current_epoch == 4


def test_row_zero_and_one_row_per_round_reach_the_logger():
    logger = Rows()
    module = fitted(
        4, logger=logger, limit_val_batches=1.0, num_sanity_val_steps=-1, check_val_every_n_epoch=2
    )
    rows = logger.rows
    assert [(step, row["round"]) for step, row in rows] == [(r, r) for r in range(5)]
    evaluated = {"val/loss", "val/accuracy"}
    assert [evaluated <= row.keys() for _, row in rows] == [True, False, True, False, True]
    assert ["train/loss" in row for _, row in rows] == [False, True, True, True, True]
    assert module.metrics == rows[-1][1]


def test_row_zero_is_the_initial_model_and_later_rows_the_model_after_the_round():
    logger = Rows()
    fitted(1, logger=logger, limit_val_batches=1.0, num_sanity_val_steps=-1)
    inputs, targets = blobs().server.dataset.tensors
    model = small_cnn().double().eval()
    assert logger.rows[0][1]["val/loss"] == pytest.approx(loss(model, inputs, targets), abs=1e-6)
    trained = fitted(1).model.eval()
    assert logger.rows[1][1]["val/loss"] == pytest.approx(loss(trained, inputs, targets), abs=1e-6)


def test_a_fast_dev_run_is_one_whole_round():
    callback, calls = recorder()
    trainer = fitted(9, [callback], fast_dev_run=True, limit_val_batches=1.0).trainer
    assert trainer.global_step == 1
    assert calls.count("on_round_end") == calls.count("on_validation_end") == 1


def test_data_without_clients_are_refused():
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    with pytest.raises(ConfigurationError, match="data: FederatedDataModule has no clients"):
        fit(module, FederatedDataModule(), 1)


@pytest.mark.parametrize(
    "setting", [{"overfit_batches": 1}, {"limit_train_batches": 0}, {"limit_train_batches": 0.5}]
)
def test_parts_of_a_round_are_refused(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ConfigurationError, match=rf"trainer\.{name}: {value} does not apply"):
        fitted(1, **setting)


def test_a_run_without_a_number_of_rounds_is_refused():
    with pytest.raises(ConfigurationError, match=r"trainer\.max_epochs: set the number of rounds"):
        fitted(-1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "local_steps: None and local_epochs: None"),
        ({"local_steps": 1, "local_epochs": 1}, "local_steps: 1 and local_epochs: 1"),
        ({"local_steps": 0}, "local_steps: 0 must be at least 1"),
        ({"local_epochs": -1}, "local_epochs: -1 must be at least 1"),
        ({"local_steps": 1, "budget_epochs": 0}, "budget_epochs: 0 must be positive"),
    ],
)
def test_settings_of_the_local_work_out_of_range_are_named(settings, named):
    with pytest.raises(ConfigurationError, match=named):
        FederatedModule(small_cnn(), SGD, **settings)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated.*")  # until torch drops it
@pytest.mark.parametrize(
    "made", [torch.jit.script, lambda model: torch.jit.trace(model.eval(), torch.ones(2, 2, 6, 6))]
)
def test_a_model_whose_layers_are_hidden_is_refused(made):
    with pytest.raises(
        ConfigurationError, match=r"^model: torch\.jit\.script hides the layers of Sequential; give"
    ):
        FederatedModule(made(small_cnn()), SGD, local_steps=1)


def test_a_model_without_trainable_parameters_is_refused():
    model = FBNCNN(num_classes=3, in_channels=2, image_size=4).requires_grad_(False)
    with pytest.raises(ConfigurationError, match="FBNCNN has no trainable parameters"):
        FederatedModule(model, SGD, local_steps=1)
