"""Measures of class heterogeneity, computed from each client's number of samples per class."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Histogram = Sequence[Sequence[int]]
"""``[i][c]`` is the number of samples of class c at client i."""


def effective_classes(histogram: Histogram) -> NDArray[np.float64]:
    """Return the effective number of classes of each client, ``[clients]``.

    The number is the exponential of the class entropy (Hill 1973). For k equally frequent classes,
    the number is k. If some of k classes are rare, the number is below k. For a client without
    samples, the number is 0.
    """
    shares = _shares(histogram)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    number: NDArray[np.float64] = np.exp(-(shares * logs).sum(1)) * (shares.sum(1) > 0)
    return number


def distance_to_union(histogram: Histogram) -> NDArray[np.float64]:
    """Return the distance between each client's and the overall class distribution, ``[clients]``.

    The distance is the total variation distance ``sum_c |p_i(c) - p(c)| / 2``, in [0, 1]. p_i is
    the class distribution of client i, and p is the distribution of all clients together. To make
    p_i equal to p, this share of the client's samples would need another class.
    """
    union = _shares([np.sum(histogram, axis=0)])
    distance: NDArray[np.float64] = np.abs(_shares(histogram) - union).sum(1) / 2
    return distance


def heterogeneity(histogram: Histogram) -> dict[str, dict[str, float]]:
    """Return measures of a partition's class heterogeneity.

    Returns:
        Three measures by name. ``classes`` and ``effective_classes`` have the entries ``min``,
        ``median`` and ``max`` over the clients. ``distance_to_union`` has the entries ``mean`` and
        ``max``. In ``mean``, a client's weight is the number of the client's samples.
    """
    counts, distance = np.asarray(histogram), distance_to_union(histogram)
    numbers = {"classes": (counts > 0).sum(1), "effective_classes": effective_classes(histogram)}
    return {
        **{
            name: {"min": float(x.min()), "median": float(np.median(x)), "max": float(x.max())}
            for name, x in numbers.items()
        },
        "distance_to_union": {
            "mean": float(np.average(distance, weights=counts.sum(1))),
            "max": float(distance.max()),
        },
    }


def _shares(histogram: Histogram) -> NDArray[np.float64]:
    counts = np.asarray(histogram, dtype=np.float64)
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares
