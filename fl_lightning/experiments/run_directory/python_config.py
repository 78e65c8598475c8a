"""Configuration of a run from Python: what its objects were built of, as far as it has plain form."""

import enum
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.experiments.run_directory.config_digest import full_name
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.recorded import making
from fl_lightning.round.module import FederatedModule

_OPTIMIZERS = ("client_optimizer", "server_optimizer")


def python_config(module: FederatedModule, data: FederatedDataModule, trainer: Config) -> Config:
    """Return the entries ``seed_everything``, ``model``, ``data`` and ``trainer`` of ``config.yaml``.

    Args:
        module: The module.
        data: The data module.
        trainer: Arguments of the trainer, including ``callbacks``.
    """
    model, samples = as_plain(module), as_plain(data)
    model["init_args"].pop("seed", None)
    if samples["init_args"].get("seed") == module.seed:
        del samples["init_args"]["seed"]
    return {
        "seed_everything": module.seed,
        "model": model["init_args"] if type(module) is FederatedModule else model,
        "data": samples,
        "trainer": as_plain(trainer),
    }


def as_plain(thing: Any) -> Any:
    """Describe a value by numbers, strings, lists and dicts, as in a YAML configuration.

    An object becomes the name of its class with the arguments of its constructor, if these were
    recorded (:class:`~fl_lightning.recorded.Recorded`). Any other object, such as a tensor or a
    lambda, has no plain form: only the name of its class or function is given.
    """
    if isinstance(thing, np.generic):
        thing = thing.item()
    if isinstance(thing, enum.Enum):
        return thing.name
    if thing is None or type(thing) in (bool, int, float, str):
        return thing
    if isinstance(thing, os.PathLike | str):
        return os.fspath(thing)
    if isinstance(thing, Mapping):
        return {str(key): as_plain(value) for key, value in thing.items()}
    if isinstance(thing, set | frozenset):
        return sorted(map(as_plain, thing), key=repr)
    if isinstance(thing, list | tuple | range):
        return [*map(as_plain, thing)]
    if isinstance(thing, partial):
        return _node(thing.func, thing.keywords)
    if isinstance(thing, type) or inspect.isroutine(thing):
        return full_name(thing)
    if isinstance(hparams := getattr(thing, "hparams", None), Mapping) and hparams:  # save_hyperparameters()
        return _node(type(thing), hparams)
    made = making(getattr(thing, "_orig_mod", thing))  # the original model, if the model is compiled
    return _node(type(thing), {}) if made is None else _node(made.maker, made.arguments)


def _node(maker: Callable[..., Any], arguments: Mapping[str, Any]) -> Config:
    plain = {
        name: _optimizer(x) if name in _OPTIMIZERS and callable(x) else as_plain(x)
        for name, x in arguments.items()
    }
    return {"class_path": full_name(maker), "init_args": plain}


def _optimizer(make: Callable[..., Optimizer]) -> Config:
    optimizer = make([nn.Parameter(torch.zeros(1))])
    return _node(type(optimizer), optimizer.defaults)
