"""How much the clients' classes differ, from the number of samples of each class at each client."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Histogram = Sequence[Sequence[int]]
"""``[i][c]``: samples of class c at client i."""


def effective_classes(histogram: Histogram) -> NDArray[np.float64]:
    """Effective number of classes of each client, ``[clients]``: exp of the entropy of its class distribution (Hill 1973).

    It is k where a client has k classes equally often, and less where some of them are rare; 0 without samples.
    """
    shares = _shares(histogram)
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    number: NDArray[np.float64] = np.exp(-(shares * logs).sum(1)) * (shares.sum(1) > 0)
    return number


def distance_to_union(histogram: Histogram) -> NDArray[np.float64]:
    """Total variation between each client's class distribution and that of all samples together, ``[clients]``, in [0, 1].

    ``sum_c |p_i(c) - p(c)| / 2``: the share of its samples that a client would have to exchange to be like the union.
    """
    union = _shares([np.sum(histogram, axis=0)])
    distance: NDArray[np.float64] = np.abs(_shares(histogram) - union).sum(1) / 2
    return distance


def heterogeneity(histogram: Histogram) -> dict[str, dict[str, float]]:
    """The figures of a partition.

    Returns:
        ``classes`` and ``effective_classes`` of a client (``min``, ``median``, ``max`` over the clients), and
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
