"""What a federated round asks of Lightning's trainer."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy

from fl_lightning.errors import ConfigurationError


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse settings of the trainer that a federated round cannot keep.

    Raises:
        ConfigurationError: Rounds of none or more than all clients' batches, several processes, scaled losses, or a
            setting that would be ignored.
    """
    given: Any = trainer  # several are set in helpers of the trainer
    averaging = [type(x).__name__ for x in given.callbacks if isinstance(x, StochasticWeightAveraging)]
    synchronised = given._accelerator_connector._layer_sync is not None
    rounds = (
        "means nothing where a batch is a round; leave it out, and use trainer.max_epochs for fewer rounds"
    )
    every = given.check_val_every_n_epoch
    for setting, value, ok, remedy in (
        ("max_epochs", given.max_epochs, given.max_epochs != 0, "trains nothing; use at least 1 round"),
        ("num_nodes", given.num_nodes, given.num_nodes == 1, "is not possible yet; use num_nodes: 1"),
        ("devices", given.world_size, given.world_size == 1, "is not possible yet; use devices: 1"),
        (
            "strategy",
            type(given.strategy).__name__,
            isinstance(given.strategy, SingleDeviceStrategy),
            "is for several processes; leave it out",
        ),
        ("sync_batchnorm", True, not synchronised, "is for several processes; leave it out, or use FBN"),
        (
            "precision",
            given.precision,
            not str(given.precision).startswith("16"),
            "scales losses; use bf16-mixed or 32-true",
        ),
        (
            "gradient_clip_val",
            given.gradient_clip_val,
            not given.gradient_clip_val,
            "would clip nothing; use the callback ClientGradientClipping",
        ),
        ("overfit_batches", given.overfit_batches, given.overfit_batches == 0, rounds),
        ("limit_train_batches", given.limit_train_batches, given.limit_train_batches == 1, rounds),
        (
            "val_check_interval",
            given.val_check_interval,
            given.val_check_interval == 1,
            "would be ignored; use trainer.check_val_every_n_epoch, in rounds",
        ),
        ("check_val_every_n_epoch", every, every is None or every >= 1, "must be at least 1 round"),
        (
            "callbacks",
            ", ".join(averaging),
            not averaging,
            "trains a round of its own beyond the last; use a server optimizer with momentum",
        ),
    ):
        if not ok:
            raise ConfigurationError(f"trainer.{setting}: {value} {remedy}")
