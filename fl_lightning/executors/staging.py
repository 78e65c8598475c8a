"""Shared memory through which a worker process gets its batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fl_lightning.executors.worker import StagedBatches


class Staging:
    """Keeps memory for batches of one structure and shape, which a step overwrites and the worker reads in place."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._kind: Any = None

    def put(self, batches: Sequence[Any]) -> StagedBatches | list[Any]:
        """Put batches where the worker reads them; those that differ in shape are to be sent as they are.

        Args:
            batches: One batch for each row of the worker.
        """
        flat = [tree_flatten(batch) for batch in batches]
        kinds = [(spec, [_kind(leaf) for leaf in leaves]) for leaves, spec in flat]
        if any(kind != kinds[0] for kind in kinds) or None in kinds[0][1]:
            return list(batches)
        new = kinds[0] != self._kind or len(batches) > len(self._memory[0])
        if new:
            self._kind = kinds[0]
            self._memory = [_shared_like(leaf, len(batches)) for leaf in flat[0][0]]
        for index, (leaves, _) in enumerate(flat):
            for target, leaf in zip(self._memory, leaves, strict=True):
                target[index].copy_(leaf)
        return StagedBatches(flat[0][1], self._memory if new else None)


def to_shared_memory(tensor: Tensor) -> None:
    """Move a tensor, in place and with all its views, into memory that other processes can map."""
    tensor.data.share_memory_()  # type: ignore[no-untyped-call]  # torch gives it no types


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.stride()) if torch.is_tensor(leaf) else None


def _shared_like(tensor: Tensor, count: int) -> Tensor:
    """Shared memory ``[count, *shape]`` for tensors like the given one, in its memory format."""
    strides = torch.empty_like(tensor, device="meta").stride()
    memory = torch.empty(count * tensor.numel(), dtype=tensor.dtype)
    to_shared_memory(memory)
    return memory.as_strided((count, *tensor.shape), (tensor.numel(), *strides))
