"""The check of the trainer's settings."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy

from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.strategy import CohortStrategy


def check_trainer(trainer: L.Trainer) -> None:
    """Raise ``ConfigurationError`` for trainer settings that a round does not support."""
    given: Any = trainer  # mypy misses attributes that the trainer's helpers set
    averaging = [type(x).__name__ for x in given.callbacks if isinstance(x, StochasticWeightAveraging)]
    synchronised = given._accelerator_connector._layer_sync is not None
    of_ranks = isinstance(given.strategy, SingleDeviceStrategy | CohortStrategy)
    short = str(given.precision) == "bf16-true"
    unscaled = not str(given.precision).startswith("16")
    every = given.check_val_every_n_epoch
    shown = {
        "strategy": type(given.strategy).__name__,
        "sync_batchnorm": True,
        "callbacks": ", ".join(averaging),
    }
    rounds = (
        "does not apply, as each batch is a round; leave it out, and use trainer.max_epochs for fewer rounds"
    )
    ignored = "would be ignored; use trainer.check_val_every_n_epoch, in rounds"
    for setting, ok, remedy in (
        ("max_epochs", given.max_epochs != 0, "trains nothing; use at least 1 round"),
        ("strategy", of_ranks, "would mix the gradients of clients; use strategy: cohort"),
        ("sync_batchnorm", not synchronised, "would turn FedAvg into FBN; leave it out, or use FBN"),
        ("precision", unscaled, "scales losses; use bf16-mixed or 32-true"),
        ("precision", not short, "would count and average in 8 bits; use bf16-mixed or 32-true"),
        ("gradient_clip_val", not given.gradient_clip_val, "would clip nothing; use ClientGradientClipping"),
        ("overfit_batches", given.overfit_batches == 0, rounds),
        ("limit_train_batches", given.limit_train_batches == 1, rounds),
        ("val_check_interval", given.val_check_interval == 1, ignored),
        ("check_val_every_n_epoch", every is None or every >= 1, "must be at least 1 round"),
        ("callbacks", not averaging, "adds an extra round; use a server optimizer with momentum"),
    ):
        if not ok:
            value = shown[setting] if setting in shown else getattr(given, setting)
            raise ConfigurationError(f"trainer.{setting}: {value} {remedy}")
