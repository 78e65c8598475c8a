"""Means and variances of a union of samples from the moments of its parts."""

import torch
from torch import Tensor

from fl_lightning.aggregation import weighted_mean


def total_variance(means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of a union of samples by the law of total variance.

    The variance is the mean of the variances plus the variance of the means. With biased
    variances and weights K_i / N it is exactly the biased variance of the union.

    Args:
        means: Mean of each part, shape ``[n, d]``.
        variances: Variance of each part, shape ``[n, d]``.
        weights: Shares of the parts, shape ``[n]``, sum 1.

    Returns:
        Mean and variance of the union, each ``[d]``.
    """
    mean = weighted_mean(means, weights)
    return mean, weighted_mean(variances, weights) + weighted_mean((means - mean) ** 2, weights)


@torch.no_grad()
def moments(values: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return K, the mean and the sum of squared deviations from it, without a gradient.

    Args:
        values: Shape ``[channels, K]``.

    Returns:
        K and two tensors ``[channels]``.
    """
    return values.shape[1], values.mean(1), values.var(1, correction=0) * values.shape[1]


@torch.no_grad()
def merge_(count: Tensor, mean: Tensor, m2: Tensor, *new: *tuple[int, Tensor, Tensor]) -> None:
    """Merge :func:`moments` into running moments, in place (Chan, Golub and LeVeque 1983).

    Args:
        count: Number of values of a channel so far, a scalar or ``[channels]``.
        mean: Mean of these values, shape ``[channels]``.
        m2: Sum of their squared deviations from the mean, ``[channels]``.
        new: Moments of the new values.
    """
    new_count, new_mean, new_m2 = new
    total = count + new_count
    delta = new_mean - mean
    m2.add_(new_m2 + delta**2 * (count * new_count / total))
    mean.add_(delta * (new_count / total))
    count.add_(new_count)
