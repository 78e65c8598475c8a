"""A small DeepLabv3+ (Chen et al., "Encoder-Decoder with Atrous Convolution", ECCV 2018)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fl_lightning.errors import ConfigurationError, check_at_least
from fl_lightning.models.checks import require_images
from fl_lightning.models.norm import make_conv, make_norm
from fl_lightning.recorded import Recorded


class SmallDeepLab(Recorded, nn.Module):
    """DeepLabv3+ for images of 100 to 200 pixels, with a backbone of seven convolutions.

    The backbone has output stride 8, and its last two convolutions are dilated. The atrous spatial
    pyramid pooling has three kinds of branches: a 1x1 convolution, one 3x3 convolution per rate,
    and the mean over the image. The decoder also uses features of stride 4. By default the model
    has 241,475 trainable parameters and 14 norm layers.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        norm: Norm layer, see :func:`fl_lightning.models.norm.make_norm`.
        groups: Number of groups of every GN layer.
        width: Number of channels of the first convolution. Later convolutions have up to four times
            as many channels.
        rates: Dilation rates of the pyramid's 3x3 convolutions.
        pooled_norm: Norm layer after the pyramid's mean over the image. None (default) means the
            same as ``norm``. BN after this mean needs batches of at least two images; ``"gn"`` and
            ``"none"`` do not.

    Raises:
        ConfigurationError: A setting is invalid.
    """

    def __init__(
        self,
        num_classes: int = 19,
        in_channels: int = 3,
        norm: str = "bn",
        groups: int = 2,
        width: int = 16,
        rates: tuple[int, ...] = (2, 4),
        pooled_norm: str | None = None,
    ) -> None:
        super().__init__()
        if "fn" in (norm, pooled_norm):
            raise ConfigurationError("norm=fn: SmallDeepLab has no linear layer whose features it normalises")
        check_at_least(1, num_classes=num_classes, in_channels=in_channels, width=width)
        self.in_channels = in_channels

        def unit(
            channels: int, out: int, kernel: int = 3, stride: int = 1, dilation: int = 1, norm: str = norm
        ) -> nn.Module:
            conv = make_conv(norm, channels, out, kernel, stride, dilation * (kernel // 2))
            conv.dilation = (dilation, dilation)
            return nn.Sequential(conv, make_norm(norm, out, groups), nn.ReLU())

        wide, high = 2 * width, 4 * width
        self.low = nn.Sequential(
            unit(in_channels, width, stride=2), unit(width, wide, stride=2), unit(wide, wide)
        )
        self.high = nn.Sequential(
            unit(wide, high, stride=2),
            unit(high, high),
            unit(high, high, dilation=2),
            unit(high, high, dilation=2),
        )
        self.pyramid = nn.ModuleList(
            [unit(high, wide, 1), *(unit(high, wide, dilation=rate) for rate in rates)]
        )
        self.pooled = unit(high, wide, 1, norm=pooled_norm or norm)
        self.joined = unit((2 + len(rates)) * wide, high, 1)
        self.reduced = unit(wide, width, 1)
        self.decoder = unit(high + width, high)
        self.classifier = nn.Conv2d(high, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[b, in_channels, height, width]`` to logits ``[b, num_classes, height, width]``."""
        require_images(images, self.in_channels)
        low = self.low(images)
        high = self.high(low)
        mean = self.pooled(high.mean((-2, -1), keepdim=True)).expand(
            *[-1] * (high.dim() - 2), *high.shape[-2:]
        )
        joined = self.joined(torch.cat([*(branch(high) for branch in self.pyramid), mean], -3))
        joined = interpolate(joined, low.shape[-2:], mode="bilinear", align_corners=False)
        logits = self.classifier(self.decoder(torch.cat([joined, self.reduced(low)], -3)))
        return interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=False)
