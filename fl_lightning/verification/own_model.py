"""A user's own model, as the model of the rules."""

from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.errors import ConfigurationError
from fl_lightning.testing.federation import BATCH
from fl_lightning.verification.memory import TENSORS

_WIDTHS = (8, 16, 28, 32, 64, 96, 128, 224, 256, 299)
"""Tried widths of the images of a model."""


def own_model(model: nn.Module) -> dict[str, Any]:
    """Print the number of BN layers of a user's model, and return settings of ``certify``.

    The settings have the model in float64, without its dropout.

    The model's ``example_input_array``, an attribute that Lightning also uses, gives the shape of an
    input. Without this attribute, the first matrix of weights gives the number of channels, and
    several widths are tried.

    Raises:
        ConfigurationError: The model does not map such inputs to class scores ``[batch, classes]``.
    """
    for name, layer in [*model.double().named_modules()]:
        if "Dropout" in type(layer).__name__:
            model.set_submodule(name, nn.Identity())
    example = getattr(model, "example_input_array", None)
    weights = [weight.shape for weight in model.parameters() if weight.dim() > 1][:1]
    guesses = {(x[1], *[width] * len(x[2:])): None for x in weights for width in _WIDTHS}
    shapes = [*guesses] if example is None else [tuple(example.shape[1:])]
    # a LightningModule has its own optimizer
    optimizer = {"client_optimizer": None} if hasattr(model, "training_step") else {}
    for shape in shapes:
        # the outputs may be of any type
        with suppress(RuntimeError, ValueError, IndexError, AttributeError), torch.no_grad():
            batch, classes = deepcopy(model)(torch.zeros(BATCH, *shape, dtype=torch.float64)).shape
            if batch == BATCH and classes > 1:
                TENSORS.update(model.state_dict())
                layers = f"BN layers: {len(batch_norm_layers(model))}, shape of an input: {[*shape]}"
                print(f"{type(model).__name__}  {layers}; equalities are checked on the model of verify\n")
                data = {"shape": shape, "classes": classes, "scale": 0.1}
                return {"model": model, "data": data, **optimizer}
    raise ConfigurationError(
        f"model: {type(model).__name__} gives no class scores [batch, classes >= 2] for inputs {[*map(list, shapes)]}; verify "
        "needs a classifier of floats, whose attribute example_input_array may have an input [batch, ...]"
    )
