"""What a federated round asks of Lightning's trainer."""

from typing import Protocol, runtime_checkable

import lightning as L
import torch

from fl_lightning.errors import ConfigurationError


@runtime_checkable
class ShowsLocalSteps(Protocol):
    """A progress bar that shows the local steps of a round."""

    def local_step(self, step: int, of: int) -> None:
        """Called when local step ``step`` (from 1) of ``of`` has its gradients."""


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse settings of the trainer that a federated round cannot keep.

    Raises:
        ConfigurationError: Several processes, scaled losses, or limits on batches, of which a round is one.
    """
    if trainer.world_size > 1:
        raise ConfigurationError(f"trainer.devices: {trainer.world_size} processes; use devices: 1 for now")
    if str(trainer.precision).startswith("16"):
        raise ConfigurationError(
            f"trainer.precision: {trainer.precision} scales losses; use bf16-mixed or 32-true"
        )
    for setting, value, ok in (
        ("overfit_batches", trainer.overfit_batches, trainer.overfit_batches == 0),  # type: ignore[attr-defined]  # set in a helper of the trainer
        ("limit_train_batches", trainer.limit_train_batches, trainer.limit_train_batches >= 1),
    ):
        if not ok:
            raise ConfigurationError(
                f"trainer.{setting}: {value} means nothing where a batch is a round; leave it out, and use "
                "trainer.max_epochs for fewer rounds"
            )


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
