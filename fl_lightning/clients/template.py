"""Copies of a module, which share code and data with it, and have other tensors."""

import dis
import gc
import io
import pickle
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import _lru_cache_wrapper, lru_cache
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fl_lightning.errors import ConfigurationError

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
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Hooks of tensors."""

_SLOTS: dict[type, list[str]] = {}
_numbered: ContextVar[Callable[[int], Any]] = ContextVar("_numbered")


class Template:
    """The structure of a module, for making copies.

    Copies are made by pickle. Lists of parameters, helper objects and bound methods of a copy
    refer to the copy's own parts. Functions that reach the module by a closure or a default value,
    and functions that change their closure, are made anew for the copy. Hooks and attributes of
    tensors are copied. Copies share all other functions, and classes, data sets, the trainer and
    callbacks. They also share objects that pickle cannot copy, such as locks.

    Args:
        module: The module.
        shared: Further objects that copies share with the module.
        of_methods: Functions that keep what they change in their closure, as the hooks of methods do.
    """

    def __init__(self, module: nn.Module, shared: Iterable[Any] = (), of_methods: Iterable[Any] = ()) -> None:
        file = io.BytesIO()
        writer = _Writer(file, module, shared, of_methods)
        writer.dump(module)
        self._text, self._objects, self._numbers = file.getvalue(), writer.objects, writer.numbers
        named = (*module.parameters(), *module.buffers())
        self._whole = {_memory(x): x for x in named if _fills_its_memory(x)}

    def copy(self, tensors: Mapping[int, Tensor], dtype: torch.dtype | None = None) -> Any:
        """Return a copy of the module.

        Args:
            tensors: Tensors of the copy by ``id`` of the module's tensor. Other tensors are cloned.
            dtype: Type of cloned floating-point tensors. Default: that of the module's tensors.
        """
        made: dict[int, Any] = {}

        def numbered(number: int) -> Any:
            if number not in made:
                found = self._objects[number]
                made[number] = part_of(found) if isinstance(found, Tensor) else found
            return made[number]

        def part_of(found: Tensor) -> Tensor:
            whole = self._whole.get(_memory(found), found)
            known = whole is found or id(found) in tensors or found.requires_grad
            if known or id(whole) not in self._numbers or found.dtype != whole.dtype:
                return _tensor_of_copy(found, tensors, dtype)
            own = numbered(self._numbers[id(whole)])  # a view of a parameter or buffer
            if own is whole:
                return found
            place = own.storage_offset() + found.storage_offset()
            view: Tensor = own.detach().as_strided(found.shape, found.stride(), place)
            return view

        token = _numbered.set(numbered)
        try:
            return pickle.loads(self._text)
        finally:
            _numbered.reset(token)


def _memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


def _fills_its_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    size: int = tensor.untyped_storage().nbytes()
    return 0 < tensor.numel() * tensor.element_size() == size


def _tensor_of_copy(tensor: Tensor, tensors: Mapping[int, Tensor], dtype: torch.dtype | None) -> Tensor:
    found = tensors.get(id(tensor))
    if found is None:  # a tensor with a graph cannot be cloned with it
        found = tensor.detach().clone()
        if dtype is not None and found.is_floating_point():
            found = found.to(dtype)
        found.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter) and not isinstance(found, nn.Parameter):
        found = nn.Parameter(found, tensor.requires_grad)
    return found


class _Writer(pickle.Pickler):
    """Pickler that writes a number for each tensor and each shared object."""

    def __init__(
        self, file: io.BytesIO, module: nn.Module, shared: Iterable[Any], of_methods: Iterable[Any]
    ) -> None:
        super().__init__(file, protocol=5)
        self._of_methods = {id(each) for each in of_methods}
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
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
        if id(thing) not in self.numbers:
            self.numbers[id(thing)] = len(self.objects)
            self.objects.append(thing)
        return self.numbers[id(thing)]

    def _by_number(self, thing: Any) -> Any:
        return _of_number, (self._number(thing),)

    def _tensor(self, thing: Tensor) -> Any:
        hooks = {name: getattr(thing, name) for name in _HOOKS if thing.is_leaf}
        state = vars(thing), {name: value for name, value in hooks.items() if value}
        return (*self._by_number(thing), state if any(state) else None, None, None, _set_on_tensor)

    def _as_usual(self, thing: nn.Module) -> Any:
        # the class of a parametrized module refuses pickle, as a file could not name the class
        return self._whole(thing) if is_parametrized(thing) else NotImplemented

    def _whole(self, thing: nn.Module) -> Any:
        """Return all attributes, also those that the class leaves out of files."""
        slots = {name: getattr(thing, name) for name in slots_of(type(thing)) if hasattr(thing, name)}
        state = {**vars(thing), "_trainer": None} if hasattr(thing, "_trainer") else vars(thing)
        return _new, (type(thing),), (state, slots), None, None, _set_state

    def _script(self, thing: Any) -> Any:
        _refuse_to_share(thing, TypeError("torch.jit copies tensors by itself"))
        return self._by_number(thing)

    def _or_shared(self, thing: Any) -> Any:
        try:
            way = thing.__reduce_ex__(5)
        except Exception as error:  # noqa: BLE001  # the object's own code
            _refuse_to_share(thing, error)
            return self._by_number(thing)
        if isinstance(way, str) or not 2 < len(way) < 6 or hasattr(type(thing), "__setstate__"):
            return way
        # pickle asks the empty object for __setstate__, which one that passes attributes on cannot answer
        return (*(*way, None, None)[:5], _set_state)

    def _cached_function(self, thing: Any) -> Any:
        if not self._reaches_module(thing):
            return self._by_number(thing)
        return _cached, (thing.cache_parameters(), thing.__wrapped__)

    def _in_order(self, thing: Any) -> Any:
        return OrderedDict, (), None, None, iter(thing.items())

    def _function(self, thing: Any) -> Any:
        if thing in (_of_number, _empty, _fill, _cached, _new, _set_state, _set_on_tensor):
            return NotImplemented
        own = id(thing) not in self._of_methods and _changes_closure(thing)
        if not (own or self._reaches_module(thing)):
            return self._by_number(thing)
        cells = [closure_contents(cell) for cell in thing.__closure__ or ()]
        state = cells, thing.__defaults__, thing.__kwdefaults__, vars(thing)
        return _empty, (self._number(thing),), state, None, None, _fill

    def _method(self, thing: Any) -> Any:
        return types.MethodType, (thing.__func__, thing.__self__)

    def _reference(self, thing: Any) -> Any:
        part = thing()
        return self._by_number(thing) if part is None else (type(thing), (part,))

    def _reaches_module(self, function: Any) -> bool:
        """Return whether a function's closure or default values lead to a part of the module."""
        if id(function) not in self._reaching:
            is_function = isinstance(function, types.FunctionType)
            waiting = _held_by(function) if is_function else gc.get_referents(function)
            seen, found = {id(function)} | self._shared, False
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


def _changes_closure(function: types.FunctionType) -> bool:
    """Return whether a function has a ``nonlocal`` variable, or a container in its closure."""
    if not function.__closure__ or "<locals>" not in function.__qualname__:  # the latter is global
        return False
    held = [content for cell in function.__closure__ for content in closure_contents(cell)]
    if any(isinstance(content, dict | list | set) for content in held):
        return True
    own = {*function.__code__.co_freevars}
    written = (step.argval for step in dis.get_instructions(function) if step.opname == "STORE_DEREF")
    return not own.isdisjoint(written)


def _refuse_to_share(thing: Any, error: Exception) -> None:
    """Refuse an object that pickle cannot copy, if clients would disturb each other by it."""
    kind = type(thing).__name__
    trained = isinstance(thing, nn.Module) and any(x.requires_grad for x in thing.parameters())
    if trained or (isinstance(thing, nn.Module) and any(True for _ in thing.buffers())):
        raise ConfigurationError(
            f"model: the layer {kind} cannot be copied for each client; make it in Python, not by torch.jit, or freeze it and use no buffers"
        ) from error
    if isinstance(thing, types.GeneratorType | _BaseDataLoaderIter):
        raise ConfigurationError(
            f"model: it holds a {kind}, which cannot be copied for each client; hold what it iterates over, and make it in training_step"
        ) from error


def slots_of(kind: type) -> list[str]:
    """Return the names of a class's slots."""
    if kind not in _SLOTS:
        found = [x for base in kind.__mro__ for x in vars(base).values()]
        _SLOTS[kind] = [x.__name__ for x in found if isinstance(x, types.MemberDescriptorType)]
    return _SLOTS[kind]


def closure_contents(cell: types.CellType) -> tuple[Any, ...]:
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


def _cached(settings: dict[str, Any], function: Any) -> Any:
    return lru_cache(**settings)(function)


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _set_state(thing: Any, state: Any) -> None:
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(thing).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(thing, name, value)


def _set_on_tensor(tensor: Tensor, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Give a copy of a tensor attributes and hooks; a shared tensor has them."""
    attributes, hooks = state
    for name in attributes.keys() - vars(tensor).keys():
        setattr(tensor, name, attributes[name])
    for name in (name for name in hooks if not getattr(tensor, name)):
        setattr(tensor, name, hooks[name])


_WAYS: dict[type, Callable[[_Writer, Any], Any]] = {
    OrderedDict: _Writer._in_order,
    types.FunctionType: _Writer._function,
    types.MethodType: _Writer._method,
    weakref.ref: _Writer._reference,
    weakref.WeakMethod: _Writer._reference,
    _lru_cache_wrapper: _Writer._cached_function,
}


def _way_of(kind: type) -> Callable[[_Writer, Any], Any]:
    if issubclass(kind, Tensor):
        return _Writer._tensor
    if issubclass(kind, torch.jit.ScriptModule):
        return _Writer._script
    of_compiler = kind.__module__.startswith("torch._dynamo") and not issubclass(kind, nn.Module)
    if issubclass(kind, _SHARED) or of_compiler:
        return _Writer._by_number
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    if not (issubclass(kind, nn.Module) and plain):
        return _Writer._or_shared
    known = (object.__getstate__, L.LightningModule.__getstate__)
    return _Writer._as_usual if kind.__getstate__ in known and not slots_of(kind) else _Writer._whole
