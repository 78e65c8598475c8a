"""Exchanges inside a forward pass: the one operation with which a layer sees the other clients."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError

_one_for_all: ContextVar[bool] = ContextVar("_one_for_all", default=False)


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
    if info.batch_size != (1 if _one_for_all.get() else clients):
        raise ConfigurationError(
            f"cohort_mean: the forward pass runs {info.batch_size} of the cohort's {clients} clients; a joint forward pass "
            "needs all of them at once, as joint_executor() gives it"
        )
    return own.mean(in_dims[0], keepdim=True).expand_as(own), in_dims[0]


@contextmanager
def one_client_for_all() -> Iterator[None]:
    """Let one client with the union of all batches stand for the cohort in a joint forward pass."""
    token = _one_for_all.set(True)
    try:
        yield
    finally:
        _one_for_all.reset(token)
