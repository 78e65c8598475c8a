"""Stacked client state as an executor needs it: parameters, gradients and buffers of some clients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.cohort.rows import Rows, consecutive


class RowState(NamedTuple):
    """One client's state as views of stacked rows.

    Attributes:
        tensors: Parameters, as autograd leaves, and buffers by name.
        trained: The parameters that are trained.
        gradients: Where their gradients go.
    """

    tensors: dict[str, Tensor]
    trained: list[Tensor]
    gradients: list[Tensor]


class ClientRows:
    """What forward and backward passes of a round's clients read and write; row i belongs to ``client_ids[i]``.

    Args:
        params: Parameters, ``[C, *shape]`` by name.
        grads: Gradients of the present local step, likewise.
        buffers: Buffers, likewise.

    Attributes:
        client_ids: The clients, in increasing order.
        round: The communication round, from 1.
        step: The present local step, from 0.
        trained_blocks: The parameter blocks that are trained in this round, from :meth:`train_blocks`.
        trained_names: The parameters in them.
    """

    def __init__(self, params: Rows, grads: Rows, buffers: Rows) -> None:
        self.params, self.grads, self.buffers = params, grads, buffers
        self.client_ids: list[int] = []
        self.round = self.step = 0
        self.trained_blocks: list[str] = []
        self.trained_names: list[str] = []
        self._row_state: dict[int, RowState] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def index(self, rows: list[int]) -> slice | Tensor:
        """Ascending rows as an index into stacked tensors, which no device has to be waited for.

        A slice where they follow each other; others lie on the cohort's device until the round is over.
        """
        found = consecutive(rows)
        if isinstance(found, slice):
            return found
        key = tuple(rows)
        if key not in self._indices:
            index = torch.tensor(rows)
            device = next(iter(self.params.blocks.values())).device
            if device.type == "cuda":
                index = index.pin_memory().to(device, non_blocking=True)
            self._indices[key] = index
        return self._indices[key]

    def indices(self) -> list[Tensor]:
        """What :meth:`index` has given in this round, without slices."""
        return list(self._indices.values())

    def train_blocks(self, blocks: Sequence[str]) -> None:
        """Say which parameter blocks are trained in this round; others get no gradient."""
        self.trained_blocks = list(blocks)
        self.trained_names = [name for block in blocks for name in self.params.layout[block].shapes]
        self._row_state.clear()

    def row_state(self, row: int) -> RowState:
        """One client's state for a forward and backward pass of its own; made once and kept."""
        if row not in self._row_state:
            leaves = {name: value.detach().requires_grad_() for name, value in self.params.row(row).items()}
            gradients = self.grads.row(row)
            self._row_state[row] = RowState(
                tensors={**leaves, **self.buffers.row(row)},
                trained=[leaves[name] for name in self.trained_names],
                gradients=[gradients[name] for name in self.trained_names],
            )
        return self._row_state[row]
