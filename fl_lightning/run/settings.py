"""The settings of objects that were made in Python, as plain values that are the same in another process."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.client_data.fingerprint import digest


def settings_of(thing: Any) -> Any:
    """What an object was made with: class and arguments as in a configuration, as far as it keeps them as attributes.

    A model counts by its structure, an optimizer that is yet to be made by a trial, a function by its name and, where it was made in a
    script, by its code, a tensor by its contents.

    Args:
        thing: The object.

    Returns:
        A tree of dicts, lists and plain values.
    """
    if isinstance(thing, np.generic):
        thing = thing.item()
    for kind in (bool, int, float, str):  # exactly these: YAML knows no others
        if isinstance(thing, kind):
            return kind(thing)
    if thing is None:
        return None
    if isinstance(thing, Mapping):
        return {str(key): settings_of(value) for key, value in thing.items()}
    if isinstance(thing, set | frozenset):
        return sorted(map(settings_of, thing), key=repr)
    if isinstance(thing, list | tuple | range):
        return [settings_of(value) for value in thing]
    if isinstance(thing, Tensor):
        return digest(thing)
    if isinstance(thing, functools.partial):
        return {"class_path": thing.func.__qualname__, "init_args": settings_of([thing.args, thing.keywords])}
    if isinstance(thing, type) or inspect.isroutine(thing):
        return _of_function(thing)
    if (
        not _parameters(type(thing))
        and not isinstance(thing, nn.Module)
        and " object at 0x" not in repr(thing)
    ):
        return str(thing)  # a path, a type of numbers
    found: dict[str, Any] = {"class_path": type(thing).__name__}
    arguments = {name: getattr(thing, name) for name in _parameters(type(thing)) if hasattr(thing, name)}
    for name in ("client_optimizer", "server_optimizer"):
        if name in arguments:
            arguments[name] = _of_optimizer(arguments[name])
    if getattr(thing, "chooses_executor", False):
        arguments.pop("executor", None)
    found["init_args"] = {name: settings_of(value) for name, value in arguments.items()}
    if isinstance(thing, nn.Module) and "model" not in arguments:
        found["structure"] = [line.strip() for line in repr(thing).splitlines()]
    return found


def _parameters(kind: type) -> list[str]:
    """The names of a class's arguments; where it passes on those it does not know, its bases' as well."""
    names: list[str] = []
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            names += [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
            if not any(p.kind == p.VAR_KEYWORD for p in parameters):
                break
    return list(dict.fromkeys(names))


def _of_optimizer(make: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    optimizer = make([nn.Parameter(torch.zeros(1))])
    group = {
        name: settings_of(value) for name, value in optimizer.param_groups[0].items() if name != "params"
    }
    return {"class_path": type(optimizer).__name__, "init_args": group}


def _of_function(function: Any) -> Any:
    name = f"{function.__module__}.{function.__qualname__}"
    code = getattr(function, "__code__", None)
    if code is None or not ("<" in name or name.startswith("__main__")):
        return name
    around = [cell.cell_contents for cell in function.__closure__ or ()]
    return [name, digest(_of_code(code)), settings_of([function.__defaults__, around])]


def _of_code(code: CodeType) -> list[Any]:
    inner = [_of_code(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    return [code.co_code, list(code.co_names), inner]
