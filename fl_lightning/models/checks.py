"""Checks of model settings, with errors that name the setting to change."""

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_lightning.errors import ConfigurationError


def check_layers(model: nn.Module) -> None:
    """Raise a ``ConfigurationError`` if clients cannot train a layer.

    This is a lazy layer, an embedding with sparse gradients, or a LightningModule with a training step.
    """
    network = getattr(model, "_orig_mod", model)  # torch.compile wraps the model
    kinds = type(network).__mro__
    owner = next((kind.__name__ for kind in kinds if "training_step" in vars(kind)), None)
    # compare names: the package pytorch_lightning has the same class once more
    if owner and "LightningModule" in {kind.__name__ for kind in kinds} - {owner}:
        raise ConfigurationError(
            f"model: {type(network).__name__} overrides LightningModule.training_step, which clients never call; give its "
            "network as model, its loss as loss and its optimizer as client_optimizer"
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
