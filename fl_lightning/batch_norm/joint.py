"""Exchanges inside a forward pass: the one operation with which a layer sees the other clients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError


def mean_of_all(stacked: Tensor, clients: int) -> Tensor:
    """Mean over the rows of ``stacked [C, ...]``, for each of them.

    Args:
        stacked: The clients' tensors.
        clients: How many there have to be.

    Raises:
        ConfigurationError: There are more or fewer.
    """
    if len(stacked) != clients:
        raise ConfigurationError(
            f"cohort_mean: the forward pass runs {len(stacked)} of the cohort's {clients} clients; joint_executor() runs all"
        )
    return stacked.mean(0, keepdim=True).expand_as(stacked)


_mean: ContextVar[Callable[[Tensor, int], Tensor]] = ContextVar("_mean", default=mean_of_all)


@torch.library.custom_op("fl_lightning::cohort_mean", mutates_args=())
def cohort_mean(own: Tensor, clients: int) -> Tensor:
    """Mean of a tensor over all clients of the cohort, in a joint forward pass (``needs_joint_forward``).

    Its gradient is the mean of the clients' gradients: what a server returns that averages them in the backward pass.
    All clients count alike; in a joint forward pass their batches have equal shapes.

    Args:
        own: A client's tensor, any shape.
        clients: Size of the cohort; a mean over fewer clients would be that of another union.

    Returns:
        The mean over the clients, same shape.

    Raises:
        ConfigurationError: Called outside of a joint forward pass, or with a part of the cohort.
    """
    raise ConfigurationError(
        "cohort_mean: a client runs by itself, but the mean needs one forward pass over the whole cohort; use it in the "
        "first local step of a callback with needs_joint_forward = True"
    )


@cohort_mean.register_vmap
def _(info: Any, in_dims: tuple[int, None], own: Tensor, clients: int) -> tuple[Tensor, int]:
    return _mean.get()(own.movedim(in_dims[0], 0), clients), 0


@contextmanager
def averaging_by(mean: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
    """Let a function of the stacked rows and the size of the cohort give the mean in joint forward passes."""
    token = _mean.set(mean)
    try:
        yield
    finally:
        _mean.reset(token)
