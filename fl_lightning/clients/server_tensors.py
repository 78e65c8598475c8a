"""Hides the server's tensors while clients compute, as a client must not read them."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import nan

from torch import nn

from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError


class ServerTensors:
    """The tensors of the server's module that each client has its own of.

    Args:
        module: The server's module.
        cohort: The clients.
    """

    def __init__(self, module: nn.Module, cohort: RoundCohort) -> None:
        self.rows = cohort.params  # held, as its identity stands for this object
        server = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        own = [server[name] for name in (*cohort.params, *cohort.buffers)]
        self._hidden = [
            (x, x.data, x.new_full((), nan).expand(x.shape)) for x in own if x.is_floating_point()
        ]
        self._trained = {name: server[name] for name in cohort.trained_names}

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let the tensors hold NaN within the ``with`` block, so that what still reads them does not go unseen.

        Raises:
            ConfigurationError: A backward pass has given one of the tensors a gradient.
        """
        gradients = {name: tensor.grad for name, tensor in self._trained.items()}
        for tensor, _, hidden in self._hidden:
            tensor.grad, tensor.data = None, hidden
        try:
            yield
        finally:
            self._show()
        read = [name for name, tensor in self._trained.items() if tensor.grad is not None]
        for name, gradient in gradients.items():
            self._trained[name].grad = gradient
        if read:
            raise ConfigurationError(
                f"model: the loss of a client's step depends on {read[0]!r} of the server's model and not of the client's; reach it from self"
            )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the tensors have their values within the ``with`` block, inside of :meth:`hidden`."""
        self._show()
        try:
            yield
        finally:
            for tensor, _, hidden in self._hidden:
                tensor.data = hidden

    def _show(self) -> None:
        for tensor, value, _ in self._hidden:
            tensor.data = value
