"""The batches of a local step, with one batch per client."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fl_lightning.errors import CannotVectorize, ConfigurationError


class BatchStack:
    """Batches of one local step: one batch for each client that takes the step.

    A batch is any tree of tensors, usually ``(inputs, targets)``. Batches are stored as a list of
    trees, or as one tree of stacked tensors ``[C, b, ...]``. Each form is converted to the other on
    demand.
    """

    def __init__(self, *, batches: Sequence[Any] | None = None, stack: Any = None) -> None:
        self._batches = batches
        self._stack = stack

    def map(self, function: Callable[[Any], Any]) -> "BatchStack":
        """Apply a function to all batches, such as a move to another device."""
        if self._batches is None:
            return BatchStack(stack=function(self._stack))
        return BatchStack(batches=[function(batch) for batch in self._batches])

    def sizes(self) -> list[int]:
        """Return the number of samples in each client's batch."""
        if self._batches is None:
            clients, samples = _first_shape(self._stack, dimensions=2)[:2]
            return [samples] * clients
        return [_first_shape(batch, dimensions=1)[0] for batch in self._batches]

    def by_size(self) -> list[list[int]]:
        """Return the positions of all batches, in one list for each number of samples in a batch."""
        groups: dict[int, list[int]] = {}
        for position, size in enumerate(self.sizes()):
            groups.setdefault(size, []).append(position)
        return [*groups.values()]

    def is_finite(self) -> bool:
        """Return whether all values of all batches are finite."""
        leaves = tree_leaves(self._stack if self._batches is None else self._batches)
        return all(bool(leaf.isfinite().all()) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def batches(self) -> Sequence[Any]:
        """Return the batches as a list, with one batch per client."""
        if self._batches is None:
            leaves, spec = tree_flatten(self._stack)
            self._batches = [tree_unflatten(list(parts), spec) for parts in zip(*leaves, strict=True)]
        return self._batches

    def stack(self) -> Any:
        """Return the batches as one tree of stacked tensors ``[C, b, ...]``.

        Raises:
            CannotVectorize: The clients' batches differ in shape, or have parts that are no tensors.
        """
        if self._stack is None:
            assert self._batches is not None
            flat = [tree_flatten(batch) for batch in self._batches]
            for part in (part for leaves, _ in flat for part in leaves if not isinstance(part, torch.Tensor)):
                raise CannotVectorize(f"the clients' batches have a {type(part).__name__} beside tensors")
            require_one([tuple(tuple(leaf.shape) for leaf in leaves) for leaves, _ in flat])
            columns = zip(*(leaves for leaves, _ in flat), strict=True)
            self._stack = tree_unflatten([torch.stack(column) for column in columns], flat[0][1])
        return self._stack

    def union(self) -> "BatchStack":
        """Concatenate all batches along dimension 0 to a batch of a single client."""
        if self._batches is None:
            return BatchStack(stack=tree_map(lambda leaf: leaf.flatten(0, 1)[None], self._stack))
        return BatchStack(batches=[tree_map(lambda *leaves: torch.cat(leaves), *self._batches)])


def copied(batch: Any) -> Any:
    """Return a batch with copies of the tensors, because a forward pass may change its inputs."""
    return tree_map(lambda part: part.clone() if isinstance(part, torch.Tensor) else deepcopy(part), batch)


def require_one(shapes: Iterable[Any]) -> None:
    """Raise ``CannotVectorize`` if the clients' batches have different shapes."""
    if (kinds := len(set(shapes))) > 1:
        raise CannotVectorize(f"the clients' batches have {kinds} different shapes")


def describe_batch(batch: Any) -> str:
    """Describe a batch in words, such as ``float32 [8, 3, 32, 32] and int64 [8] from 0 to 9``."""
    return " and ".join(_describe(leaf) for leaf in tree_leaves(batch))


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    text = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    whole = not (leaf.is_floating_point() or leaf.is_complex())
    if not whole or not leaf.numel() or torch._C._functorch.is_batchedtensor(leaf):
        return text
    # long: torch has no minimum of uint16
    return f"{text} from {leaf.long().min()} to {leaf.long().max()}"


def _first_shape(batch: Any, dimensions: int) -> torch.Size:
    """Return the shape of the first tensor with so many dimensions. A scalar, such as a temperature, is passed over."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if tensor.dim() >= dimensions:
            return tensor.shape
    if tensors:
        raise ConfigurationError(
            "data: a training batch has no tensor with a dimension of samples; make each tensor [samples, ...]"
        )
    raise ConfigurationError(
        f"data: a training batch is a {type(batch).__name__} without tensors; use a tensor, or a tuple, list or dict of tensors"
    )
