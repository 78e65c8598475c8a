"""Checks of model settings that say which setting to change."""

from torch import Tensor

from fl_lightning.errors import ConfigurationError


def require_at_least(minimum: int, **settings: int) -> None:
    """Refuse the first setting that is smaller than ``minimum``.

    Raises:
        ConfigurationError: A setting is too small.
    """
    for name, value in settings.items():
        if value < minimum:
            raise ConfigurationError(f"{name}={value} is too small for this model; use {minimum} or more")


def require_images(images: Tensor, in_channels: int, image_size: int | None = None) -> None:
    """Refuse images that the model was not built for.

    Args:
        images: A batch ``[b, channels, height, width]``.
        in_channels: Channels the model was built for.
        image_size: Height and width in pixels the model was built for; None where any will do.

    Raises:
        ConfigurationError: The images have another number of channels, or another size.
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
