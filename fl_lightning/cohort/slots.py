"""Temporary replacement of the server model's tensors by the tensors of a client."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class StateSlots:
    """Slots of a model: the entries in the modules' dicts of parameters and buffers.

    A client's tensors can be put into these slots.

    Args:
        model: The server's model. A tensor that several modules share has several slots.
        tensors: The parameters and buffers by name, if the caller knows them.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> None:
        if tensors is None:
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        names = {id(tensor): name for name, tensor in tensors.items()}
        self._places: list[tuple[dict[str, Any], str, str, Tensor]] = [
            (store, attribute, names[id(tensor)], tensor)
            for module in model.modules()
            for store in (module._parameters, module._buffers)
            for attribute, tensor in store.items()
            if tensor is not None and id(tensor) in names
        ]
        self._place_of = {name: (store, attribute) for store, attribute, name, _ in self._places}

    @contextmanager
    def filled(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Put a client's tensors into the model's slots until the ``with`` block ends.

        Args:
            tensors: The tensors by qualified name. Slots without a new tensor keep the server's
                tensor.
        """
        try:
            for store, attribute, name, server in self._places:
                store[attribute] = tensors.get(name, server)
            yield
        finally:
            for store, attribute, _, server in self._places:
                store[attribute] = server

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors that are in the slots now.

        A forward pass may have replaced some tensors.
        """
        places = ((name, *self._place_of[name]) for name in names)
        return {name: store[attribute] for name, store, attribute in places}

    def get(self, name: str) -> Tensor:
        """Return the tensor that is in the slots of a name now."""
        store, attribute = self._place_of[name]
        tensor: Tensor = store[attribute]
        return tensor

    def put(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into all slots of this name."""
        for store, attribute, slot, _ in self._places:
            if slot == name:
                store[attribute] = tensor
