"""BN of all clients at once under ``torch.func.vmap``.

By default, ``vmap`` normalises, multiplies by gamma and adds beta in separate operations. This
doubles the passes over the activations, and the memory for the backward pass. This module computes
BN in a single operation. BN treats channels independently. ``C`` clients with ``F`` channels
therefore need one BN layer with ``C F`` channels. Results differ only by rounding.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType, is_batchedtensor, peek_interpreter_stack
from torch.overrides import TorchFunctionMode


class StackedBatchNorm(TorchFunctionMode):
    """Context manager that makes ``batch_norm`` under ``vmap`` one operation for all clients."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, but replace ``batch_norm``."""
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
    one_value = training and input.numel() == input.shape[1]  # F.batch_norm refuses such inputs
    if not inside or one_value or not all(map(is_batchedtensor, (input, *statistics))):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    output: Tensor = _Stacked.apply(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return output


class _Stacked(torch.autograd.Function):
    """Autograd function that has a ``vmap`` rule, but no forward and backward pass.

    Autograd differentiates the operations in the rule.
    """

    @staticmethod
    def setup_context(*args: Any) -> None:
        """Do nothing. The method exists only because torch requires it."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """Normalise the stacked inputs of all clients.

        ``in_dims`` has the client dimension of each argument, or None if all clients share it.
        """
        stacked = args[0].movedim(in_dims[0], 1)
        batch, clients, channels, *space = stacked.shape
        training, momentum, eps = args[5:]
        statistics = args[1:3]
        if training and any(
            d is None and s is not None for d, s in zip(in_dims[1:3], statistics, strict=True)
        ):
            raise RuntimeError("vmap: running statistics that all clients share cannot be updated by each")
        mean, var, weight, bias = (
            _joined(vector, dim, clients) for vector, dim in zip(args[1:5], in_dims[1:5], strict=True)
        )
        joined = stacked.reshape(batch, clients * channels, *space)
        normalised = F.batch_norm(joined, mean, var, weight, bias, training, momentum, eps)
        for buffer, dim, updated in zip(statistics, in_dims[1:3], (mean, var), strict=True):
            if training and updated is not None and not _share_memory(buffer, updated):
                buffer.movedim(dim, 0).copy_(updated.view(clients, channels))
        return normalised.view(batch, clients, channels, *space), 1


def _share_memory(first: Tensor, second: Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _joined(vector: Tensor | None, dim: int | None, clients: int) -> Tensor | None:
    """Concatenate the vectors of all clients. The result is a view if possible."""
    if vector is None:
        return None
    return (vector.expand(clients, -1) if dim is None else vector.movedim(dim, 0)).reshape(-1)
