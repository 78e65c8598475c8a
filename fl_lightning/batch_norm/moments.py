"""Means and variances of a union from those of its parts."""

from collections.abc import Callable

import torch
from torch import Tensor

from fl_lightning.aggregation import weighted_mean


def total_variance(
    means: Tensor,
    variances: Tensor,
    weights: Tensor,
    combine: Callable[[Tensor, Tensor], Tensor] = weighted_mean,
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the union of several samples, by the law of total variance.

    With the parts' biased variances and weights K_i / N it is exactly the biased variance of the union: the mean of the
    variances plus the variance of the means.

    Args:
        means: Mean of each part, shape ``[n, d]``.
        variances: Variance of each part, likewise.
        weights: Shares of the parts, shape ``[n]``, sum 1.
        combine: What takes the place of the weighted mean of rows ``[n, d]``: a robust aggregator.

    Returns:
        Mean and variance of the union, each ``[d]``.
    """
    mean = combine(means, weights)
    return mean, combine(variances, weights) + combine((means - mean) ** 2, weights)


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
