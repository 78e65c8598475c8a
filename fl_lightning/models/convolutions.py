"""Convolutions whose filters are computed from a trained tensor by a formula.

The trained tensor has the name ``weight`` and the shape of that in ``nn.Conv2d``. Every forward
pass computes the filters anew. So gradients flow through the formula, and the server aggregates
only the trained tensors.
"""

from typing import Any

import torch
from torch import Tensor, nn


class ComputedConv2d(nn.Conv2d):
    """Base class of convolutions with computed :meth:`filters`; arguments as in ``nn.Conv2d``."""

    def filters(self) -> Tensor:
        """Compute the filters ``[out_channels, in_channels / groups, kh, kw]``."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``[b, in_channels, h, w]`` with :meth:`filters`."""
        output: Tensor = self._conv_forward(input, self.filters(), self.bias)
        return output


class StandardizedConv2d(ComputedConv2d):
    """Weight Standardization: every filter has mean 0 and standard deviation 1.

    A filter is ``(W - mean) / (std + eps)``. Mean and standard deviation are over the N values of
    one output filter; the standard deviation has the divisor N - 1. A norm layer must follow,
    because the scale of the outputs changes. The paper is Qiao, Wang, Liu, Shen, Yuille,
    "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization", arXiv
    1903.10520.

    Attributes:
        eps: Number added to the standard deviation, 1e-5 as in the authors' code.
    """

    eps: float = 1e-5

    def filters(self) -> Tensor:
        """Return the standardized filters."""
        std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), correction=1, keepdim=True)
        return (self.weight - mean) / (std + self.eps)


class ScaledStandardizedConv2d(ComputedConv2d):
    """Scaled Weight Standardization: filters preserve the signal's variance without norm layers.

    A filter is ``gain kappa (W - mean) / sqrt(N var + eps)``. Mean and variance are over the N
    values of one output filter. Each filter has one trained gain, initially 1. The paper is Brock,
    De, Smith, "Characterizing Signal Propagation to Close the Performance Gap in Unnormalized
    ResNets", ICLR 2021. Zhuang, Lyu, "FedWon", ICLR 2024, use the formula unchanged in federated
    learning.

    Attributes:
        kappa: ``sqrt(2 / (1 - 1/pi))``, about 1.713. ReLU reduces the variance of a normal input;
            this factor compensates for it.
        eps: Number that keeps the root above 0, 1e-4 as in Brock et al.
    """

    kappa: float = (2 / (1 - 1 / torch.pi)) ** 0.5
    eps: float = 1e-4

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels))

    def filters(self) -> Tensor:
        """Return filters whose mean is 0 and whose sum of squares is ``(gain kappa)^2``."""
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        scale = self.kappa * self.gain.view(-1, 1, 1, 1) / (self.weight[0].numel() * var + self.eps).sqrt()
        return scale * (self.weight - mean)


class WeightNormConv2d(ComputedConv2d):
    """Weight normalization: a filter is a trained length ``gain`` times the direction of ``weight``.

    A filter is ``gain W / |W|``, with the Euclidean norm over one output filter (Salimans, Kingma,
    "Weight Normalization", NeurIPS 2016, eq. 2). This equals
    ``torch.nn.utils.parametrizations.weight_norm``, which vmap does not support. The initial
    filters are those of ``nn.Conv2d``, without the paper's data-dependent initialization.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.empty(self.out_channels))
        self.match_gain()

    @torch.no_grad()
    def match_gain(self) -> None:
        """Set each gain to the norm of its filter in ``weight``, so that filters equal ``weight``."""
        self.gain.copy_(self.weight.flatten(1).norm(dim=1))

    def filters(self) -> Tensor:
        """Return filters whose Euclidean norm is ``gain``."""
        factors: Tensor = self.gain / self.weight.flatten(1).norm(dim=1)
        return factors.view(-1, 1, 1, 1) * self.weight
