"""What a run was built from, as one tree of plain values."""

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.nn.parameter import is_lazy

from fl_lightning.batch_norm.layers import set_momentum
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.client_data.fingerprint import digest
from fl_lightning.models.dropout import convert_dropout
from fl_lightning.randomness import seed_global
from fl_lightning.recorded import Making, Recorded, making
from fl_lightning.round.module import FederatedModule
from fl_lightning.run_directory.values import as_plain, class_name, group_settings, layers, tree_digest

LINKED = ("num_classes", "in_channels", "image_size")
"""Arguments of a model that the data decide unless they are given."""

_TRAINER = {
    name: one.default for name, one in inspect.signature(L.Trainer).parameters.items() if name != "callbacks"
}


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
    _describe_groups(module, settings)
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


def _describe_groups(module: FederatedModule, settings: dict[str, Any]) -> None:
    """Add a digest of an optimizer's groups where these depend on the parameters that it is made for."""
    leaves = [torch.zeros_like(x) for x in module.model.parameters() if x.requires_grad and not is_lazy(x)]
    given = {"client_optimizer": [{"params": [x]} for x in leaves], "server_optimizer": leaves}
    for name, parameters in given.items():
        make = getattr(module, name)
        if isinstance(make, partial) or not leaves:
            continue
        optimizer = make(parameters)
        found = [as_plain(one) for one in group_settings(optimizer)]
        node = settings[name] if isinstance(settings[name], dict) else {"class_path": settings[name]}
        usual = node.get("init_args", {})
        if any({**usual, **one} != usual for one in found):
            numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
            places = [[numbers.get(id(x)) for x in group["params"]] for group in optimizer.param_groups]
            settings[name] = {**node, "groups_digest": tree_digest([found, places])}


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
    model = getattr(module.model, "_orig_mod", module.model)  # of a compiled model
    made = making(model)
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
    names = {class_name(layer) for layer in model.modules() if layer is not model}
    own = sorted(name for name in names if not name.startswith("torch."))
    return {"layer_classes": own} if own else {}
