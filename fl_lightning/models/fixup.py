"""FixUp: Zhang, Dauphin, Ma, "Fixup Initialization: Residual Learning Without Normalization", ICLR 2019."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.models.blocks import ResidualBlock


class ScalarBias(nn.Module):
    """Layer that adds a trained scalar to the input.

    The scalar has the initial value 0, and belongs to the parameter group ``scalars``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the scalar to ``x``, which may have any shape."""
        return x + self.bias


class FixupBlock(ResidualBlock):
    """A residual block without norm layers.

    The block computes ``relu(x + scale conv2(relu(conv1(x + b1a) + b1b) + b2a) + b2b)``. The four
    biases and the scale are trained scalars. If the shape changes, the shortcut gets ``x + b1a``
    instead of ``x``, as in the authors' code.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output, at least ``in_channels``.
        stride: Stride of the first convolution and of the shortcut's subsampling.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(in_channels, out_channels, stride)
        self.bias1a, self.bias1b, self.bias2a, self.bias2b = (ScalarBias() for _ in range(4))
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, in_channels, h, w]`` to ``[b, out_channels, ceil(h / stride), ceil(w / stride)]``."""
        shifted = self.bias1a(x)
        residual = F.relu(self.bias1b(self.conv1(shifted)))
        residual = self.bias2b(self.conv2(self.bias2a(residual)) * self.scale)
        return F.relu(self.shortcut(shifted if self.changes_shape else x) + residual)


@torch.no_grad()
def initialise_fixup(network: nn.Module, classifier: nn.Linear) -> None:
    """Initialise a network as FixUp does.

    The classifier and the last convolution of each block are set to 0. All initial logits are
    therefore 0. The first convolution of each block has He's initialisation (normal, variance 2 /
    fan-out), multiplied by ``L^(-1 / (2m - 2))``. L is the number of blocks, and m = 2 is the
    number of convolutions in a block.
    """
    blocks = [module for module in network.modules() if isinstance(module, FixupBlock)]
    shrink = len(blocks) ** -0.5
    for block in blocks:
        nn.init.kaiming_normal_(block.conv1.weight, mode="fan_out", nonlinearity="relu").mul_(shrink)
        nn.init.zeros_(block.conv2.weight)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
