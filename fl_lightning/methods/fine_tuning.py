"""Fine-tuning of copies of the server's model on clients' data, for evaluations."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning.batch_norm.swapping import batch_statistics
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.randomness import derive_seed, seeded

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule


def fine_tuned(
    pl_module: "FederatedModule", client: int, epochs: int, only: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Train a copy of the server's model on a client's data, and return its state.

    The client optimizer trains all trainable parameters with the initial learning rate. The setting
    ``parameter_groups`` has no effect, and dropout is off. The loss includes the terms of
    ``add_loss``. BN layers use batch statistics, even if the run has frozen statistics. Fine-tuning
    does not change the server's model or the random numbers of training.

    Args:
        pl_module: The federated module.
        client: Id of the client.
        epochs: Number of passes over the client's training data, at least 0.
        only: Names of the parameters to train. BN layers then use running statistics. Default: all
            trainable parameters.

    Returns:
        Parameters and buffers by name, on the CPU.
    """
    model, data = pl_module.model, pl_module.data
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        seeded(derive_seed(pl_module.seed, "fine-tuning", client)),
        batch_statistics(pl_module.tracking_layers if only is None else [], track=True),
    ):
        state = {
            name: value.detach()
            .clone()
            .requires_grad_(value.requires_grad and (only is None or name in only))
            for name, value in (*model.named_parameters(), *model.named_buffers())
        }
        optimizer = pl_module.client.optimizer([value for value in state.values() if value.requires_grad])
        slots = StateSlots(model)
        with slots.filled(state):
            for step in range(epochs * data.steps_per_epoch(client)):
                batch = data.cohort_batch([client], [step]).map(pl_module.on_device).batches()[0]
                optimizer.zero_grad()
                pl_module.client.losses_apart(batch)[1].backward()  # type: ignore[no-untyped-call]  # torch gives it no types
                optimizer.step()
            state = slots.read(state)  # a layer may assign its buffers
    return {name: value.detach().cpu() for name, value in state.items()}
