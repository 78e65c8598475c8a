"""Where a client's parameters and buffers hang in the server's model while its loss is computed."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class StateSlots:
    """The places in a model's modules where its parameters and buffers hang, so that a client's can hang there instead.

    Args:
        model: The server's model. Tied parameters and buffers fill several places.
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
        """Hang ``tensors`` (by qualified name; absent names stay the server's) and take them off again."""
        try:
            for store, attribute, name, own in self._places:
                store[attribute] = tensors.get(name, own)
            yield
        finally:
            for store, attribute, _, own in self._places:
                store[attribute] = own

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What hangs in the model now under the given names, after a forward pass may have changed or replaced it."""
        places = ((name, *self._place_of[name]) for name in names)
        return {name: store[attribute] for name, store, attribute in places}
