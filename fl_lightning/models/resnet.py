"""ResNets for CIFAR (He et al., "Deep Residual Learning", CVPR 2016, Section 4.2)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.errors import ConfigurationError, check_at_least, check_choice
from fl_lightning.models.blocks import BasicBlock, ResidualBlock, make_stages
from fl_lightning.models.checks import require_images
from fl_lightning.models.convolutions import WeightNormConv2d
from fl_lightning.models.fixup import FixupBlock, ScalarBias, initialise_fixup
from fl_lightning.models.norm import make_conv, make_head, make_norm
from fl_lightning.recorded import Recorded


class CIFARResNet(Recorded, nn.Module):
    """ResNet of depth 6n+2 with a convolution, three stages of n blocks, and a linear layer.

    The linear layer gets the mean over the image. With depth 20 and the default settings, the model
    has 269,722 trainable parameters, 19 BN layers with 688 channels in all, and 40.55 million
    multiply-adds for a 32x32 image. Convolutions are initialised as in He et al., ICCV 2015, eq. 10
    (normal, variance 2 / fan-in, zero bias). The linear layer keeps torch's default initialisation.

    ``norm="fixup"`` is the FixUp ResNet of Zhang, Dauphin, Ma, ICLR 2019, with 268,393 trainable
    parameters at depth 20. The blocks have no norm layers. Scalar biases follow the first
    convolution and precede the linear layer. The first convolution keeps torch's initialisation;
    all other weights have FixUp's initialisation. The authors train the scalars with a tenth of the
    learning rate. To do the same, set ``parameter_groups: {scalars: {lr_scale: 0.1}}`` of
    :class:`~fl_lightning.round.module.FederatedModule`.

    Args:
        depth: Number of weighted layers, 6n+2.
        num_classes: Number of classes.
        in_channels: Channels of the images. The images may have any size.
        norm: Norm layer: ``"fixup"``, ``"bn"``, ``"gn"``, ``"ln"``, ``"in"``, ``"gn_ws"``,
            ``"fed_ws"``, ``"weight_norm"``, ``"scaled_ws"``, ``"fn"`` or ``"none"``, see
            :func:`fl_lightning.models.norm.make_norm`. Convolutions without a norm layer have
            biases.
        groups: Number of groups of every GN layer.
        width: Number of channels of the first stage. The other two stages have two times and four
            times as many channels.
        init: Initialisation. ``"he"`` (default) is described above. ``"xavier"`` initialises
            convolutions and the linear layer by Glorot, Bengio, AISTATS 2010, eq. 16 (uniform),
            with biases 0, as the code of FedBE (Chen, Chao, ICLR 2021) does. ``norm="fixup"`` has a
            separate initialisation, and requires the default.

    Raises:
        ConfigurationError: A setting is invalid.
    """

    def __init__(
        self,
        depth: int = 20,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: str = "bn",
        groups: int = 2,
        width: int = 16,
        init: str = "he",
    ) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ConfigurationError(f"depth={depth} is not 6n+2; use 8, 14, 20, 26, 32, ...")
        check_at_least(1, num_classes=num_classes, in_channels=in_channels, width=width)
        self.in_channels = in_channels
        fixup = norm == "fixup"
        check_choice("init", init, ("he",) if fixup else ("he", "xavier"))
        self.conv = make_conv(norm, in_channels, width, 3, padding=1)
        self.norm = ScalarBias() if fixup else make_norm(norm, width, groups)
        make_block: Callable[[int, int, int], ResidualBlock] = (
            FixupBlock if fixup else partial(BasicBlock, norm=norm, groups=groups)
        )
        self.blocks = make_stages(make_block, width, [(depth - 2) // 6] * 3)
        self.shift = ScalarBias() if fixup else nn.Identity()
        self.classifier = make_head(norm, 4 * width, num_classes)
        if fixup:
            initialise_fixup(self, self.classifier)
        else:
            initialise(self, init)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[b, in_channels, height, width]`` to logits ``[b, num_classes]``."""
        require_images(images, self.in_channels)
        features = self.blocks(F.relu(self.norm(self.conv(images))))
        logits: Tensor = self.classifier(self.shift(features.mean(dim=(-2, -1))))
        return logits


def initialise(model: nn.Module, init: str) -> None:
    """Initialise a model's weights, and set the biases to 0.

    Args:
        model: The model, changed in place.
        init: ``"he"``: He et al., ICCV 2015, eq. 10 (normal, variance 2 / fan-in) for convolutions.
            ``"xavier"``: Glorot and Bengio, AISTATS 2010, eq. 16 for convolutions and linear layers.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d if init == "he" else nn.Conv2d | nn.Linear):
            if init == "he":
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            else:
                nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, WeightNormConv2d):
            module.match_gain()


class ResNet8(CIFARResNet):
    """:class:`CIFARResNet` of depth 8: one block per stage, by default 75,290 parameters."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(8, *args, **settings)


class ResNet20(CIFARResNet):
    """:class:`CIFARResNet` of depth 20: 3 blocks per stage, by default 269,722 parameters."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(20, *args, **settings)


class ResNet32(CIFARResNet):
    """:class:`CIFARResNet` of depth 32: 5 blocks per stage, by default 464,154 parameters."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(32, *args, **settings)
