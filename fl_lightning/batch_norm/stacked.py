"""A BN layer of all clients at once: one batch normalisation over clients x channels, where ``torch.func.vmap`` takes apart.

``vmap`` normalises without scale and shift and applies these afterwards, which doubles the passes over the activations and
what is kept of them for the backward pass. Every client's channels are independent of the others', so that ``C`` clients
with ``F`` channels are one layer with ``C F`` channels, to rounding.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType, is_batchedtensor, peek_interpreter_stack
from torch.overrides import TorchFunctionMode


class StackedBatchNorm(TorchFunctionMode):
    """While this is entered, ``batch_norm`` inside of ``vmap`` is one operation for all clients."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, or what takes its place."""
        if func is F.batch_norm:
            func = _batch_norm
        return func(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    innermost = peek_interpreter_stack()
    inside = innermost is not None and innermost.key() == TransformType.Vmap
    statistics = [each for each in (running_mean, running_var) if each is not None]
    one_value = training and input.numel() == input.shape[1]  # an error that torch words
    if not inside or one_value or not all(map(is_batchedtensor, (input, *statistics))):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    found: Tensor = _Stacked.apply(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return found


class _Stacked(torch.autograd.Function):
    """Only its ``vmap`` is ever run, which is differentiable as it stands; there is no forward pass of its own."""

    @staticmethod
    def setup_context(*args: Any) -> None:
        """Keep nothing: torch asks for this method before it looks for ``vmap``."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """Normalise an input that has one more dimension, that of the clients, at ``in_dims[0]``; so have the others."""
        stacked = args[0].movedim(in_dims[0], 1)
        batch, clients, channels, *space = stacked.shape
        training, momentum, eps = args[5:]
        if training and None in [
            dim for dim, own in zip(in_dims[1:3], args[1:3], strict=True) if own is not None
        ]:
            raise RuntimeError("vmap: running statistics that all clients share cannot be updated by each")
        mean, var, weight, bias = (
            _joined(vector, dim, clients) for vector, dim in zip(args[1:5], in_dims[1:5], strict=True)
        )
        whole = stacked.reshape(batch, clients * channels, *space)
        found = F.batch_norm(whole, mean, var, weight, bias, training, momentum, eps)
        for own, dim, updated in zip(args[1:3], in_dims[1:3], (mean, var), strict=True):
            if training and updated is not None and not _share_memory(own, updated):
                own.movedim(dim, 0).copy_(updated.view(clients, channels))
        return found.view(batch, clients, channels, *space), 1


def _share_memory(first: Tensor, second: Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _joined(vector: Tensor | None, dim: int | None, clients: int) -> Tensor | None:
    """The vectors of all clients one after the other, in the same memory where they lie so."""
    if vector is None:
        return None
    return (vector.expand(clients, -1) if dim is None else vector.movedim(dim, 0)).reshape(-1)
