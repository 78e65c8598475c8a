"""Descriptions of objects as plain values: by their recorded arguments, else by their state."""

import copy
import dis
import enum
import functools
import hashlib
import inspect
import json
import pickle
import random
import types
import typing
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import lightning as L
import numpy as np
import torch
from jsonargparse._util import get_import_path
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fl_lightning.batch_norm.layers import set_momentum
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.client_data.fingerprint import digest
from fl_lightning.models.dropout import convert_dropout
from fl_lightning.randomness import seed_global
from fl_lightning.recorded import Making, Recorded, making, parameters
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.trained import MARK

LINKED = ("num_classes", "in_channels", "image_size")
"""Arguments of a model that the data decide unless they are given."""

_TORCH_OWN = frozenset({*vars(nn.Module()), *vars(Optimizer([nn.Parameter(torch.zeros(1))], {}))})
"""Attributes that torch itself keeps on modules and optimizers."""

_NOT_A_SETTING = _TORCH_OWN | {"_made_with", MARK}

_TRAINER = {
    name: one.default for name, one in inspect.signature(L.Trainer).parameters.items() if name != "callbacks"
}

_DEPTH = 12  # levels of the state of an object without a record; deeper ones count by their class


def built(module: FederatedModule, data: FederatedDataModule, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the objects of a run as a configuration does.

    Args:
        module: The module.
        data: Its data.
        trainer: Arguments of the trainer, ``callbacks`` among them.

    Returns:
        ``seed_everything``, ``model``, ``data`` and ``trainer``, with the arguments that links and data have decided.
    """
    model, own = as_plain(module), as_plain(data)
    seed = model["init_args"].pop("seed")
    if (data_seed := own["init_args"].pop("seed", seed)) != seed:
        own["own_seed"] = data_seed  # beside the arguments: its default is the run's seed, not the class's
    if type(module) is FederatedModule:
        model = model["init_args"]
    return {
        "seed_everything": seed,
        "model": model,
        "data": own,
        "trainer": {**_TRAINER, **as_plain(dict(trainer))},
    }


def built_in_python(
    module: FederatedModule, data: FederatedDataModule, trainer: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe the objects of a script as :func:`built` does.

    The model also has a digest of its layers or its weights if these do not follow from its arguments and the run's seed.
    Settings that were assigned after an object was made are those that count: module, data and callbacks have them as
    ``reassigned``.
    """
    found = built(module, data, trainer)
    settings = found["model"].get("init_args", found["model"])
    settings["model"] |= _digests(module)
    own = making(module)
    given = own.arguments if own is not None else {}
    settings |= {
        name: as_plain(now)
        for name, now in _plain_attributes(module).items()
        if given.get(name) is not None and now != given[name] and name != "seed"
    }
    found["data"] |= _reassigned(data, making(data))
    callbacks = trainer.get("callbacks") or []
    for callback, node in zip(callbacks, found["trainer"].get("callbacks") or [], strict=True):
        node |= _reassigned(callback, making(callback)) if isinstance(callback, Recorded) else {}
    return found


def _plain_attributes(thing: object) -> dict[str, Any]:
    kinds = bool | int | float | str | None
    return {name: x for name, x in vars(thing).items() if name[:1] != "_" and isinstance(x, kinds)}


def _reassigned(thing: object, made: Making | None) -> dict[str, Any]:
    """Return the settings of an object that are no longer what its arguments make them."""
    if made is None:
        return {}
    usual, now = _plain_attributes(made.again()), _plain_attributes(thing)
    found = {
        name: as_plain(now[name]) for name in made.arguments if name in now and now[name] != usual.get(name)
    }
    return {"reassigned": found} if found else {}


def without_decided(found: Mapping[str, Any], data: FederatedDataModule) -> dict[str, Any]:
    """Leave out the arguments of a model that the data decide, as a configuration does."""
    configured = copy.deepcopy(dict(found))
    settings = configured["model"].get("init_args", configured["model"])
    arguments = settings["model"]["init_args"]
    decided = [
        name
        for name in LINKED
        if name in arguments and arguments[name] == as_plain(getattr(data, name, None))
    ]
    for name in decided:
        del arguments[name]
    return configured


def _digests(module: FederatedModule) -> dict[str, Any]:
    """Return what of a model does not follow from its arguments and the seed."""
    model, made = module.model, making(module.model)
    known = module.initial_weights is None and not any(map(is_lazy, model.parameters()))
    weights = {"weights_digest": digest(dict(model.state_dict()))} if known else {}
    if made is None:
        return {"state_digest": layers(model)} | weights | _parts(model)
    if any(isinstance(x, nn.Module) for x in made.arguments.values()):  # the caller has drawn its weights
        return {"layers_digest": layers(model)} | weights | _parts(model)
    with isolate_rng():
        seed_global(module.seed, torch.device("cpu"))
        again = made.again()
    convert_dropout(again)
    own = making(module)
    if own is not None and (momentum := own.arguments["bn_momentum"]) is not None:
        set_momentum(again, momentum)
    same = layers(again) == layers(model)
    other = {} if same else {"layers_digest": layers(model), **_parts(model)}
    return other | ({} if digest(dict(again.state_dict())) == weights.get("weights_digest") else weights)


def _parts(model: nn.Module) -> dict[str, list[str]]:
    """Name the classes of layers that are not of torch: their code computes the run."""
    names = {_class_name(layer) for layer in model.modules() if layer is not model}
    own = sorted(name for name in names if not name.startswith("torch."))
    return {"layer_classes": own} if own else {}


def as_plain(thing: Any, hint: Any = None) -> Any:
    """Describe a value as a configuration does: plain values, lists, and ``class_path`` with ``init_args`` for objects.

    An optimizer that is yet to be made counts by a trial, a function by its name or, if no import finds it, by its code, a
    tensor by its content, and an object without a record of its arguments by its state.

    Args:
        thing: The value.
        hint: The type that it was declared with.
    """
    if isinstance(thing, np.generic):
        thing = thing.item()
    if isinstance(thing, enum.Enum):
        return str(thing.name)
    for kind in (bool, int, float, str):  # exactly these: YAML knows no others
        if isinstance(thing, kind):
            return (
                float(thing) if kind is int and _takes(hint, float) and not _takes(hint, int) else kind(thing)
            )
    if thing is None:
        return None
    if isinstance(thing, Mapping):
        return {str(key): as_plain(value, _item(hint, 1)) for key, value in thing.items()}
    if isinstance(thing, set | frozenset):
        return sorted((as_plain(value, _item(hint, 0)) for value in thing), key=repr)
    if isinstance(thing, list | tuple | range):
        return [as_plain(value, _item(hint, 0)) for value in thing]
    if isinstance(thing, Tensor | np.ndarray):
        return {"content_digest": digest(thing)}
    if isinstance(thing, functools.partial):
        return _partial(thing)
    if isinstance(thing, type) or inspect.isroutine(thing):
        return _function(thing)
    made = making(thing)
    if made is None:
        return _by_state(thing)
    hints = _hints(made.maker)
    arguments = {
        name: _optimizer(x) if name.endswith("_optimizer") and x is not None else as_plain(x, hints.get(name))
        for name, x in made.arguments.items()
    }
    return {"class_path": full_name(made.maker), "init_args": arguments, **_code_of_local(made.maker)}


@functools.cache
def full_name(maker: Any) -> str:
    """Return the shortest dotted path that imports a class or function."""
    try:
        return str(get_import_path(maker))
    except (ValueError, ImportError, AttributeError):
        return f"{maker.__module__}.{getattr(maker, '__qualname__', type(maker).__qualname__)}"


def _class_name(thing: Any) -> str:
    kind: Any = type(thing)
    return full_name(kind)


def layers(model: nn.Module) -> str:
    """Return a digest of what a model is apart from its weights: classes, settings and shapes of its layers."""
    if id(model) in _UNDER_WAY:  # a hook of it, say, holds the model
        return "itself"
    _UNDER_WAY.add(id(model))
    try:
        return _layers(model)
    finally:
        _UNDER_WAY.remove(id(model))


_UNDER_WAY: set[int] = set()
"""The models that are being described, by their ids."""


def _layers(model: nn.Module) -> str:
    shared: dict[int, str] = {}
    ties = [shared.setdefault(id(x), name) for name, x in model.named_parameters(remove_duplicate=False)]
    return _digest([ties, [_layer(layer) for layer in model.modules()]])


def _layer(layer: nn.Module) -> Any:
    children = list(layer._modules)
    own = {name: x for name, x in vars(layer).items() if name not in _NOT_A_SETTING}
    if isinstance(layer, _BatchNorm):
        own["training"] = layer.training  # a user's eval mode: the layer tracks nothing
    tensors = {
        name: None if x is None or is_lazy(x) else [list(x.shape), str(x.dtype), x.requires_grad]
        for name, x in (*layer._parameters.items(), *layer._buffers.items())
    }
    own |= {f"buffer {name}": layer._buffers[name] for name in sorted(layer._non_persistent_buffers_set)}
    hooks = [list(x.values()) for name, x in vars(layer).items() if name.endswith("_hooks") and x]
    return [_reference(type(layer), []), children, _state(own, []), tensors, _state(hooks, [])]


def _partial(thing: functools.partial[Any]) -> dict[str, Any]:
    makers = [x for x in (thing.func, *thing.args) if isinstance(x, type)]  # jsonargparse passes on the class
    maker = makers[0] if makers else thing.func
    given = thing.args[thing.args.index(maker) + 1 :] if maker in thing.args else thing.args
    hints = _hints(maker)
    known = {n: p.default for n, p in parameters(maker).items() if p.default is not inspect.Parameter.empty}
    arguments = {name: as_plain(x, hints.get(name)) for name, x in (known | thing.keywords).items()}
    positional = {"*": as_plain(list(given))} if given else {}
    return {"class_path": full_name(maker), "init_args": positional | arguments, **_code_of_local(maker)}


def _optimizer(make: Callable[..., Optimizer]) -> dict[str, Any]:
    if isinstance(make, functools.partial):
        return _partial(make)
    optimizer = make([nn.Parameter(torch.zeros(1))])
    kind: Any = type(optimizer)
    shipped = kind.__module__.startswith("torch.")
    known, groups = parameters(kind), optimizer.param_groups
    own = {} if shipped else {name: x for name, x in vars(optimizer).items() if name not in _TORCH_OWN}
    settings = {
        name: x for name, x in groups[0].items() if name != "params" and (name in known or not shipped)
    }
    hints = _hints(kind)
    arguments = {
        name: as_plain(x, hints.get(name)) for name, x in (settings | own).items() if name[:1] != "_"
    }
    return {"class_path": full_name(kind), "init_args": arguments, **_code_of_local(kind)}


def _function(function: Any) -> Any:
    name, code = full_name(function), _code_of_local(function)
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        code = {**code, "state_digest": _digest(_state(owner, []))}
    return {"class_path": name, "init_args": {}, **code} if code else name


def _by_state(thing: Any) -> Any:
    """Describe an object that records no arguments by its class and all that it holds."""
    if _says_itself(thing):
        return str(thing)
    kind: Any = type(thing)
    own = (
        {name: x for name, x in vars(thing).items() if name in parameters(kind)}
        if hasattr(thing, "__dict__")
        else {}
    )
    plain = {name: as_plain(x) for name, x in own.items() if isinstance(x, bool | int | float | str | None)}
    content = _digest(_state(thing, []))
    return {
        "class_path": full_name(kind),
        "init_args": plain,
        "state_digest": content,
        **_code_of_local(kind),
    }


def _says_itself(thing: Any) -> bool:
    """Whether an object without parts is told by its text: a path, a type of numbers, a device."""
    return not hasattr(thing, "__dict__") and " at 0x" not in repr(thing)


def _state(thing: Any, around: list[Any]) -> Any:
    """Describe a value by what it holds; things that are not data, such as locks and files, by their class."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if len(around) > _DEPTH or any(thing is other for other in around):
        return _class_name(thing)
    inner = [*around, thing]
    if isinstance(thing, Mapping):
        return [[_state(key, inner), _state(value, inner)] for key, value in thing.items()]
    if isinstance(thing, list | tuple):
        return [_state(value, inner) for value in thing]
    if isinstance(thing, torch.Generator):
        return digest(thing.get_state())
    if isinstance(thing, random.Random):
        return repr(thing.getstate())
    if isinstance(thing, nn.Module):
        lazy = any(map(is_lazy, thing.parameters()))
        return [layers(thing), None if lazy else digest(dict(thing.state_dict()))]
    known = isinstance(
        thing, Tensor | np.ndarray | np.generic | set | frozenset | functools.partial | type | enum.Enum
    )
    if known or inspect.isroutine(thing) or making(thing) is not None:
        return as_plain(thing)
    if isinstance(thing, types.ModuleType):
        return thing.__name__
    if hasattr(thing, "__dict__"):
        skip = _TORCH_OWN if isinstance(thing, Optimizer) else frozenset({"trainer", "_trainer", MARK})
        return [
            _class_name(thing),
            {k: _state(x, inner) for k, x in vars(thing).items() if k not in skip},
        ]
    if hasattr(thing, "__array_interface__"):
        return digest(thing)
    try:
        return [_class_name(thing), digest(pickle.dumps(thing, 4))]
    except Exception:  # noqa: BLE001  # a lock, a file: no data
        return _class_name(thing)


def _digest(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _code_of_local(maker: Any) -> dict[str, str]:
    """Return the code of a class or function that no file's name can stand for: of a script, a notebook or another function."""
    return {"code_digest": _digest(_code(maker, []))} if _is_local(maker) else {}


def _is_local(maker: Any) -> bool:
    maker = inspect.unwrap(maker)
    return maker.__module__ in ("__main__", None) or "<" in getattr(maker, "__qualname__", "<")


def _code(thing: Any, around: list[Any]) -> Any:
    """Describe what a class or function does: its instructions, and all that they name."""
    if any(thing is other for other in around):
        return "itself"
    inner = [*around, thing]
    if isinstance(thing, type):
        members = [[name, _reference(x, inner)] for name, x in vars(thing).items() if name not in _NOT_CODE]
        return [full_name(thing), [_reference(base, inner) for base in thing.__bases__], members]
    function = inspect.unwrap(getattr(thing, "__func__", thing))
    code = getattr(function, "__code__", None)
    if code is None:
        return full_name(function)
    names = _names(code)
    used = {name: function.__globals__[name] for name in names if name in function.__globals__}
    closure = dict(zip(code.co_freevars, (_cell(x) for x in function.__closure__ or ()), strict=True))
    return [
        _instructions(code),
        [[name, _reference(x, inner)] for name, x in (used | closure).items()],
        _reference([function.__defaults__, function.__kwdefaults__], inner),
    ]


_NOT_CODE = (
    "__doc__",
    "__module__",
    "__dict__",
    "__weakref__",
    "__annotations__",
    "__abstractmethods__",
    "_abc_impl",
    *("__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"),
)


def _reference(thing: Any, around: list[Any]) -> Any:
    if isinstance(thing, staticmethod | classmethod):
        thing = thing.__func__
    if isinstance(thing, property):
        return [_reference(x, around) for x in (thing.fget, thing.fset, thing.fdel)]
    if isinstance(thing, type) or inspect.isroutine(thing):
        return _code(thing, around) if _is_local(thing) else full_name(thing)
    return _state(thing, around)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: CodeType) -> list[str]:
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one)]
    own = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return list(dict.fromkeys([*own, *inner]))


def _instructions(code: CodeType) -> list[Any]:
    """List instructions with what they use by name and value; a docstring is none of these."""
    steps = list(dis.get_instructions(code))
    stored = [*steps[1:], None]  # a class stores its docstring
    docs = [x for x in stored if x is not None and (x.opname, x.argval) == ("STORE_NAME", "__doc__")]
    kept = [x for x, after in zip(steps, stored, strict=True) if x not in docs and after not in docs]
    return [[x.opname, _operand(x.argval)] for x in kept]


def _operand(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _instructions(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _hints(maker: Any) -> dict[str, Any]:
    return {name: one.annotation for name, one in parameters(maker).items()}


def _takes(hint: Any, kind: type) -> bool:
    return hint is kind or (
        (isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union)
        and any(_takes(one, kind) for one in typing.get_args(hint))
    )


def _item(hint: Any, position: int) -> Any:
    """Return the type of a container's items: of a list its first argument, of a dict its second."""
    for one in (hint, *typing.get_args(hint)):
        arguments = typing.get_args(one)
        origin = typing.get_origin(one)
        if isinstance(origin, type) and issubclass(
            origin, (Mapping,) if position else (list, tuple, typing.Sequence)
        ):
            return arguments[min(position, len(arguments) - 1)]
    return None
