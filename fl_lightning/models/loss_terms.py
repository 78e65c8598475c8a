"""Terms that layers of a model add to a client's loss, such as penalties on activations."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fl_lightning.errors import ConfigurationError

_OPEN: list[list[Tensor]] = []
"""Lists of loss terms, one for each current forward pass.

The terms are in lists, because a compiled pass can trace a list within one graph.
"""


def add_loss(term: Tensor) -> None:
    """Add a term to the loss of the current local step.

    A layer calls this function in its forward pass. The term changes the gradient, but it is not
    part of the reported training loss. Terms are ignored outside of local steps, that is, in
    evaluations and passes over the data.

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
    """Yield a list that collects all terms of :func:`add_loss` until the ``with`` block ends."""
    _OPEN.append([])
    try:
        yield _OPEN[-1]
    finally:
        _OPEN.pop()
