"""Description of a run's objects as nested dicts and lists of numbers and strings."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from fl_lightning.batch_norm.layers import set_momentum
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.client_data.fingerprint import digest
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.run_directory.values import (
    as_plain,
    class_name,
    group_settings,
    layers,
    tree_digest,
)
from fl_lightning.models.dropout import convert_dropout
from fl_lightning.randomness import seed_global
from fl_lightning.recorded import making
from fl_lightning.round.module import FederatedModule

LINKED = ("num_classes", "in_channels", "image_size", "in_features")
"""Arguments of a model's constructor for which the data module provides defaults."""

_TRAINER = {
    name: x.default for name, x in inspect.signature(L.Trainer).parameters.items() if name != "callbacks"
}


_LATER = ("seed", "executor")
"""Arguments of the module that a run may change after the module's construction."""


def built(module: FederatedModule, data: FederatedDataModule, trainer: Config) -> Config:
    """Describe the objects of a run as a tree with the structure of a configuration.

    Args:
        module: The module.
        data: The data module.
        trainer: Arguments of the trainer, including ``callbacks``.

    Returns:
        The entries ``seed_everything``, ``model``, ``data`` and ``trainer``. The model's entry
        includes the arguments that the data module determines, such as the number of classes.
    """
    model, data_node = as_plain(module), as_plain(data)
    seed = model["init_args"].pop("seed")
    if (data_seed := data_node["init_args"].pop("seed", seed)) != seed:
        data_node["own_seed"] = data_seed  # the user has given the data module a different seed
    if type(module) is FederatedModule:
        model = model["init_args"]
    return {
        "seed_everything": seed,
        "model": model,
        "data": data_node,
        "trainer": {**_TRAINER, **as_plain(dict(trainer))},
    }


def built_in_python(module: FederatedModule, data: FederatedDataModule, trainer: Config) -> Config:
    """Describe the objects that a Python script has made.

    The result has the format of :func:`built`. Digests are added for layers and weights that the
    model's arguments and the run's seed do not determine. Settings may have been assigned after
    construction. For the module, the result has the new values. For the data module and the
    callbacks, the new values are under the key ``reassigned``.
    """
    tree = built(module, data, trainer)
    settings = tree["model"].get("init_args", tree["model"])
    made = making(module)
    if made is None or module.model is not made.arguments.get("model"):
        settings["model"] = as_plain(module.model)
    settings["model"] |= _digests(module)
    _describe_groups(module, settings)
    settings |= _reassigned(module)
    objects = [data, *(trainer.get("callbacks") or [])]
    _add_reassigned(objects, [tree["data"], *(tree["trainer"].get("callbacks") or [])])
    return tree


def _describe_groups(module: FederatedModule, settings: Config) -> None:
    """Add a digest of parameter groups whose settings differ from the optimizer's description."""
    leaves = [torch.zeros_like(x) for x in module.model.parameters() if x.requires_grad]
    given = {"client_optimizer": [{"params": [x]} for x in leaves], "server_optimizer": leaves}
    for name, parameters in given.items():
        make = getattr(module, name)
        if isinstance(make, partial) or not leaves:
            continue
        optimizer = make(parameters)
        groups = [as_plain(group) for group in group_settings(optimizer)]
        node = settings[name] if isinstance(settings[name], dict) else {"class_path": settings[name]}
        usual = node.get("init_args", {})
        if any({**usual, **group} != usual for group in groups):
            numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
            places = [[numbers.get(id(x)) for x in group["params"]] for group in optimizer.param_groups]
            settings[name] = {**node, "groups_digest": tree_digest([groups, places])}


def _add_reassigned(thing: Any, node: Any) -> None:
    """Add settings that were assigned after construction to an object's description."""
    if isinstance(thing, list | tuple) and isinstance(node, list):
        for item, item_node in zip(thing, node, strict=True):
            _add_reassigned(item, item_node)
    made = making(thing)
    if made is None or not isinstance(node, dict):
        return
    for name, x in made.arguments.items():
        _add_reassigned(x, node["init_args"].get(name))
    if later := _reassigned(thing):
        node["reassigned"] = later


def _reassigned(thing: Any) -> Config:
    """Return the settings and methods of an object that were assigned after its construction."""
    made, held = making(thing), vars(thing)
    if made is None:
        return {}
    given, kind = made.arguments, type(thing)
    other = [n for n in given if n in held and n not in _LATER and not _is_same(held[n], given[n])]
    usual = vars(made.again()) if other else {}
    later = {
        name: as_plain(held[name]) for name in other if as_plain(held[name]) != as_plain(usual.get(name))
    }
    patched = {name: as_plain(x) for name, x in held.items() if inspect.isroutine(getattr(kind, name, None))}
    return later | patched


def _is_same(now: Any, given: Any) -> bool:
    try:
        return now is given or (type(now) is type(given) and bool(now == given))
    except (ValueError, RuntimeError):
        # comparing arrays or tensors with == does not return a single bool
        return False


def without_decided(tree: Config, data: FederatedDataModule) -> Config:
    """Return a copy of a description without model arguments that the data module determines."""
    configured = copy.deepcopy(tree)
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


def _digests(module: FederatedModule) -> Config:
    """Return digests of layers and weights, unless these follow from model arguments and seed."""
    # use the original model if the model is compiled
    model = getattr(module.model, "_orig_mod", module.model)
    made = making(model)
    weights = {"weights_digest": digest(dict(model.state_dict()))} if module.initial_weights is None else {}
    if made is None:
        return {"state_digest": layers(model)} | weights | _parts(model)
    if any(isinstance(x, nn.Module) for x in made.arguments.values()):
        # the caller has made these layers and initialised their weights
        return {"layers_digest": layers(model)} | weights | _parts(model)
    with isolate_rng(), _float32():
        seed_global(module.seed, torch.device("cpu"))
        again = made.again()
    convert_dropout(again)
    module_made = making(module)
    if module_made is not None and (momentum := module_made.arguments["bn_momentum"]) is not None:
        set_momentum(again, momentum)
    same = layers(again) == layers(model)
    other = {} if same else {"layers_digest": layers(model), **_parts(model)}
    return other | ({} if digest(dict(again.state_dict())) == weights.get("weights_digest") else weights)


@contextmanager
def _float32() -> Iterator[None]:
    """Set the default dtype to float32 in the block, as the command line does."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        yield
    finally:
        torch.set_default_dtype(before)


def _parts(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the model's layer classes that are not defined in torch.

    The results of the run depend on the code of these classes.
    """
    names = {class_name(layer) for layer in model.modules() if layer is not model}
    foreign = sorted(name for name in names if not name.startswith("torch."))
    return {"layer_classes": foreign} if foreign else {}
