"""Loss terms that a model's layers add to a client's loss, such as penalties on activations."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fl_lightning.errors import ConfigurationError

_OPEN: list[list[Tensor]] = []
"""Loss terms of the current forward passes, one list per pass.

This is a list, because a compiled pass can trace a list within one graph.
"""


def add_loss(term: Tensor) -> None:
    """Add a term to the loss of the current local step.

    A layer calls this function in its forward pass. The term changes the gradient, but the reported
    training loss excludes it. Outside of local steps (in evaluations and passes over the data)
    terms are ignored.

    Args:
        term: A scalar tensor, computed from activations, parameters or buffers of one client.

    Raises:
        ConfigurationError: The term is not a scalar.
    """
    if not _OPEN:
        return
    if term.dim():
        raise ConfigurationError(
            f"add_loss: a term of the shape {list(term.shape)} is no scalar; take its mean"
        )
    _OPEN[-1].append(term)


@contextmanager
def collecting() -> Iterator[list[Tensor]]:
    """Yield a list that collects all terms added by :func:`add_loss` inside the block."""
    _OPEN.append([])
    try:
        yield _OPEN[-1]
    finally:
        _OPEN.pop()
