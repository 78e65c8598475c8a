"""Functions that create norm layers and the convolutions before norm layers."""

from math import inf, nan

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.errors import ConfigurationError, check_choice, doing
from fl_lightning.models.convolutions import (
    ScaledStandardizedConv2d,
    SmallStandardizedConv2d,
    StandardizedConv2d,
    WeightNormConv2d,
)

NORMS = {
    "bn": "Batch Normalization with torch's defaults (momentum 0.1, eps 1e-5, affine).",
    "gn": "Group Normalization with affine parameters per channel.",
    "ln": "Layer Normalization over channels and pixels: one group.",
    "in": "Instance Normalization: one group per channel.",
    "gn_ws": "Group Normalization after convolutions with Weight Standardization.",
    "fed_ws": "As gn_ws, with filters of standard deviation 1e-3, or of X with fed_ws:X (FedWS).",
    "weight_norm": "No layer; convolutions with weight normalization.",
    "scaled_ws": "No layer; convolutions with Scaled Weight Standardization (FedWon).",
    "fn": "No layer; the features before the linear layer get the norm sqrt(d) (FN).",
    "none": "No layer.",
}
"""Description of each norm layer, by name. The CIFAR ResNets also accept ``"fixup"``."""
_CONVOLUTIONS: dict[str, type[nn.Conv2d]] = {
    "gn_ws": StandardizedConv2d,
    "fed_ws": SmallStandardizedConv2d,
    "weight_norm": WeightNormConv2d,
    "scaled_ws": ScaledStandardizedConv2d,
}


class InstanceNorm(nn.GroupNorm):
    """Instance Normalization: Group Normalization with one group per channel.

    Args:
        channels: Number of channels.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise maps ``[b, channels, ...]``. Refuse maps of one pixel, which would become 0."""
        if input.shape[2:].numel() == 1:
            raise ConfigurationError(
                "norm: in gets feature maps of one pixel, which would all become 0; use larger images, another norm or, for a "
                "DeepLab, pooled_norm: ln"
            )
        return super().forward(input)


def make_norm(norm: str, channels: int, groups: int = 2) -> nn.Module:
    """Create a norm layer for feature maps ``[b, channels, height, width]``.

    All norm layers except ``"bn"`` treat images independently. With one local step per round,
    federated training without BN therefore equals training on the union of the clients' batches.

    Args:
        norm: One of :data:`NORMS`. ``"in"`` needs feature maps of more than one pixel.
        channels: Number of channels.
        groups: Number of groups of a GN layer, not of channels in a group. Hsieh et al., "The
            Non-IID Data Quagmire", ICML 2020, and FixBN, App. B.4, use 2 groups.

    Raises:
        ConfigurationError: ``norm`` is unknown, or ``groups`` does not divide the channels.
    """
    norm = _name_and_deviation(norm)[0]
    if norm == "bn":
        return nn.BatchNorm2d(channels)
    if norm == "in":
        return InstanceNorm(channels)
    counts = {"gn": groups, "gn_ws": groups, "fed_ws": groups, "ln": 1}
    if norm in counts:
        if counts[norm] < 1 or channels % counts[norm]:
            raise ConfigurationError(
                f"groups={groups} does not divide a layer of {channels} channels; use a divisor of {channels}"
            )
        return nn.GroupNorm(counts[norm], channels)
    if norm in NORMS:
        return nn.Identity()
    raise ConfigurationError(
        f"norm={norm!r} is unknown; use one of {', '.join(NORMS)} (CIFARResNet also: fixup)"
    )


def _name_and_deviation(norm: str) -> tuple[str, float]:
    """Return the norm's name, and the standard deviation of FedWS's filters, X in ``"fed_ws:X"``."""
    if not norm.startswith("fed_ws:"):
        return norm, SmallStandardizedConv2d.rho
    name, _, value = norm.partition(":")
    try:
        deviation = float(value)
    except ValueError:
        deviation = nan
    if not 0 < deviation < inf:
        raise ConfigurationError(
            f"norm={norm!r}: {value!r} is no standard deviation of filters; use a number above 0, such as fed_ws:0.001"
        )
    return name, deviation


class FeatureNormLinear(nn.Linear):
    """Linear layer whose input features z, ``[b, d]``, become ``sqrt(d) z / |z|``.

    FN of Zhang et al., "Understanding the Role of Layer Normalization in Label-Skewed Federated
    Learning", TMLR 2024, arXiv 2308.09565. Features 0 stay 0.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map features ``[b, d]`` to outputs ``[b, num_classes]``."""
        length = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
        scale = self.in_features**0.5 / torch.where(length > 0, length, 1.0)
        return super().forward(input * scale)


def make_head(norm: str, features: int, num_classes: int) -> nn.Linear:
    """Create the linear layer at the end of a model: with ``"fn"``, a :class:`FeatureNormLinear`."""
    return (FeatureNormLinear if norm == "fn" else nn.Linear)(features, num_classes)


def convert_norm(model: nn.Module, norm: str, groups: int = 2) -> None:
    """Replace all BN layers of a model by another kind of norm layer.

    BN layers are found by type. The new layers keep the affine parameters and ``eps``. Shared
    layers stay shared. Convolutions do not change, and get no bias even with ``"none"``. Other
    operations inside a BN layer become separate modules, such as dropout and activation in timm's
    ``BatchNormAct2d``.

    Args:
        model: The model, changed in place.
        norm: ``"gn"``, ``"ln"``, ``"in"`` or ``"none"``, see :func:`make_norm`. ``"bn"`` changes
            nothing.
        groups: Number of groups of every GN layer.

    Raises:
        ConfigurationError: ``norm`` is unknown, or ``groups`` does not divide a layer's channels.
    """
    check_choice("norm", norm, ("bn", "gn", "ln", "in", "none"))
    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in batch_norm_layers(model).items() if norm != "bn" else ():
        with doing(f"replacing the BN layer {name!r}"):
            new = make_norm(norm, layer.num_features, groups)
        if isinstance(new, nn.GroupNorm):
            new.eps, new.affine = layer.eps, layer.affine
            new.weight, new.bias = layer.weight, layer.bias
        after = [getattr(layer, part) for part in ("drop", "act") if hasattr(layer, part)]
        replaced[layer] = nn.Sequential(new, *after) if after else new
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if module in replaced:
            model.set_submodule(name, replaced[module])


def make_conv(
    norm: str,
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    padding: int = 0,
    bias: bool | None = None,
) -> nn.Conv2d:
    """Create the convolution before a norm layer: ``nn.Conv2d`` for most norm layers.

    Args:
        norm: The norm layer, see :func:`make_norm`. ``"fed_ws:0.01"`` sets the standard deviation of
            the filters of FedWS.
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Height and width of the filters.
        stride: Stride of the convolution.
        padding: Width of the zero padding around the input.
        bias: Whether the convolution has a bias. None (default) means a bias only if no norm layer
            adds a shift.
    """
    if bias is None:
        bias = norm in ("none", "weight_norm", "scaled_ws")
    name, deviation = _name_and_deviation(norm)
    kind = _CONVOLUTIONS.get(name, nn.Conv2d)
    layer = kind(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
    if isinstance(layer, SmallStandardizedConv2d):
        layer.rho = deviation
    return layer
