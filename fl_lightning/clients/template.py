"""Copies of a module, which share code and data with it, and have other tensors."""

import gc
import io
import pickle
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

_SHARED = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    L.Trainer,
    L.Callback,
    L.LightningDataModule,
    Dataset,
    DataLoader,
    torch.dtype,
    torch.device,
)
"""Types of which copies share the objects."""

_CLOSED = (*_SHARED, str, int, float, bytes)
_numbered: ContextVar[Callable[[int], Any]] = ContextVar("_numbered")


class Template:
    """The structure of a module, for making copies.

    Copies are made by pickle. Lists of parameters, helper objects and bound methods of a copy
    refer to the copy's own parts. Functions that reach the module by a closure or a default value
    are made anew for the copy. Copies share all other functions, and classes, data sets, the trainer
    and callbacks. They also share objects that pickle cannot copy, such as locks.

    Args:
        module: The module.
        shared: Further objects that copies share with the module.
    """

    def __init__(self, module: nn.Module, shared: Iterable[Any] = ()) -> None:
        file = io.BytesIO()
        writer = _Writer(file, module, shared)
        writer.dump(module)
        self._text, self._objects = file.getvalue(), writer.objects

    def copy(self, tensors: Mapping[int, Tensor]) -> Any:
        """Return a copy of the module.

        Args:
            tensors: Tensors of the copy by ``id`` of the module's tensor. Other tensors are cloned.
        """
        made: dict[int, Any] = {}

        def numbered(number: int) -> Any:
            if number not in made:
                found = self._objects[number]
                made[number] = _tensor_of_copy(found, tensors) if isinstance(found, Tensor) else found
            return made[number]

        token = _numbered.set(numbered)
        try:
            return pickle.loads(self._text)
        finally:
            _numbered.reset(token)


def _tensor_of_copy(tensor: Tensor, tensors: Mapping[int, Tensor]) -> Tensor:
    found = tensors.get(id(tensor))
    if found is None:  # a tensor with a graph cannot be cloned with it
        found = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter) and not isinstance(found, nn.Parameter):
        found = nn.Parameter(found, tensor.requires_grad)
    return found


class _Writer(pickle.Pickler):
    """Pickler that writes a number for each tensor and each shared object."""

    def __init__(self, file: io.BytesIO, module: nn.Module, shared: Iterable[Any]) -> None:
        super().__init__(file, protocol=5)
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._shared = {id(each) for each in shared}
        parts = (*module.modules(), *module.parameters(), *module.buffers())
        self._parts = {id(part) for part in parts}
        self._reaching: dict[int, bool] = {}

    def reducer_override(self, thing: Any) -> Any:
        """Return how an object of a copy is made, see ``pickle.Pickler``."""
        kind = type(thing)
        if id(thing) in self._shared:
            return self._by_number(thing)
        if kind not in _WAYS:
            _WAYS[kind] = _way_of(kind)
        return _WAYS[kind](self, thing)

    def _number(self, thing: Any) -> int:
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self.objects)
            self.objects.append(thing)
        return self._numbers[id(thing)]

    def _by_number(self, thing: Any) -> Any:
        return _of_number, (self._number(thing),)

    def _as_usual(self, thing: Any) -> Any:
        return NotImplemented

    def _or_shared(self, thing: Any) -> Any:
        try:
            return thing.__reduce_ex__(5)
        except (TypeError, pickle.PicklingError):
            return self._by_number(thing)

    def _in_order(self, thing: Any) -> Any:
        return OrderedDict, (), None, None, iter(thing.items())

    def _function(self, thing: Any) -> Any:
        if thing in (_of_number, _empty, _fill):
            return NotImplemented
        if not self._reaches_module(thing):
            return self._by_number(thing)
        cells = [contents(cell) for cell in thing.__closure__ or ()]
        state = cells, thing.__defaults__, thing.__kwdefaults__, vars(thing)
        return _empty, (self._number(thing),), state, None, None, _fill

    def _method(self, thing: Any) -> Any:
        return types.MethodType, (thing.__func__, thing.__self__)

    def _reference(self, thing: Any) -> Any:
        return weakref.ref, (thing(),)

    def _reaches_module(self, function: Any) -> bool:
        """Return whether a function's closure or default values lead to a part of the module."""
        if id(function) not in self._reaching:
            waiting, seen, found = _held_by(function), {id(function)} | self._shared, False
            while waiting and not found:
                thing = waiting.pop()
                found = id(thing) in self._parts
                if id(thing) not in seen and not isinstance(thing, _CLOSED):
                    seen.add(id(thing))
                    is_function = isinstance(thing, types.FunctionType)
                    waiting += _held_by(thing) if is_function else gc.get_referents(thing)
            self._reaching[id(function)] = found
        return self._reaching[id(function)]


def _held_by(function: Any) -> list[Any]:
    return [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__]


def contents(cell: types.CellType) -> tuple[Any, ...]:
    """Return what a cell of a closure holds, in a tuple; an empty tuple for an empty cell."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _of_number(number: int) -> Any:
    return _numbered.get()(number)


def _empty(number: int) -> Any:
    """Return a function with the code of another one, and empty cells."""
    like = _of_number(number)
    cells = tuple(types.CellType() for _ in like.__closure__ or ())
    function = types.FunctionType(like.__code__, like.__globals__, like.__name__, None, cells)
    function.__qualname__ = like.__qualname__
    return function


def _fill(function: Any, state: Any) -> None:
    held, function.__defaults__, function.__kwdefaults__, attributes = state
    for cell, content in zip(function.__closure__ or (), held, strict=True):
        if content:
            (cell.cell_contents,) = content
    vars(function).update(attributes)


_WAYS: dict[type, Callable[[_Writer, Any], Any]] = {
    OrderedDict: _Writer._in_order,
    types.FunctionType: _Writer._function,
    types.MethodType: _Writer._method,
    weakref.ref: _Writer._reference,
}


def _way_of(kind: type) -> Callable[[_Writer, Any], Any]:
    if issubclass(kind, (Tensor, *_SHARED)):
        return _Writer._by_number
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return _Writer._as_usual if issubclass(kind, nn.Module) and plain else _Writer._or_shared
