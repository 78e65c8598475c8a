"""Loss terms that a model's layers add to a client's loss, such as penalties on activations."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fl_lightning.errors import ConfigurationError

_OPEN: list[list[Tensor]] = []
"""The terms of the current passes; a list, which a compiled pass can trace within one graph."""


def add_loss(term: Tensor) -> None:
    """Add a term to the loss of the current local step, for its gradient only.

    A layer calls the function in its forward pass. The reported training loss lacks the term.
    Outside of local steps, as in evaluations and passes over the data, terms are ignored.

    Args:
        term: A scalar, a function of activations, parameters or buffers of one client.

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
    """Yield the list of the terms that :func:`add_loss` adds inside the block."""
    _OPEN.append([])
    try:
        yield _OPEN[-1]
    finally:
        _OPEN.pop()
