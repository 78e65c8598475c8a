"""A small network for fast tests."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "bn": nn.BatchNorm2d,
    "gn": partial(nn.GroupNorm, 2),
    "none": lambda width: nn.Identity(),
}


def small_cnn(
    norm: str = "bn", dropout: float = 0.0, seed: int = 0, classes: int = 3, channels: int = 2
) -> nn.Sequential:
    """Return a network for 6x6 images: two convolutions with norm layers, and a linear layer.

    Args:
        norm: Norm layer: ``"bn"``, ``"gn"`` or ``"none"``.
        dropout: Probability of dropout before the linear layer.
        seed: Seed of torch's global generator, from which the weights are drawn.
        classes: Number of outputs.
        channels: Channels of the images.

    Example:
        >>> small_cnn("gn")(torch.zeros(5, 2, 6, 6)).shape
        torch.Size([5, 3])
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), _NORMS[norm](4), nn.ReLU(), nn.Conv2d(4, 6, 3), _NORMS[norm](6), nn.ReLU(),
        nn.Dropout(dropout), nn.Flatten(), nn.Linear(24, classes),
    )  # fmt: skip
