"""What a module holds beside the tensors of its clients, for those who run a copy or a recording of it."""

from collections.abc import Collection
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.executors.base import ClientTask

Attributes = dict[str, Any]
"""Numbers and words that a part of a module holds, alone or in lists and dicts, by name."""

_SIMPLE = frozenset({bool, int, float, str, type(None)})


def attributes_of(module: ClientTask) -> list[Attributes]:
    """What a module and each of its parts hold beside tensors, as far as it is numbers and words, or lists and dicts of them."""
    return [
        {
            name: value if type(value) in _SIMPLE else _copy(value)
            for name, value in vars(part).items()
            if name[0] != "_" and (type(value) in _SIMPLE or _is_plain(value))
        }
        for part in module.modules()
    ]


def objects_of(module: ClientTask) -> list[Any]:
    """What else the model and the loss consist of: their parts, and what these hold that :func:`attributes_of` leaves out."""
    parts = list(module.modules())
    held = [
        value
        for part in parts[1:]
        for name, value in vars(part).items()
        if name[0] != "_" and type(value) not in _SIMPLE and not _is_plain(value)
    ]
    return [*parts, getattr(module, "loss", None), *held]


def common_tensors(module: ClientTask, stacked: Collection[str]) -> list[Tensor]:
    """The tensors that all clients have in common, such as frozen parameters or class weights of the loss.

    Args:
        module: The federated module.
        stacked: Names of the model's tensors of which each client has its own.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    common = [tensor for name, tensor in named if name.removeprefix("model.") not in stacked]
    return common + [each for each in objects_of(module) if torch.is_tensor(each) and each.is_leaf]


class ModuleState(NamedTuple):
    """What a module consisted of at some moment.

    Attributes:
        objects: What :func:`objects_of` gave.
        attributes: What :func:`attributes_of` gave.
        names: The names of its parts.
    """

    objects: list[Any]
    attributes: list[Attributes]
    names: list[str]

    def has_objects_of(self, other: "ModuleState | None") -> bool:
        """Whether the other one consists of the very same objects under the same names."""
        if self is other:
            return True
        if other is None or len(self.objects) != len(other.objects):
            return False
        return self.names == other.names and all(map(is_, self.objects, other.objects))


class ModuleStateReader:
    """Takes the state of a module again and again, and looks closely only where something was put in another's place.

    A module that nobody has changed, which is what a step usually finds, costs a comparison of references.
    """

    def __init__(self) -> None:
        self._state: ModuleState | None = None
        self._seen: list[tuple[nn.Module, list[str], list[Any], list[tuple[str, nn.Module | None]]]] = []
        self._containers: list[tuple[Any, bool, Any]] = []

    def read(self, module: ClientTask) -> ModuleState:
        """What the module consists of now: the same object as before, if nothing was changed."""
        if self._state is None or self._state.objects[0] is not module or self._has_changed():
            parts = list(module.modules())
            self._seen = [
                (part, list(vars(part)), list(vars(part).values()), list(part._modules.items()))
                for part in parts
            ]
            containers = [
                value
                for part in parts
                for name, value in vars(part).items()
                if name[0] != "_" and _can_change_inside(value)
            ]
            plain = [(value, _is_plain(value)) for value in containers]
            self._containers = [(value, known, _copy(value) if known else None) for value, known in plain]
            names = [name for name, _ in module.named_modules()]
            self._state = ModuleState(objects_of(module), attributes_of(module), names)
        return self._state

    def _has_changed(self) -> bool:
        for part, names, values, children in self._seen:
            held = vars(part)
            if list(held) != names or not all(map(is_, held.values(), values)):
                return True
            if list(part._modules.items()) != children:  # modules are equal where they are the same
                return True
        return any(
            _is_plain(value) != plain or (plain and value != copy) for value, plain, copy in self._containers
        )


def _can_change_inside(value: Any) -> bool:
    """Whether it is a list, a dict, or a tuple that may hold one."""
    if type(value) is tuple:
        return not all(type(each) in _SIMPLE for each in value)
    return type(value) in (dict, list)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _SIMPLE


def _copy(value: Any) -> Any:
    """A copy that does not change when the original does."""
    if type(value) is dict:
        return {key: _copy(each) for key, each in value.items()}
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value
