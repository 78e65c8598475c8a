"""Models of torchvision, timm and segmentation_models_pytorch, with a choice of norm layers."""

from importlib import import_module
from typing import Any, Literal

from torch import nn

from fl_lightning.errors import ConfigurationError, missing_module
from fl_lightning.models.norm import convert_norm
from fl_lightning.models.weights import load_weights
from fl_lightning.recorded import records

_NUM_CLASSES = {"segmentation_models_pytorch": "classes"}
"""Argument for the number of classes, by library; ``num_classes`` in all others."""
_IN_CHANNELS = {"timm": "in_chans", "torchvision": None}
"""Argument for the number of channels, by library; ``in_channels`` in all others."""


@records()
def library_model(
    function: str,
    num_classes: int | None = None,
    in_channels: int | None = None,
    norm: str = "bn",
    groups: int = 2,
    settings: dict[str, Any] | None = None,
) -> nn.Module:
    """Create a model of another library or of a user, with a choice of norm layers.

    Supported libraries are torchvision, timm and segmentation_models_pytorch. Weights are
    downloaded only if ``settings`` request pretrained weights. To load weights from a local file,
    set ``initial_weights`` of :class:`~fl_lightning.round.module.FederatedModule`.

    Args:
        function: Dotted path of the function or class that creates the model, such as
            ``"torchvision.models.resnet18"``, ``"timm.create_model"`` or
            ``"segmentation_models_pytorch.Unet"``.
        num_classes: Number of classes. None (default) uses the library's default.
        in_channels: Number of channels of the images. None (default) uses the library's default.
            torchvision's models require 3 channels.
        norm: ``"bn"``, ``"gn"``, ``"ln"``, ``"in"`` or ``"none"``, see
            :func:`~fl_lightning.models.norm.convert_norm`.
        groups: Number of groups of every GN layer.
        settings: Further arguments of the function, such as ``{"model_name": "resnet18"}`` for
            timm.

    Raises:
        ConfigurationError: The library is missing, the function or a setting is unknown, or
            ``groups`` does not divide a layer's channels.
    """
    package, (module, _, name) = function.partition(".")[0], function.rpartition(".")
    try:
        make = getattr(import_module(module), name)
    except ImportError as error:
        remedy = missing_module(error.name or "", function) or "; give a dotted path"
        raise ConfigurationError(f"function: {function!r} cannot be imported ({error}){remedy}") from error
    except (AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"function: there is no {function!r}; give a dotted path such as torchvision.models.resnet18"
        ) from error
    # any value except None downloads weights
    given: dict[str, Any] = {"encoder_weights": None} if package == "segmentation_models_pytorch" else {}
    if num_classes is not None:
        given[_NUM_CLASSES.get(package, "num_classes")] = num_classes
    channels = _IN_CHANNELS.get(package, "in_channels")
    if channels is not None and in_channels is not None:
        given[channels] = in_channels
    elif in_channels not in (None, 3):
        raise ConfigurationError(
            f"in_channels={in_channels}: {function} takes images of 3 channels; use a model of this project or of timm"
        )
    given |= settings or {}
    try:
        model: Any = make(**given)
    except TypeError as error:
        raise ConfigurationError(f"settings: {given} do not fit {function}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"function: {function!r} makes a {type(model).__name__}, which is no model")
    convert_norm(model, norm, groups)
    return model


@records("encoder_weights")
def deeplab_v3_plus(
    num_classes: int = 19,
    in_channels: int = 3,
    encoder: str = "mobilenet_v2",
    output_stride: Literal[8, 16] = 16,
    norm: str = "bn",
    groups: int = 2,
    pooled_norm: str | None = None,
    encoder_weights: str | None = None,
) -> nn.Module:
    """Create the DeepLabv3+ (Chen et al., ECCV 2018) of segmentation_models_pytorch.

    Install ``fl_lightning[segmentation]`` first. Height and width of the images must be divisible
    by ``output_stride``. The logits have the same height and width as the images. With 19 classes,
    the model has 4,383,139 trainable parameters for the encoder MobileNet-v2, and 26,682,211 for
    ResNet-50.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        encoder: Name of the encoder, such as ``"mobilenet_v2"`` or ``"resnet50"``.
        output_stride: Ratio of the image's height to the height of the encoder's last feature map.
        norm: ``"bn"``, ``"gn"``, ``"ln"``, ``"in"`` or ``"none"``, see
            :func:`~fl_lightning.models.norm.convert_norm`.
        groups: Number of groups of every GN layer.
        pooled_norm: Norm layer after the pyramid's mean over the image. None (default) means the
            same as ``norm``. BN after this mean needs batches of at least two images; ``"gn"`` and
            ``"none"`` do not.
        encoder_weights: File with weights of the encoder, such as torchvision's ImageNet weights,
            see :func:`~fl_lightning.models.weights.load_weights`. A classifier in the file is
            ignored. None (default) uses random weights.

    Raises:
        ConfigurationError: The library is missing, the encoder is unknown, the weights do not fit,
            or ``groups`` does not divide a layer's channels.
    """
    settings = {"encoder_name": encoder, "encoder_output_stride": output_stride}
    try:
        model = library_model(
            "segmentation_models_pytorch.DeepLabV3Plus", num_classes, in_channels, settings=settings
        )
    except KeyError as error:
        raise ConfigurationError(f"encoder={encoder!r} is unknown to segmentation_models_pytorch") from error
    if encoder_weights is not None:
        load_weights(
            model.get_submodule("encoder"), encoder_weights, "encoder_weights", without=("fc.", "classifier.")
        )
    branches: Any = model.get_submodule("decoder.aspp.0.convs")
    pooled = branches[-1]
    branches[-1] = nn.Identity()  # the rest of the model has another norm
    convert_norm(model, norm, groups)
    convert_norm(pooled, pooled_norm or norm, groups)
    branches[-1] = pooled
    return model
