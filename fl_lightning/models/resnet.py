"""ResNets for CIFAR: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, Section 4.2."""

import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.errors import ConfigurationError
from fl_lightning.models.checks import require_at_least, require_images
from fl_lightning.models.norm import conv_bias, make_norm


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut (option A): ``relu(x + norm(conv(relu(norm(conv(x))))))``.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output, at least ``in_channels``; the shortcut's further channels are zero.
        stride: Stride of the first convolution and of the shortcut's subsampling.
        norm: Norm layer, see :func:`fl_lightning.models.norm.make_norm`.
        groups: Number of groups of a GN layer.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str, groups: int) -> None:
        super().__init__()
        bias = conv_bias(norm)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=bias)
        self.norm1 = make_norm(norm, out_channels, groups)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=bias)
        self.norm2 = make_norm(norm, out_channels, groups)
        self.stride = stride
        self.new_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, in_channels, h, w]`` to ``[b, out_channels, ceil(h / stride), ceil(w / stride)]``."""
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(residual))
        return F.relu(self.shortcut(x) + residual)

    def shortcut(self, x: Tensor) -> Tensor:
        """The identity, subsampled and padded with zero channels where the shape changes."""
        if self.stride == 1 and self.new_channels == 0:
            return x
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class CIFARResNet(nn.Module):
    """A ResNet of depth 6n+2: a 3x3 convolution, three stages of n blocks, global average pooling, one linear layer.

    Depth 20 at the defaults has 269,722 trainable floats, 19 BN layers with 688 channels and 40.55 million
    multiply-adds for a 32x32 image. Convolutions start as in He et al., ICCV 2015, eq. 10 (normal, variance
    2 / fan-in, zero bias); the linear layer keeps torch's default initialisation.

    Args:
        depth: Number of weighted layers, 6n+2.
        num_classes: Number of classes.
        in_channels: Channels of the images; their size is free.
        norm: ``"bn"``, ``"gn"`` or ``"none"``; without a norm the convolutions have biases.
        groups: Number of groups of every GN layer.
        width: Channels of the first stage; the others have two and four times as many.

    Raises:
        ConfigurationError: A setting cannot be used.
    """

    def __init__(
        self,
        depth: int = 20,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: str = "bn",
        groups: int = 2,
        width: int = 16,
    ) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ConfigurationError(f"depth={depth} is not 6n+2; use 8, 14, 20, 26, 32, ...")
        require_at_least(1, num_classes=num_classes, in_channels=in_channels, width=width)
        self.in_channels = in_channels
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=conv_bias(norm))
        self.norm = make_norm(norm, width, groups)
        blocks_per_stage = (depth - 2) // 6
        blocks = []
        channels = width
        for stage in range(3):
            for block in range(blocks_per_stage):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(BasicBlock(channels, width * 2**stage, stride, norm, groups))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[b, in_channels, height, width]`` to logits ``[b, num_classes]``."""
        require_images(images, self.in_channels)
        features = self.blocks(F.relu(self.norm(self.conv(images))))
        logits: Tensor = self.classifier(features.mean(dim=(-2, -1)))
        return logits


class ResNet8(CIFARResNet):
    """:class:`CIFARResNet` of depth 8: one block a stage, 75,290 trainable floats at the defaults."""

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, norm: str = "bn", groups: int = 2, width: int = 16
    ) -> None:
        super().__init__(8, num_classes, in_channels, norm, groups, width)


class ResNet20(CIFARResNet):
    """:class:`CIFARResNet` of depth 20: three blocks a stage, 269,722 trainable floats at the defaults."""

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, norm: str = "bn", groups: int = 2, width: int = 16
    ) -> None:
        super().__init__(20, num_classes, in_channels, norm, groups, width)


class ResNet32(CIFARResNet):
    """:class:`CIFARResNet` of depth 32: five blocks a stage, 464,154 trainable floats at the defaults."""

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, norm: str = "bn", groups: int = 2, width: int = 16
    ) -> None:
        super().__init__(32, num_classes, in_channels, norm, groups, width)
