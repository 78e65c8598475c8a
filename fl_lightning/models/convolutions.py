"""Convolutions whose filters are computed from a trained tensor by a formula.

As in ``nn.Conv2d``, the trained tensor is ``weight``, with the same shape. Every forward pass
computes the filters anew, so that gradients flow through the formula. The server aggregates the
trained tensors, not the filters.
"""

from typing import Any

import torch
from torch import Tensor, nn


class ComputedConv2d(nn.Conv2d):
    """Base class of convolutions with computed filters and the arguments of ``nn.Conv2d``."""

    def filters(self) -> Tensor:
        """Compute the filters ``[out_channels, in_channels / groups, kh, kw]``."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        """Convolve inputs ``[b, in_channels, h, w]`` with the filters from :meth:`filters`."""
        output: Tensor = self._conv_forward(input, self.filters(), self.bias)
        return output


class StandardizedConv2d(ComputedConv2d):
    """Weight Standardization: every filter has mean 0 and standard deviation 1.

    A filter is ``(W - mean) / (std + eps)``. Mean and standard deviation are computed over the N
    values of one output filter. The standard deviation has the divisor N - 1. A norm layer must
    follow, because the scale of the outputs is not preserved. The paper is Qiao, Wang, Liu, Shen,
    Yuille, "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization",
    arXiv 1903.10520.

    Attributes:
        eps: Number added to the standard deviation: 1e-5, as in the authors' code.
    """

    eps: float = 1e-5

    def filters(self) -> Tensor:
        """Return filters with mean 0 and standard deviation 1."""
        std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), correction=1, keepdim=True)
        return (self.weight - mean) / (std + self.eps)


class SmallStandardizedConv2d(StandardizedConv2d):
    """Weight Standardization of FedWS: filters with a small standard deviation.

    A filter is ``rho (W - mean) / (std + eps)``. Group Normalization follows. Its ``eps`` then
    matters: with small filters, it damps channels of low variance (arXiv 2506.23516).

    Attributes:
        rho: Standard deviation of a filter: 1e-3, as in the paper. The norm ``fed_ws:X`` sets X.
    """

    rho: float = 1e-3

    def filters(self) -> Tensor:
        """Return filters with mean 0 and standard deviation ``rho``."""
        return self.rho * super().filters()


class ScaledStandardizedConv2d(ComputedConv2d):
    """Scaled Weight Standardization: filters that preserve the variance without norm layers.

    A filter is ``gain kappa (W - mean) / sqrt(N var + eps)``. Mean and variance are computed over
    the N values of one output filter. Each filter has a trained gain, whose initial value is 1. The
    paper is Brock, De, Smith, "Characterizing Signal Propagation to Close the Performance Gap in
    Unnormalized ResNets", ICLR 2021. FedWon (Zhuang, Lyu, ICLR 2024) uses the same formula in
    federated learning.

    Attributes:
        kappa: ``sqrt(2 / (1 - 1/pi))``, about 1.713. ReLU reduces the variance of normally
            distributed inputs; the factor restores the variance.
        eps: Number that keeps the root above 0: 1e-4, as in Brock et al.
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
    """Weight normalization: a filter's length and direction are trained separately.

    A filter is ``gain W / |W|``, with the Euclidean norm over one output filter (Salimans, Kingma,
    "Weight Normalization", NeurIPS 2016, eq. 2). ``torch.nn.utils.parametrizations.weight_norm``
    gives equal results, but does not run under ``vmap``. The initial filters are as in
    ``nn.Conv2d``, without the paper's data-dependent initialization.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.empty(self.out_channels))
        self.match_gain()

    @torch.no_grad()
    def match_gain(self) -> None:
        """Set the gains to the norms of the filters in ``weight``."""
        self.gain.copy_(self.weight.flatten(1).norm(dim=1))

    def filters(self) -> Tensor:
        """Return filters whose Euclidean norm is ``gain``."""
        factors: Tensor = self.gain / self.weight.flatten(1).norm(dim=1)
        return factors.view(-1, 1, 1, 1) * self.weight
