"""The norm layer of a model as one argument."""

from torch import nn

from fl_lightning.errors import ConfigurationError

NORMS = ("bn", "gn", "none")


def make_norm(norm: str, channels: int, groups: int = 2) -> nn.Module:
    """A norm layer for feature maps ``[b, channels, height, width]``.

    Args:
        norm: ``"bn"``, Batch Normalization with torch's defaults (momentum 0.1, eps 1e-5, affine); ``"gn"``, Group
            Normalization with affine parameters per channel; ``"none"``, no normalization.
        channels: Number of channels.
        groups: Number of groups (not of channels in a group) of every GN layer; 2 in Hsieh et al., "The Non-IID Data
            Quagmire of Decentralized Machine Learning", ICML 2020, and in FixBN, App. B.4. Unused by the others.

    Raises:
        ConfigurationError: ``norm`` is unknown, or the channels cannot be split into ``groups`` equal groups.
    """
    if norm == "bn":
        return nn.BatchNorm2d(channels)
    if norm == "gn":
        if groups < 1 or channels % groups:
            raise ConfigurationError(
                f"groups={groups} does not divide a layer of {channels} channels; use a divisor of {channels}"
            )
        return nn.GroupNorm(groups, channels)
    if norm == "none":
        return nn.Identity()
    raise ConfigurationError(f"norm={norm!r} is unknown; use one of {', '.join(NORMS)}")


def conv_bias(norm: str) -> bool:
    """Whether a convolution directly before this norm layer has a bias: only where nothing adds a shift after it."""
    return norm == "none"
