"""Changes of a client's steps to a copy of a LightningModule, outside of parameters and buffers."""

import pickle
import random
import types
import weakref
from ast import literal_eval
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection

from fl_lightning.clients.template import closure_contents, slots_of
from fl_lightning.errors import ConfigurationError

_APART_TYPES = (Tensor, Metric, MetricCollection, LRScheduler)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
HOOKS = [name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict)]
"""Attributes of a layer that hold its hooks."""

APART = {"_parameters", "_buffers", "_modules", "_trainer", "_compiled_call_impl", *HOOKS}
APART |= {"_torchdynamo_orig_callable", "_torchdynamo_wrapper_id", "get_compiler_config"}
"""Attributes of a module that are no state of it, or that are compared elsewhere."""

_PLAIN = (bool, int, float, str)
_CONTAINERS = (dict, defaultdict, OrderedDict, list, tuple, set, frozenset, deque)
_MISSING = object()


def additions(
    server: nn.Module, copy: nn.Module, own: Container[str], words: str, together: str = ""
) -> dict[str, list[Any]]:
    """Return what a client's steps have appended to lists of the module, by the lists' names.

    Tensors outside of parameters and buffers may differ, as in a cache.

    Args:
        server: The server's module.
        copy: The client's copy.
        own: Attributes that the copy has set when it was made, such as ``".optimizer"``.
        words: Words for round and client, for messages.
        together: What has computed several clients with ``copy``; empty for one client. For several
            clients, tensors of the same shape must be equal.

    Raises:
        ConfigurationError: Another value differs from the server's.
    """
    added: dict[str, list[Any]] = {}
    seen: set[tuple[int, int]] = set()
    labels = cache(lambda: _labels(server) | _labels(copy))

    def compare(name: str, first: Any, second: Any) -> None:
        if first is second or (id(first), id(second)) in seen:
            return
        if together and (first is _MISSING or first is None or isinstance(first, Tensor)):
            if any(isinstance(leaf, Tensor) and is_batchedtensor(leaf) for leaf in tree_leaves(second)):
                raise changed(server, name, words, together)
            alike = isinstance(first, Tensor) and isinstance(second, Tensor) and first.shape == second.shape
            if alike and not same_values(second, first):  # of another shape, caches of masks grow
                raise changed(server, name, words, together)
        if isinstance(second, _APART_TYPES) or (first is _MISSING and _is_cache(second)):
            return
        if name in own and not isinstance(second, Optimizer):
            return
        seen.add((id(first), id(second)))
        if isinstance(first, list) and isinstance(second, list) and len(second) > len(first):
            added[name], second = second[len(first) :], second[: len(first)]
        if isinstance(first, nn.Module) and type(first) is type(second):
            for key, value in vars(first).items():
                other = vars(second).get(key, _MISSING)
                # the usual case first, as a network has a thousand plain attributes
                if value is other or (
                    type(value) in _PLAIN and type(other) is type(value) and value == other
                ):
                    continue
                if key not in APART:
                    compare(f"{name}.{key}", value, other)
            for key in vars(second).keys() - vars(first).keys() - APART:
                if not isinstance(getattr(type(second), key, None), cached_property):
                    compare(f"{name}.{key}", _MISSING, vars(second)[key])
            for key in slots_of(type(first)):
                compare(f"{name}.{key}", getattr(first, key, _MISSING), getattr(second, key, _MISSING))
            for key in second._buffers.keys() - second._non_persistent_buffers_set:
                if first._buffers.get(key) is None and second._buffers[key] is not None:
                    raise changed(server, f"{name}.{key}", words, together)
            parts = [{**module._parameters, **module._modules}.keys() for module in (first, second)]
            if new := parts[1] - parts[0]:
                raise changed(server, f"{name}.{min(new)}", words, together)
            for child, part in first._modules.items():
                compare(f"{name}.{child}", part, second._modules.get(child, _MISSING))
            return
        compares = any("__eq__" in vars(kind) for kind in type(first).__mro__[:-1])
        if compares and type(first) not in _CONTAINERS and _equal(first, second):
            return  # such as a path, which keeps its text once it was asked for
        known, found = _inside(first, labels), _inside(second, labels)
        if type(first) is not type(second) or known is None or found is None:
            if not _equal(first, second):
                raise changed(server, name, words, together)
            return
        for key in {**known, **found}:
            if key in known and key in found:
                compare(name + key, known[key], found[key])
            elif _is_new_list(first, key, known, found):
                added[name + key] = found[key]
            elif key in known:
                raise changed(server, name + key, words, together)
            else:
                compare(name + key, _MISSING, found[key])

    compare("", server, copy)
    return {name.lstrip("."): values for name, values in added.items()}


def add_to_lists(server: nn.Module, added: Mapping[str, list[Any]]) -> None:
    """Append what :func:`additions` has found to the lists of the server's module."""
    for name, values in added.items():
        _of_name(server, f".{name}").extend(values)


def _of_name(module: nn.Module, name: str) -> Any:
    """Return the part of a module that has a name of :func:`additions`."""
    thing: Any = module
    while name:
        if isinstance(thing, nn.Module):
            inside = {f".{key}": value for key, value in (vars(thing) | thing._modules).items()}
        else:
            inside = _inside(thing, dict) or {}
        key = max((key for key in inside if name.startswith(key)), key=len, default=None)
        if key is None:  # a new list of a defaultdict
            return thing[literal_eval(name[1:-1])]
        thing, name = inside[key], name[len(key) :]
    return thing


def _is_new_list(first: Any, key: str, known: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    is_new = isinstance(first, defaultdict) and first.default_factory is list and key not in known
    return is_new and isinstance(found[key], list)


def _labels(module: nn.Module) -> dict[int, str]:
    """Return the names of a module's parts, by ``id``."""
    named = (module.named_modules, module.named_parameters, module.named_buffers)
    return {id(part): f"{kind.__name__[6:]} {name}" for kind in named for name, part in kind()}


def _inside(thing: Any, labels: Callable[[], Mapping[int, str]]) -> dict[str, Any] | None:
    """Return what a part of a module consists of, by the ends of names; None for a single value.

    Args:
        thing: The part.
        labels: Function that returns the names of layers and tensors by ``id``, for keys.
    """
    if isinstance(thing, Optimizer):
        groups = enumerate(thing.param_groups)
        return {
            f".param_groups[{n}][{k!r}]": x for n, group in groups for k, x in group.items() if k != "params"
        }
    if isinstance(thing, dict):
        return {f"[{_key(key, labels)}]": value for key, value in thing.items()}
    if isinstance(thing, set | frozenset):
        return {f"{{{_key(key, labels)}}}": True for key in thing}
    if isinstance(thing, list | tuple | deque):
        return {f"[{number}]": value for number, value in enumerate(thing)}
    if isinstance(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        return {f".{name}": value for name, cell in cells for value in closure_contents(cell)}
    if isinstance(thing, types.MethodType):
        return {"": thing.__self__}
    slots = slots_of(type(thing))
    if isinstance(thing, _GENERATORS) or not (slots or hasattr(thing, "__dict__")):
        return None
    held = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return {f".{key}": value for key, value in (held | getattr(thing, "__dict__", {})).items()}


def _key(key: Any, labels: Callable[[], Mapping[int, str]]) -> str:
    if isinstance(key, str | int):
        return repr(key)
    part = key() if isinstance(key, weakref.ref) else key
    return labels().get(id(part)) or repr(part)


def _equal(first: Any, second: Any) -> bool:
    may_be_cache = [isinstance(value, Tensor) or value is None for value in (first, second)]
    if all(may_be_cache):
        return True
    if isinstance(first, torch.Generator) and isinstance(second, torch.Generator):
        return torch.equal(first.get_state(), second.get_state())
    with suppress(Exception):  # of the objects' own code, or of arrays of other sizes
        if (first == second) is True:
            return True
    try:
        return pickle.dumps(first) == pickle.dumps(second)
    except Exception:  # noqa: BLE001  # the objects' own code; copies have only what can be pickled
        return False


def _is_cache(value: Any) -> bool:
    return all(isinstance(leaf, Tensor) or leaf is None for leaf in tree_leaves(value))


def same_values(first: Any, second: Any) -> bool:
    """Return whether two attributes are the same tensor by shape and values, or both are no tensor."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return not isinstance(first, Tensor) and not isinstance(second, Tensor)
    if is_batchedtensor(first) or first.shape != second.shape:
        return False
    with suppress(RuntimeError):  # of tensors without values
        return torch.equal(first.nan_to_num(), second.to(first).nan_to_num())
    return True


def changed(server: nn.Module, name: str, words: str, together: str) -> ConfigurationError:
    """Return the error about a changed attribute, see :func:`additions`."""
    why = "which would start anew in the next round"
    remedy = (
        "log the value, keep it in a buffer (register_buffer), or name it in fresh_each_round of the class"
    )
    if together:
        why, remedy = f"which all clients share under {together}", "use SequentialExecutor, or a buffer"
    if name.endswith(".training"):
        remedy = "call train() and eval() in __init__, or freeze BN statistics by FixBN"
    return ConfigurationError(
        f"model: {words}: a step of {type(server).__name__} changes the attribute {name.lstrip('.')!r}, {why}; {remedy}"
    )
