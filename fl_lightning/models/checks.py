"""Checks of model settings, with errors that name the setting to change."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_lightning.errors import ConfigurationError


def check_model(model: Any, loss: Any) -> None:
    """Check that clients can train a model with a loss.

    Args:
        model: The model.
        loss: The loss; None for that of the task.

    Raises:
        ConfigurationError: The model is no ``torch.nn.Module``, hides its layers or has no trainable
            parameter, or the loss has a parameter that would never be trained.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model: {model!r} is no model; give an object of torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"model: torch.jit.script hides the layers of {model.original_name}; give the model itself"
        )
    check_layers(model)
    known = set(model.parameters())
    if not any(parameter.requires_grad for parameter in known):
        raise ConfigurationError(f"model: {type(model).__name__} has no trainable parameters")
    for name, parameter in loss.named_parameters() if isinstance(loss, nn.Module) else ():
        if parameter.requires_grad and parameter not in known:
            raise ConfigurationError(
                f"loss: the parameter {name!r} of {type(loss).__name__} would never be trained; put the parameter into the model, "
                "or make it a buffer"
            )


def check_layers(model: nn.Module) -> None:
    """Raise a ``ConfigurationError`` if clients cannot train a layer.

    This is a lazy layer, an embedding with sparse gradients, or a layer with a sparse buffer.
    """
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ConfigurationError(
                f"model: the buffer {name!r} is sparse, and clients' buffers are rows of one tensor; keep it as a plain attribute"
            )
    for name, layer in model.named_modules():
        lazy = any(map(is_lazy, (*layer.parameters(recurse=False), *layer.buffers(recurse=False))))
        sparse = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        if lazy or (sparse and layer.weight.requires_grad):
            fault = "no sizes yet; give it sizes, or first call the model on a batch"
            if not lazy:
                fault = "sparse=True; use sparse=False, with which SGD takes the same steps"
            raise ConfigurationError(f"model: layer {name!r} ({type(layer).__name__}) has {fault}")


def require_images(images: Tensor, in_channels: int, image_size: int | None = None) -> None:
    """Raise a ``ConfigurationError`` if the images do not fit the model.

    Args:
        images: A batch ``[b, channels, height, width]``.
        in_channels: Number of channels that the model expects.
        image_size: Height and width in pixels that the model expects; None for any size.
    """
    channels, height, width = images.shape[-3:]
    if channels != in_channels:
        raise ConfigurationError(
            f"the model has in_channels={in_channels} but the images have {channels}; set in_channels to {channels}"
        )
    if image_size is not None and (height, width) != (image_size, image_size):
        remedy = f"set image_size to {height}" if height == width else "crop them to a square"
        raise ConfigurationError(
            f"the model has image_size={image_size} but the images are {height}x{width}; {remedy}"
        )
