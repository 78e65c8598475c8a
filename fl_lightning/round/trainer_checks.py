"""Check that the trainer's settings and callbacks suit communication rounds."""

from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy

from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.strategy import CohortStrategy

_ACCUMULATION = "does not apply, as clients step on each batch; use larger batches"

_REFUSED = {
    "StochasticWeightAveraging": "adds an extra round; use a server optimizer with momentum",
    "WeightAveraging": "would evaluate and save another model than the server's; use a server optimizer with "
    "momentum, or average the checkpoints of checkpoint.keep_rounds",
    "GradientAccumulationScheduler": _ACCUMULATION,
    "BaseFinetuning": "would not reach the clients' copies; freeze layers in the model (requires_grad), or "
    "declare them frozen in a method's policy",
    "ModelPruning": "renames the parameters, which clients and methods know by name; prune the trained model",
    "BatchSizeFinder": "finds no batch, as each batch is a round; set data.batch_size",
    "LearningRateFinder": "finds no rate of the clients; compare rates in a study with choose",
    "OnExceptionCheckpoint": "would resume by itself in the next run; last.ckpt keeps the newest round, "
    "--ckpt_path auto resumes it",
    "ThroughputMonitor": "would count rounds as batches; read time/samples_per_s of each round",
    "SpikeDetection": "gets no loss of a batch; use EarlyStopping with check_finite, or model.on_divergence",
}
"""Callbacks of Lightning that a round does not support, with the reason and a remedy."""

_NEVER_CALLED = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
"""Hooks of Lightning that are never called, because an executor runs the backward passes."""


def check_trainer(trainer: L.Trainer) -> None:
    """Check that a round supports the trainer's settings and callbacks.

    Raises:
        ConfigurationError: A setting or a callback is not supported.
    """
    given: Any = trainer  # Any, because mypy does not know all attributes of the trainer
    _check_callbacks(given.callbacks)
    synchronised = given._accelerator_connector._layer_sync is not None
    of_ranks = isinstance(given.strategy, SingleDeviceStrategy | CohortStrategy)
    short = str(given.precision) == "bf16-true"
    unscaled = not str(given.precision).startswith("16")
    every = given.check_val_every_n_epoch
    clips = getattr(given.gradient_clip_algorithm, "value", None)
    shown = {
        "strategy": type(given.strategy).__name__,
        "sync_batchnorm": True,
        "gradient_clip_algorithm": clips,
    }
    rounds = (
        "does not apply, as each batch is a round; leave it out, and use trainer.max_epochs for fewer rounds"
    )
    ignored = "would be ignored; use trainer.check_val_every_n_epoch, in rounds"
    reload = "would reload nothing: the data draw the clients' batches anew in each round; leave it out"
    clipping = "would clip nothing; use ClientGradientClipping"
    for setting, ok, remedy in (
        ("max_epochs", given.max_epochs != 0, "trains nothing; use at least 1 round"),
        ("strategy", of_ranks, "would mix the gradients of clients; use strategy: cohort"),
        ("sync_batchnorm", not synchronised, "would turn FedAvg into FBN; leave it out, or use FBN"),
        ("precision", unscaled, "scales losses; use bf16-mixed or 32-true"),
        ("precision", not short, "would count and average in 8 bits; use bf16-mixed or 32-true"),
        ("gradient_clip_val", not given.gradient_clip_val, clipping),
        ("gradient_clip_algorithm", clips is None, clipping),
        ("accumulate_grad_batches", given.accumulate_grad_batches == 1, _ACCUMULATION),
        ("fast_dev_run", given.fast_dev_run in (False, 1), "runs one round, not several; use true"),
        ("overfit_batches", given.overfit_batches == 0, rounds),
        ("limit_train_batches", given.limit_train_batches == 1, rounds),
        ("reload_dataloaders_every_n_epochs", not given.reload_dataloaders_every_n_epochs, reload),
        ("val_check_interval", given.val_check_interval == 1, ignored),
        ("check_val_every_n_epoch", every is None or every >= 1, "must be at least 1 round"),
    ):
        if not ok:
            value = shown[setting] if setting in shown else getattr(given, setting)
            raise ConfigurationError(f"trainer.{setting}: {value} {remedy}")


def _check_callbacks(callbacks: Iterable[L.Callback]) -> None:
    for callback in callbacks:
        if not isinstance(callback, L.Callback):
            raise ConfigurationError(
                f"trainer.callbacks: {callback!r} is no callback of lightning; give an object such as FixBN()"
            )
        name = type(callback).__name__
        for kind in type(callback).__mro__:
            if kind.__name__ in _REFUSED and kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
                raise ConfigurationError(f"trainer.callbacks: {name} {_REFUSED[kind.__name__]}")
        for hook in _NEVER_CALLED:
            if getattr(getattr(callback, hook), "__func__", None) is not getattr(L.Callback, hook):
                raise ConfigurationError(
                    f"trainer.callbacks: {name}.{hook} would never be called, as clients compute their gradients together; use "
                    "on_after_local_backward of a FederatedCallback"
                )
