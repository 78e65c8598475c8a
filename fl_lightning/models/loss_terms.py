"""Loss terms from layers of a model, such as penalties on activations."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fl_lightning.errors import ConfigurationError

_OPEN: list[list[Tensor]] = []
"""Stack of lists that collect the loss terms of the current forward passes.

torch.compile can trace appending to a list within one graph.
"""


def add_loss(term: Tensor) -> None:
    """Add a term to the loss of the current local step.

    A layer calls this function in its forward pass. The term changes the gradient, but not the
    reported training loss. Outside of local steps, such as in evaluations, terms are ignored.

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
    """Yield a list that collects all terms from :func:`add_loss` until the ``with`` block ends."""
    _OPEN.append([])
    try:
        yield _OPEN[-1]
    finally:
        _OPEN.pop()
