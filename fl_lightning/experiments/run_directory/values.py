"""Description of objects in the format of a YAML configuration.

The format has numbers, strings, lists and dicts. An object is described by the arguments of its
constructor. If the arguments were not recorded, the object is described by a digest of its state.
"""

import copyreg
import dataclasses
import enum
import functools
import hashlib
import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from fl_lightning.client_data.fingerprint import digest
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.code import code_of, full_name, is_local
from fl_lightning.recorded import making, parameters
from fl_lightning.round.trained import MARK

_TORCH_OWN = frozenset({*vars(nn.Module()), *vars(Optimizer([nn.Parameter(torch.zeros(1))], {}))})
"""Names of the attributes that torch sets on every module or optimizer."""

_NOT_A_SETTING = _TORCH_OWN | {"_made_with", MARK}

_OF_A_RUN = frozenset({"trainer", "_trainer", MARK})

_DEPTH = 100  # largest depth of nested objects; for deeper objects, only the class is described


class Walk:
    """Record of the objects that a description already contains.

    Each object is described only once, which saves time and ends cycles of references.
    """

    def __init__(self) -> None:
        # keep the object alive, because Python could reuse its id for a new object
        self._met: dict[int, tuple[int, Any]] = {}
        self._numbers = itertools.count()
        self._depth = 0

    def describe(self, thing: Any, how: Callable[[], Any], *, again: bool = False) -> Any:
        """Describe an object at its first occurrence; at later occurrences, return its number.

        Args:
            thing: The object.
            how: Function that describes the object.
            again: Whether to describe the object at every occurrence. Occurrences inside the object
                itself are never described.
        """
        if id(thing) in self._met:
            return f"met {self._met[id(thing)][0]}"
        if self._depth == _DEPTH:
            return class_name(thing)
        self._met[id(thing)] = (next(self._numbers), thing)
        self._depth += 1
        try:
            return how()
        finally:
            self._depth -= 1
            if again:
                del self._met[id(thing)]


def as_plain(thing: Any, hint: Any = None, walk: Walk | None = None) -> Any:
    """Describe a value by numbers, strings, lists and dicts, as in a YAML configuration.

    - An object becomes ``class_path`` and ``init_args``. A digest of the state is added if the
      arguments were not recorded.
    - An optimizer factory is described by an optimizer that it makes.
    - A tensor or an array is described by a digest of its content.
    - A function is described by name. A digest of the code is added if the function cannot be
      imported.

    Args:
        thing: The value.
        hint: Declared type of the value.
        walk: The objects that the description already contains. Default: an empty record.

    Raises:
        ConfigurationError: An argument is an iterator, which can be read only once.
    """
    if isinstance(thing, np.generic):
        thing = thing.item()
    if isinstance(thing, enum.Enum):
        as_value = any(_takes(hint, kind) for kind in (int, float, str)) and not _takes(hint, type(thing))
        return as_plain(thing.value, hint) if as_value else str(thing.name)
    for kind in (bool, int, float, str):  # convert values of subclasses to YAML's types
        if isinstance(thing, kind):
            decimal = kind is int and _takes(hint, float) and not _takes(hint, int)
            return float(thing) if decimal else kind(thing)
    if thing is None:
        return None
    if isinstance(thing, Mapping):
        return {str(key): as_plain(value, _item(hint, 1), walk) for key, value in thing.items()}
    if isinstance(thing, set | frozenset):
        return sorted((as_plain(value, _item(hint, 0), walk) for value in thing), key=repr)
    if isinstance(thing, list | tuple | range):
        return [as_plain(value, _item(hint, 0), walk) for value in thing]
    if isinstance(thing, np.ma.MaskedArray):
        return {"content_digest": digest(np.ma.getdata(thing), np.ma.getmaskarray(thing))}
    if isinstance(thing, Tensor | np.ndarray | bytes):
        return {"content_digest": digest(thing)}
    if isinstance(thing, functools.partial):
        return _partial(thing, walk)
    if isinstance(thing, type) or inspect.isroutine(thing):
        return _function(thing, walk)
    if isinstance(thing, nn.Module) and hasattr(thing, "_orig_mod"):
        return {**as_plain(thing._orig_mod, hint, walk), "compiled": True}
    made = making(thing)
    if made is None:
        return _by_state(thing, walk)
    hints = _hints(made.maker)
    arguments = {}
    for name, x in made.arguments.items():
        if isinstance(x, Iterator):
            raise ConfigurationError(
                f"{full_name(made.maker)}.{name}: an iterator ({type(x).__name__}) can be read once only; give a list"
            )
        optimizer = name.endswith("_optimizer") and x is not None
        arguments[name] = _optimizer(x, walk) if optimizer else as_plain(x, hints.get(name), walk)
    return _node(made.maker, arguments, walk)


def _node(maker: Any, arguments: Mapping[str, object], walk: Walk | None = None) -> dict[str, object]:
    return {"class_path": full_name(maker), "init_args": arguments, **_code_of_local(maker, walk)}


def class_name(thing: Any) -> str:
    """Return the full name of an object's class."""
    kind: Any = type(thing)
    return full_name(kind)


def layers(model: nn.Module, walk: Walk | None = None) -> str:
    """Return a digest of the classes, settings and tensor shapes of a model's layers."""
    walk, model = walk or Walk(), getattr(model, "_orig_mod", model)
    shared: dict[int, str] = {}
    ties = [shared.setdefault(id(x), name) for name, x in model.named_parameters(remove_duplicate=False)]
    # a hook of a layer may refer to the model: walk.describe ends this cycle
    return str(
        walk.describe(model, lambda: tree_digest([ties, [_layer(layer, walk) for layer in model.modules()]]))
    )


def _layer(layer: nn.Module, walk: Walk) -> Any:
    children = list(layer._modules)
    settings = {name: x for name, x in vars(layer).items() if name not in _NOT_A_SETTING}
    if isinstance(layer, _BatchNorm) or not layer.training:
        # in eval mode, BN layers do not update running statistics, and Dropout layers drop no values
        settings["training"] = layer.training
    tensors = {
        name: None if x is None else [list(x.shape), str(x.dtype), x.requires_grad]
        for name, x in (*layer._parameters.items(), *layer._buffers.items())
    }
    settings |= {f"buffer {name}": layer._buffers[name] for name in sorted(layer._non_persistent_buffers_set)}
    hooks = [list(x.values()) for name, x in vars(layer).items() if name.endswith("_hooks") and x]
    return [_reference(type(layer), walk), children, _state(settings, walk), tensors, _state(hooks, walk)]


def _partial(thing: functools.partial[Any], walk: Walk | None = None) -> Any:
    # jsonargparse passes the class as an argument
    makers = [x for x in (thing.func, *thing.args) if isinstance(x, type)]
    maker = makers[0] if makers else thing.func
    if not (isinstance(maker, type) or inspect.isroutine(maker)):  # an object that defines __call__
        return {
            "called": as_plain(maker, None, walk),
            "with": as_plain([*thing.args, thing.keywords], None, walk),
        }
    given = thing.args[thing.args.index(maker) + 1 :] if maker in thing.args else thing.args
    hints = _hints(maker)
    known = {n: p.default for n, p in parameters(maker).items() if p.default is not inspect.Parameter.empty}
    arguments = {name: as_plain(x, hints.get(name), walk) for name, x in (known | thing.keywords).items()}
    positional = {"*": as_plain(list(given), None, walk)} if given else {}
    return _node(maker, positional | arguments, walk)


def _optimizer(make: Callable[..., Optimizer], walk: Walk | None = None) -> Any:
    if isinstance(make, functools.partial):
        return _partial(make, walk)
    try:
        optimizer = make([nn.Parameter(torch.zeros(1))])
    except ValueError:  # the factory rejects the dummy parameter
        return _function(make, walk)
    kind: Any = type(optimizer)
    settings = group_settings(optimizer)[0]
    if not _is_of_torch(kind):
        settings |= {name: x for name, x in vars(optimizer).items() if name not in _TORCH_OWN}
    hints = _hints(kind)
    arguments = {name: as_plain(x, hints.get(name)) for name, x in settings.items() if name[:1] != "_"}
    return _node(kind, arguments)


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group of an optimizer as a dict.

    The keys are the names of the optimizer's arguments.
    """
    kind: Any = type(optimizer)
    known = parameters(kind) if _is_of_torch(kind) else None
    return [
        {name: x for name, x in group.items() if name != "params" and (known is None or name in known)}
        for group in optimizer.param_groups
    ]


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


def _function(function: Any, walk: Walk | None) -> Any:
    name, code = full_name(function), _code_of_local(function, walk)
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        code = {**code, "state_digest": tree_digest(_state(owner, walk or Walk()))}
    return {"class_path": name, "init_args": {}, **code} if code else name


def _by_state(thing: Any, walk: Walk | None) -> Any:
    """Describe an object by class and state, because no arguments were recorded."""
    if _says_itself(thing):
        return str(thing)
    kind: Any = type(thing)
    plain = {
        name: as_plain(x)
        for name, x in getattr(thing, "__dict__", {}).items()
        if name in parameters(kind) and isinstance(x, bool | int | float | str | None)
    }
    content = tree_digest(_state(thing, walk or Walk()))
    return {
        "class_path": full_name(kind),
        "init_args": plain,
        "state_digest": content,
        **_code_of_local(kind, walk),
    }


def _says_itself(thing: Any) -> bool:
    """Return whether ``str`` describes an object completely, for example a path or a dtype."""
    cut = isinstance(thing, re.Pattern) or dataclasses.is_dataclass(thing)
    return not hasattr(thing, "__dict__") and not cut and " at 0x" not in repr(thing)


def _state(thing: Any, walk: Walk) -> Any:
    """Describe a value by its content. Locks and open files are described by their class only."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, Mapping):
        return walk.describe(
            thing, lambda: [[_state(key, walk), _state(x, walk)] for key, x in thing.items()], again=True
        )
    if isinstance(thing, list | tuple):
        return walk.describe(thing, lambda: [_state(value, walk) for value in thing], again=True)
    if isinstance(thing, torch.Generator):
        return digest(thing.get_state())
    if isinstance(thing, types.ModuleType):
        return thing.__name__
    if isinstance(thing, nn.Module):
        return [layers(thing, walk), digest(dict(thing.state_dict()))]
    known = isinstance(
        thing,
        Tensor | np.ndarray | np.generic | bytes | set | frozenset | functools.partial | type | enum.Enum,
    )
    if known or inspect.isroutine(thing) or making(thing) is not None:
        return as_plain(thing, None, walk)
    if hasattr(thing, "__array_interface__"):
        return digest(thing)
    kind: Any = type(thing)
    return walk.describe(
        thing, lambda: [full_name(kind), _parts(thing, walk), *_code_of_local(kind, walk).values()]
    )


def _parts(thing: Any, walk: Walk) -> Any:
    """Describe an object by the data that pickle would store, or else by its attributes."""
    try:
        reduce = copyreg.dispatch_table.get(type(thing))
        made = reduce(thing) if reduce is not None else thing.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  # locks and files cannot be pickled
        made = None
    if isinstance(made, tuple) and not isinstance(thing, Optimizer):
        _, arguments, state, *items = (*made, None, None, None)[:5]
        parts = [arguments[1:] if arguments and arguments[0] is type(thing) else arguments, state]
        parts += [list(item) for item in items if item is not None]
    else:
        parts = [made, getattr(thing, "__dict__", None)]
    skip = _TORCH_OWN if isinstance(thing, Optimizer) else _OF_A_RUN
    data = [{n: x for n, x in p.items() if n not in skip} if isinstance(p, dict) else p for p in parts]
    return [_state(part, walk) for part in data]


def tree_digest(tree: Any) -> str:
    """Return the first 16 hex digits of SHA-256 over nested dicts, lists and plain values."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _code_of_local(maker: Any, walk: Walk | None = None) -> dict[str, str]:
    """Return a dict with the ``code_digest`` of a class or function that cannot be imported.

    For all other classes and functions, the dict is empty.
    """
    return {"code_digest": tree_digest(_code(maker, walk or Walk()))} if is_local(maker) else {}


def _code(maker: Any, walk: Walk) -> Any:
    # a wrapper with code refers to the wrapped function; others, as of lru_cache, have no code
    maker = inspect.unwrap(getattr(maker, "__func__", maker), stop=lambda x: hasattr(x, "__code__"))
    return walk.describe(maker, lambda: code_of(maker, lambda thing: _reference(thing, walk)))


def _reference(thing: Any, walk: Walk) -> Any:
    if isinstance(thing, staticmethod | classmethod):
        thing = thing.__func__
    if isinstance(thing, property):
        return [_reference(x, walk) for x in (thing.fget, thing.fset, thing.fdel)]
    if isinstance(thing, type) or inspect.isroutine(thing):
        return _code(thing, walk) if is_local(thing) else full_name(thing)
    return _state(thing, walk)


def _hints(maker: Any) -> dict[str, Any]:
    return {name: x.annotation for name, x in parameters(maker).items()}


def _takes(hint: Any, kind: type) -> bool:
    return hint is kind or (
        (isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union)
        and any(_takes(part, kind) for part in typing.get_args(hint))
    )


def _item(hint: Any, position: int) -> Any:
    """Return the declared item type of a container.

    Args:
        hint: Declared type of the container, such as ``dict[str, float] | None``.
        position: Index of the item type among the type arguments: 0 for a list, 1 for a dict.
    """
    for part in (hint, *typing.get_args(hint)):
        arguments = typing.get_args(part)
        origin = typing.get_origin(part)
        if isinstance(origin, type) and issubclass(
            origin, (Mapping,) if position else (list, tuple, typing.Sequence)
        ):
            return arguments[min(position, len(arguments) - 1)]
    return None
