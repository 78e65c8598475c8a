"""Residual blocks of He et al., CVPR 2016, with the paper's shortcuts A or B.

Shortcut A appends channels of zeros. Shortcut B is a projection.
"""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.models.norm import make_conv, make_norm


class ResidualBlock(nn.Module):
    """Base class of residual blocks with shortcut A.

    If the block changes the shape of the input, the shortcut subsamples the image and appends
    channels of zeros.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output, at least ``in_channels``.
        stride: Stride of the shortcut's subsampling.

    Attributes:
        changes_shape: Whether the block changes the shape of the input. If not, the shortcut is the
            identity.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = out_channels - in_channels
        self.changes_shape = stride > 1 or self.new_channels > 0

    def shortcut(self, x: Tensor) -> Tensor:
        """Return the block's input in the shape of the block's output.

        If necessary, subsample the input and append channels of zeros.
        """
        if not self.changes_shape:
            return x
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions and a shortcut: ``relu(x + norm(conv(relu(norm(conv(x))))))``.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output, at least ``in_channels``.
        stride: Stride of the first convolution and of the shortcut's subsampling.
        norm: Norm layer, see :func:`fl_lightning.models.norm.make_norm`.
        groups: Number of groups of a GN layer.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str, groups: int) -> None:
        super().__init__(in_channels, out_channels, stride)
        self.conv1 = make_conv(norm, in_channels, out_channels, 3, stride, padding=1)
        self.norm1 = make_norm(norm, out_channels, groups)
        self.conv2 = make_conv(norm, out_channels, out_channels, 3, padding=1)
        self.norm2 = make_norm(norm, out_channels, groups)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, in_channels, h, w]`` to ``[b, out_channels, ceil(h / stride), ceil(w / stride)]``."""
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(residual))
        return F.relu(self.shortcut(x) + residual)


class ProjectionBlock(BasicBlock):
    """A :class:`BasicBlock` with shortcut B.

    If the block changes the shape of the input, the shortcut is a 1x1 convolution with a norm
    layer.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str, groups: int) -> None:
        super().__init__(in_channels, out_channels, stride, norm, groups)
        self.projection = nn.Sequential()
        if self.changes_shape:
            self.projection.append(make_conv(norm, in_channels, out_channels, 1, stride))
            self.projection.append(make_norm(norm, out_channels, groups))

    def shortcut(self, x: Tensor) -> Tensor:
        """Return the block's input, projected if the block changes the shape."""
        projected: Tensor = self.projection(x)
        return projected


def make_stages(
    make_block: Callable[[int, int, int], ResidualBlock], width: int, counts: Sequence[int]
) -> nn.Sequential:
    """Build stages of residual blocks.

    The first stage keeps the input's shape. Each later stage doubles the channels and halves height
    and width.

    Args:
        make_block: Function that creates a block from (in_channels, out_channels, stride).
        width: Number of channels of the input and of the first stage.
        counts: Number of blocks of each stage.
    """
    blocks, channels = nn.Sequential(), width
    for stage, count in enumerate(counts):
        for block in range(count):
            blocks.append(make_block(channels, width * 2**stage, 2 if stage > 0 and block == 0 else 1))
            channels = width * 2**stage
    return blocks
