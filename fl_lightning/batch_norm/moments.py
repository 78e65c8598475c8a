"""Means and variances of a union from those of its parts."""

import torch
from torch import Tensor


def total_variance(means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the union of several samples, by the law of total variance.

    With the parts' biased variances and weights K_i / N it is exactly the biased variance of the union: the mean of the
    variances plus the variance of the means.

    Args:
        means: Mean of each part, shape ``[n, *shape]``.
        variances: Variance of each part, likewise.
        weights: Shares of the parts, shape ``[n]``, sum 1.

    Returns:
        Mean and variance of the union, each ``[*shape]``.
    """
    shares = weights.to(means.dtype).view(-1, *[1] * (means.dim() - 1))
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean) ** 2)).sum(0)


@torch.no_grad()
def merge_(count: Tensor, mean: Tensor, m2: Tensor, values: Tensor) -> None:
    """Add values to a running count, mean and sum of squared deviations, in place (Chan, Golub and LeVeque 1983).

    No gradient flows through any of it.

    Args:
        count: Number of values of a channel so far, a scalar or ``[channels]``.
        mean: Their mean, shape ``[channels]``.
        m2: Their sum of squared deviations from it, ``[channels]``.
        values: The new values, shape ``[channels, K]``.
    """
    values, new = values.to(mean.dtype), values.shape[1]
    variance, batch_mean = values.var(1, correction=0), values.mean(1)
    total = count + new
    delta = batch_mean - mean
    m2.add_(variance * new + delta**2 * (count * new / total))
    mean.add_(delta * (new / total))
    count.add_(new)
