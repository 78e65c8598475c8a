"""Measures of class heterogeneity, from the number of samples of each class at each client."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Histogram = Sequence[Sequence[int]]
"""``[i][c]``: number of samples of class c at client i."""


def effective_classes(histogram: Histogram) -> NDArray[np.float64]:
    """Return the effective number of classes of each client, ``[clients]``.

    This is the exponential of the class entropy (Hill 1973). For k equally frequent classes it is
    k. If some classes are rare, it is smaller. Without samples it is 0.
    """
    shares = _shares(histogram)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    number: NDArray[np.float64] = np.exp(-(shares * logs).sum(1)) * (shares.sum(1) > 0)
    return number


def distance_to_union(histogram: Histogram) -> NDArray[np.float64]:
    """Return the distance of each client's class distribution from that of all data, ``[clients]``.

    This is the total variation distance ``sum_c |p_i(c) - p(c)| / 2``, in [0, 1]. p_i is the class
    distribution of client i, and p that of all clients together. The distance is the share of the
    client's samples whose class would have to change to make both distributions equal.
    """
    union = _shares([np.sum(histogram, axis=0)])
    distance: NDArray[np.float64] = np.abs(_shares(histogram) - union).sum(1) / 2
    return distance


def heterogeneity(histogram: Histogram) -> dict[str, dict[str, float]]:
    """Return the measures of a partition.

    Returns:
        Three measures by name. ``classes`` and ``effective_classes`` have ``min``, ``median`` and
        ``max`` over the clients. ``distance_to_union`` has ``mean``, weighted by client size, and
        ``max``.
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
