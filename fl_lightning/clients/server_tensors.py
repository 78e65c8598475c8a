"""Hides the server's tensors while clients compute, as a client must not read them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import nan
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.overrides import TorchFunctionMode

from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import CannotVectorize, ConfigurationError

_NO_VALUES = {
    "shape", "dtype", "device", "layout", "ndim", "names", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_sparse",
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex", "is_contiguous",
    "__len__", "__hash__", "type",
}  # fmt: skip
"""Names of attributes and methods of a tensor that do not depend on its values."""


class ServerTensors:
    """The tensors of the server's module that each client has its own of.

    Args:
        module: The server's module.
        cohort: The clients.
    """

    def __init__(self, module: nn.Module, cohort: RoundCohort) -> None:
        self.rows = cohort.params  # held, as its identity stands for this object
        server = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._names = {id(server[name]): name for name in (*cohort.params, *cohort.buffers)}
        own = [server[name] for name in self._names.values()]
        self._hidden = [
            (x, x.data, x.new_full((), nan).expand(x.shape)) for x in own if x.is_floating_point()
        ]
        self._trained = {name: server[name] for name in cohort.trained_names}

    @contextmanager
    def unread(self, remedy: str) -> Iterator[None]:
        """Hide the tensors from several clients at once within the ``with`` block.

        Args:
            remedy: Words for what to do, for a message.

        Raises:
            CannotVectorize: A step reads one of the tensors.
        """
        with self.hidden(), _Unread(self._names, remedy):
            yield

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


class _Unread(TorchFunctionMode):
    """Refuses operations on the server's tensors, and answers ``requires_grad`` under vmap as outside of it."""

    def __init__(self, names: dict[int, str], remedy: str) -> None:
        super().__init__()
        self._names, self._remedy = names, remedy

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "requires_grad" and is_batchedtensor(args[0]):
            tensor: Tensor = args[0]
            while is_batchedtensor(tensor):
                tensor = get_unwrapped(tensor)
            return tensor.requires_grad
        if name not in _NO_VALUES:
            for given in (*args, *kwargs.values()):
                for tensor in given if isinstance(given, list | tuple) else (given,):
                    if id(tensor) in self._names:
                        raise CannotVectorize(
                            f"model: a step reads {self._names[id(tensor)]!r} of the server's model and not of the client's, by another way "
                            f"than self; {self._remedy}"
                        )
        return func(*args, **kwargs)
