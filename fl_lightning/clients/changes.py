"""Changes of a client's steps to a copy of a LightningModule, outside of parameters and buffers."""

import pickle
import random
import types
from collections import OrderedDict
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection

from fl_lightning.clients.template import contents
from fl_lightning.errors import ConfigurationError

_APART_TYPES = (Tensor, Metric, MetricCollection, LRScheduler)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_HOOKS = [name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict)]
_APART = {"_parameters", "_buffers", "_modules", "_trainer", "_compiled_call_impl", *_HOOKS}
"""Attributes of a module that are no state of it, or that are compared elsewhere."""

_PLAIN = (bool, int, float, str, tuple, set)
_MISSING = object()


def additions(server: nn.Module, copy: nn.Module, own: Container[str], words: str) -> dict[str, list[Any]]:
    """Return what a client's steps have appended to lists of the module, by the lists' names.

    Tensors outside of parameters and buffers may differ, as in a cache.

    Args:
        server: The server's module.
        copy: The client's copy.
        own: Attributes that the copy has set when it was made, such as ``".optimizer"``.
        words: Words for round and client, for messages.

    Raises:
        ConfigurationError: Another value differs from the server's.
    """
    added: dict[str, list[Any]] = {}
    seen: set[tuple[int, int]] = set()

    def compare(name: str, first: Any, second: Any) -> None:
        if first is second or (id(first), id(second)) in seen or isinstance(second, _APART_TYPES):
            return
        if first is _MISSING and _is_cache(second):
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
                if key not in _APART:
                    compare(f"{name}.{key}", value, other)
            for key in vars(second).keys() - vars(first).keys() - _APART:
                compare(f"{name}.{key}", _MISSING, vars(second)[key])
            for child, part in first._modules.items():
                compare(f"{name}.{child}", part, second._modules.get(child, _MISSING))
            return
        known, found = _inside(first), _inside(second)
        if type(first) is not type(second) or known is None or found is None:
            if not _equal(first, second):
                raise _changed(server, name, words)
            return
        for key in {**known, **found}:
            if key in known and key in found:
                compare(name + key, known[key], found[key])
            elif key in known or not _is_cache(found[key]):
                raise _changed(server, name + key, words)

    compare("", server, copy)
    return {name.lstrip("."): values for name, values in added.items()}


def add_to_lists(server: nn.Module, added: Mapping[str, list[Any]]) -> None:
    """Append what :func:`additions` has found to the lists of the server's module."""
    for name, values in added.items():
        place, _, attribute = name.rpartition(".")
        getattr(server.get_submodule(place), attribute).extend(values)


def _inside(thing: Any) -> dict[str, Any] | None:
    """Return what a part of a module consists of, by the ends of names; None for a single value."""
    if isinstance(thing, Optimizer):
        groups = enumerate(thing.param_groups)
        return {
            f".param_groups[{n}][{k!r}]": x for n, group in groups for k, x in group.items() if k != "params"
        }
    if isinstance(thing, dict):
        return {f"[{key!r}]": value for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return {f"[{number}]": value for number, value in enumerate(thing)}
    if isinstance(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        return {f".{name}": value for name, cell in cells for value in contents(cell)}
    if isinstance(thing, types.MethodType):
        return {"": thing.__self__}
    if isinstance(thing, _GENERATORS) or not hasattr(thing, "__dict__"):
        return None
    return {f".{key}": value for key, value in vars(thing).items()}


def _equal(first: Any, second: Any) -> bool:
    may_be_cache = [isinstance(value, Tensor) or value is None for value in (first, second)]
    if all(may_be_cache):
        return True
    if isinstance(first, torch.Generator) and isinstance(second, torch.Generator):
        return torch.equal(first.get_state(), second.get_state())
    try:
        return (first == second) is True or pickle.dumps(first) == pickle.dumps(second)
    except (TypeError, pickle.PicklingError):
        return type(first) is type(second)


def _is_cache(value: Any) -> bool:
    return all(isinstance(leaf, Tensor) or leaf is None for leaf in tree_leaves(value))


def _changed(server: nn.Module, name: str, words: str) -> ConfigurationError:
    return ConfigurationError(
        f"model: {words}: a step of {type(server).__name__} changes the attribute {name.lstrip('.')!r}, which would start anew in the next "
        "round; log the value, keep it in a buffer (register_buffer), or set it in on_train_epoch_start"
    )
