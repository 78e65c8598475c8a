"""Random generators that a user's loader, samplers and data set hold."""

import gc
import random
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CLOSED = (type, ModuleType, Tensor, np.ndarray, L.LightningModule, L.Trainer)
_MANY = 100  # a larger container holds samples


def own_generators(roots: Iterable[Any], without: Iterable[Any] = ()) -> list[Any]:
    """Return the random generators of torch, NumPy and Python that objects refer to.

    Generators in global variables are not found.

    Args:
        roots: The objects.
        without: Objects that are not searched.
    """
    waiting, seen = [*roots], {id(part): part for part in without}
    generators = []
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, _CLOSED):
            continue
        seen[id(part)] = part
        if isinstance(part, _KINDS):
            generators.append(part)
        elif not isinstance(part, dict | list | tuple | set) or len(part) <= _MANY:
            is_global = isinstance(part, dict) and "__builtins__" in part  # of a function
            waiting += [] if is_global else gc.get_referents(part)
    return generators


def reseed(generator: Any, seed: int) -> None:
    """Seed a random generator of torch, NumPy or Python."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)
