"""Checks of model settings, with errors that name the setting to change."""

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_lightning.errors import ConfigurationError


def check_layers(model: nn.Module) -> None:
    """Raise a ``ConfigurationError`` if clients cannot train a layer.

    This is a lazy layer, or an embedding with sparse gradients.
    """
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
