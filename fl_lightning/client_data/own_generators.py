"""Random generators that a user's loader, samplers and data set hold."""

import random
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CLOSED = (type, ModuleType, Tensor, np.ndarray, L.LightningModule, L.Trainer)
_MANY = 1000  # a larger container holds samples


def own_generators(roots: Iterable[Any], without: Iterable[Any] = ()) -> list[Any]:
    """Return the random generators of torch, NumPy and Python that objects hold.

    Attributes, small containers, partial functions, methods and closures are searched.

    Args:
        roots: The objects.
        without: Objects that are not searched.
    """
    waiting, seen = [*roots], {id(part): part for part in without}
    generators = []
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen[id(part)] = part
            if isinstance(part, _KINDS):
                generators.append(part)
            else:
                waiting += _inside(part)
    return generators


def _inside(part: Any) -> Iterator[Any]:
    if isinstance(part, _CLOSED):
        return
    if type(part) in (dict, list, tuple) and len(part) <= _MANY:
        yield from part.values() if isinstance(part, dict) else part
    elif isinstance(part, partial):
        yield from (part.func, part.args, part.keywords)
    elif isinstance(part, MethodType | BuiltinMethodType):
        yield part.__self__
    elif isinstance(part, FunctionType):
        yield from (part.__defaults__, part.__kwdefaults__)
        yield from (cell.cell_contents for cell in part.__closure__ or () if cell != type(cell)())
    yield from getattr(part, "__dict__", {}).values()


def reseed(generator: Any, seed: int) -> None:
    """Seed a random generator of torch, NumPy or Python."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)
