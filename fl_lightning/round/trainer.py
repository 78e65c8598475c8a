"""What a federated round asks of Lightning's trainer."""

from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy

from fl_lightning.errors import ConfigurationError


@runtime_checkable
class ShowsLocalSteps(Protocol):
    """A progress bar that shows the local steps of a round."""

    def local_step(self, step: int, of: int) -> None:
        """Called when local step ``step`` (from 1) of ``of`` has its gradients."""


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


def allow_tf32(convolutions: bool, products: bool) -> tuple[bool, bool]:
    """Say whether CUDA may compute float32 convolutions and matrix products in TF32; torch allows the former by default.

    Args:
        convolutions: Whether cuDNN may.
        products: Whether cuBLAS may.

    Returns:
        What was allowed before, as arguments of this function.
    """
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products
    return before
