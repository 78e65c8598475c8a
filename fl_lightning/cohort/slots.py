"""Replacement of the server model's parameters and buffers by a client's in a forward pass."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class StateSlots:
    """The entries of a model's parameters and buffers, which can hold a client's tensors.

    Args:
        model: The server's model. Tied tensors have several entries.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._places: list[tuple[dict[str, Any], str, str, Tensor]] = [
            (store, attribute, names[id(tensor)], tensor)
            for module in model.modules()
            for store in (module._parameters, module._buffers)
            for attribute, tensor in store.items()
            if tensor is not None
        ]
        self._place_of = {name: (store, attribute) for store, attribute, name, _ in self._places}

    @contextmanager
    def filled(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the server's tensors by ``tensors`` (by qualified name) within the block."""
        try:
            for store, attribute, name, server in self._places:
                store[attribute] = tensors.get(name, server)
            yield
        finally:
            for store, attribute, _, server in self._places:
                store[attribute] = server

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the model's current tensors by name; a forward pass may have replaced them."""
        places = ((name, *self._place_of[name]) for name in names)
        return {name: store[attribute] for name, store, attribute in places}
