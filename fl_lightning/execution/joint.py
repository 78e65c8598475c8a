"""Executor for local steps in which all clients share one forward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fl_lightning.batch_norm.joint import averaging_by, mean_of_all
from fl_lightning.client_data.batches import BatchStack, require_one
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.execution.base import ClientTask
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.ranks import Ranks


def joint_executor(method: str, ranks: Ranks | None = None) -> VectorizedExecutor:
    """Return the executor for a local step in which all clients share one forward pass.

    Args:
        method: Name of the method, for error messages.
        ranks: The ranks of the run. Each rank computes some of the clients. Default: this process
            computes all clients.
    """
    return _JointExecutor(method, ranks or Ranks())


class _JointExecutor(VectorizedExecutor):
    _in_blocks = False

    def __init__(self, method: str, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self.user = f"the joint forward pass of {method} in the first local step"
        self.instead = "a batch_size that each client's samples fill"

    def backward(
        self, module: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        if self._ranks.size == 1:
            return super().backward(module, cohort, batch, rows)
        with averaging_by(self._mean):
            return super().backward(module, cohort, batch, rows)

    def _stack(self, batch: BatchStack) -> Any:
        stack = batch.stack()
        require_one(self._ranks.exchange(lambda: tuple(leaf.shape[1:] for leaf in tree_leaves(stack))))
        return stack

    def _mean(self, own: Tensor, clients: int) -> Tensor:
        """Return the mean of a tensor over the clients of all ranks.

        In the backward pass, the gradients of all clients are averaged as well.
        """
        mean = own.clone()
        with torch.no_grad():
            mean.copy_(self._mean_of_values(own, clients))
        if mean.requires_grad:
            mean.register_hook(lambda gradients: self._mean_of_values(gradients, clients))  # type: ignore[no-untyped-call]  # torch gives it no types
        return mean

    def _mean_of_values(self, own: Tensor, clients: int) -> Tensor:
        sent = own.detach()[: len(self._ranks.share(clients))].cpu()
        # clone, because pickle would write the whole storage of a view
        everyone = torch.cat(self._ranks.exchange(sent.clone))
        return mean_of_all(everyone.to(own.device), clients)[:1].expand_as(own)
