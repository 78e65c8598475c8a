"""Measures of class heterogeneity, from the number of samples of each class at each client."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Histogram = Sequence[Sequence[int]]
"""``[i][c]``: samples of class c at client i."""


def effective_classes(histogram: Histogram) -> NDArray[np.float64]:
    """Return the effective number of classes ``[clients]``, exp of the class entropy (Hill 1973).

    It is k for k equally frequent classes, less if some classes are rare, and 0 without samples.
    """
    shares = _shares(histogram)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    number: NDArray[np.float64] = np.exp(-(shares * logs).sum(1)) * (shares.sum(1) > 0)
    return number


def distance_to_union(histogram: Histogram) -> NDArray[np.float64]:
    """Return each client's total variation distance ``[clients]`` from the union's classes.

    ``sum_c |p_i(c) - p(c)| / 2``, in [0, 1]: the share of a client's samples whose class must
    change so that its class distribution equals the union's.
    """
    union = _shares([np.sum(histogram, axis=0)])
    distance: NDArray[np.float64] = np.abs(_shares(histogram) - union).sum(1) / 2
    return distance


def heterogeneity(histogram: Histogram) -> dict[str, dict[str, float]]:
    """Return the measures of a partition.

    Returns:
        ``classes`` and ``effective_classes`` (``min``, ``median``, ``max`` over the clients), and
        ``distance_to_union`` (``mean``, weighted by size, and ``max``).
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
