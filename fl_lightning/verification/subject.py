"""Model that the rules train: the small reference model, or a user's own model."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.errors import ConfigurationError
from fl_lightning.models.dropout import Dropout
from fl_lightning.randomness import seeded
from fl_lightning.testing.federation import BATCH, CLASSES, SHAPE, reference_model
from fl_lightning.verification.memory import TENSORS

_WIDTHS = (8, 16, 28, 32, 64, 224)
"""Tried widths of the images of a user's model."""


@dataclass(frozen=True)
class Subject:
    """Model that the rules train.

    Attributes:
        make: Function that returns a new float64 model with fixed weights, given the kind of its
            norm layers.
        shape: Shape of an input, without the batch.
        classes: Number of classes.
        words: Name of a user's model, with its number of BN layers.
    """

    make: Callable[[str], nn.Module]
    shape: tuple[int, ...]
    classes: int
    words: str = ""


REFERENCE = Subject(reference_model, SHAPE, CLASSES)


def own_subject(make: Callable[[], nn.Module], shape: Sequence[int] | None = None) -> Subject:
    """Return a user's model as subject, without its dropout.

    Args:
        make: Function that returns a new model.
        shape: Shape of an input. By default, the first layer gives the channels, and several widths
            are tried.

    Raises:
        ConfigurationError: The model does not map such inputs to class scores ``[batch, classes]``.
    """

    def fixed(norm: str = "") -> nn.Module:
        with seeded(0):
            model = make().double()
        for name, layer in [*model.named_modules()]:
            if isinstance(layer, _DropoutNd | Dropout):
                model.set_submodule(name, nn.Identity())
        return model

    model = fixed()
    name, layers = type(model).__name__, len(batch_norm_layers(model))
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear | _ConvNd)][:1]
    guesses = {(x.shape[1], *[width] * (x.dim() - 2)): None for x in weights for width in _WIDTHS}
    shapes = [tuple(shape)] if shape else [*guesses]
    for tried in shapes:
        # the outputs may also be no tensor
        with suppress(RuntimeError, ValueError, IndexError, AttributeError), torch.no_grad():
            batch, classes = fixed()(torch.zeros(BATCH, *tried, dtype=torch.float64)).shape
            if batch == BATCH and classes > 1:
                TENSORS.update(model.state_dict())
                return Subject(fixed, tried, classes, f"{name}: {layers} BN layer{'s' * (layers != 1)}")
    raise ConfigurationError(
        f"model: {name} gives no class scores [batch, classes] for inputs {', '.join(str([*x]) for x in shapes)}; "
        "verify needs a classifier of floats, and --input_shape, such as '[3, 32, 32]', gives the shape of an input"
    )
