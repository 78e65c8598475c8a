"""Convolutions whose filters are computed from the trained tensor, with or without a norm layer.

The trained tensor has the name ``weight`` and the shape as in ``nn.Conv2d``. Each forward pass
computes the filters, so gradients pass through the formula and only trained tensors are aggregated.
"""

from typing import Any

import torch
from torch import Tensor, nn


class ComputedConv2d(nn.Conv2d):
    """A convolution with computed :meth:`filters` and the arguments of ``nn.Conv2d``."""

    def filters(self) -> Tensor:
        """Compute the filters ``[out_channels, in_channels / groups, kh, kw]``."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``[b, in_channels, h, w]`` with :meth:`filters`."""
        output: Tensor = self._conv_forward(input, self.filters(), self.bias)
        return output


class StandardizedConv2d(ComputedConv2d):
    """Weight Standardization: every filter has mean 0 and standard deviation 1.

    Qiao, Wang, Liu, Shen, Yuille, "Micro-Batch Training with Batch-Channel Normalization and Weight
    Standardization", arXiv 1903.10520: ``(W - mean) / (std + eps)`` per output filter of N values,
    where the standard deviation has the divisor N - 1. A norm layer must follow, since the scale of
    the outputs changes.

    Attributes:
        eps: Added to the standard deviation; 1e-5 in the authors' code.
    """

    eps: float = 1e-5

    def filters(self) -> Tensor:
        """Return the standardized filters."""
        std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), correction=1, keepdim=True)
        return (self.weight - mean) / (std + self.eps)


class ScaledStandardizedConv2d(ComputedConv2d):
    """Scaled Weight Standardization: filters preserve the signal's variance without norm layers.

    Brock, De, Smith, "Characterizing Signal Propagation to Close the Performance Gap in
    Unnormalized ResNets", ICLR 2021: ``gain kappa (W - mean) / sqrt(N var + eps)`` per output
    filter of N values, with one trained gain per filter, initially 1. Zhuang, Lyu, "FedWon", ICLR
    2024, use it unchanged in federated learning.

    Attributes:
        kappa: ``sqrt(2 / (1 - 1/pi))``, about 1.713: undoes ReLU's shrinkage of normal inputs.
        eps: Term that keeps the root above 0; 1e-4 in Brock et al.
    """

    kappa: float = (2 / (1 - 1 / torch.pi)) ** 0.5
    eps: float = 1e-4

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels))

    def filters(self) -> Tensor:
        """Return filters with mean 0 and sum of squares ``(gain kappa)^2``."""
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        scale = self.kappa * self.gain.view(-1, 1, 1, 1) / (self.weight[0].numel() * var + self.eps).sqrt()
        return scale * (self.weight - mean)


class WeightNormConv2d(ComputedConv2d):
    """Weight normalization: a filter is a trained length ``gain`` times a direction ``weight``.

    Salimans, Kingma, "Weight Normalization", NeurIPS 2016, eq. 2: ``gain W / |W|`` with the
    Euclidean norm per output filter, without their data-dependent initialization. It equals
    ``torch.nn.utils.parametrizations.weight_norm``, which vmap does not support. The initial
    filters are those of ``nn.Conv2d``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.empty(self.out_channels))
        self.match_gain()

    @torch.no_grad()
    def match_gain(self) -> None:
        """Set the gains to the lengths of ``weight``, so that the filters equal ``weight``."""
        self.gain.copy_(self.weight.flatten(1).norm(dim=1))

    def filters(self) -> Tensor:
        """Return the filters of length ``gain``."""
        factors: Tensor = self.gain / self.weight.flatten(1).norm(dim=1)
        return factors.view(-1, 1, 1, 1) * self.weight
