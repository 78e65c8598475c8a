"""Mean over all clients within a forward pass.

This mean is the only operation by which a forward pass combines clients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError


def mean_of_all(stacked: Tensor, clients: int) -> Tensor:
    """Return a tensor like ``stacked``, in which every row is the mean over the rows.

    Args:
        stacked: The clients' tensors, ``[C, ...]``.
        clients: Number of clients in the cohort.

    Raises:
        ConfigurationError: The number of rows C differs from ``clients``.
    """
    if len(stacked) != clients:
        raise ConfigurationError(
            f"cohort_mean: the forward pass runs {len(stacked)} of the cohort's {clients} clients; joint_executor() runs all"
        )
    return stacked.mean(0, keepdim=True).expand_as(stacked)


_mean: ContextVar[Callable[[Tensor, int], Tensor]] = ContextVar("_mean", default=mean_of_all)


@torch.library.custom_op("fl_lightning::cohort_mean", mutates_args=())
def cohort_mean(own: Tensor, clients: int) -> Tensor:
    """Return the mean of a tensor over all clients of the cohort, in a joint forward pass.

    A joint forward pass computes all clients together. A method requests it by
    ``needs_joint_forward``. In the backward pass, the gradients of all clients are averaged, too.
    All clients have equal weight, because their batches have equal shapes.

    Args:
        own: The client's tensor, any shape.
        clients: Number of clients in the cohort.

    Returns:
        The mean over the clients, with the shape of ``own``.

    Raises:
        ConfigurationError: The forward pass does not compute all clients of the cohort together.
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
    """Set the function that ``cohort_mean`` calls, until the ``with`` block ends.

    The arguments of ``mean`` are the stacked rows and the number of clients in the cohort.
    """
    token = _mean.set(mean)
    try:
        yield
    finally:
        _mean.reset(token)
