"""Functions that combine the means and variances of parts of the data."""

import torch
from torch import Tensor

from fl_lightning.aggregation import weighted_mean


def total_variance(means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of combined samples by the law of total variance.

    The resulting variance is the mean of the variances plus the variance of the means. The result
    is exact if the weight of each part is the part's share of the samples. All variances are
    biased: their divisor is the number of samples.

    Args:
        means: Mean of each part, shape ``[n, d]``.
        variances: Variance of each part, shape ``[n, d]``.
        weights: Weight of each part, shape ``[n]``, sum 1.

    Returns:
        Mean and variance of all samples together, each ``[d]``.
    """
    mean = weighted_mean(means, weights)
    return mean, weighted_mean(variances, weights) + weighted_mean((means - mean) ** 2, weights)


@torch.no_grad()
def moments(values: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the number of values per channel, their mean, and their sum of squared deviations.

    The results have no gradient.

    Args:
        values: K values of each channel, shape ``[channels, K]``.

    Returns:
        K, the mean ``[channels]``, and the sum of squared deviations from the mean, ``[channels]``.
    """
    return values.shape[1], values.mean(1), values.var(1, correction=0) * values.shape[1]


@torch.no_grad()
def merge_(count: Tensor, mean: Tensor, m2: Tensor, *new: *tuple[int, Tensor, Tensor]) -> None:
    """Merge the moments of new values into running moments, in place.

    The formula comes from Chan, Golub and LeVeque (1983).

    Args:
        count: Number of earlier values of each channel, as a scalar or ``[channels]``.
        mean: Mean of the earlier values, ``[channels]``.
        m2: Sum of squared deviations of the earlier values from their mean, ``[channels]``.
        new: The three results of :func:`moments` for the new values.
    """
    new_count, new_mean, new_m2 = new
    total = count + new_count
    delta = new_mean - mean
    m2.add_(new_m2 + delta**2 * (count * new_count / total))
    mean.add_(delta * (new_count / total))
    count.add_(new_count)
