"""Robust rules as functions of rows ``[n, d]``. The docstrings of the classes define the rules.

Functions with an argument f raise :class:`~fl_lightning.errors.ConfigurationError` if f is negative
or at least n/2. Clients have equal weight, except in functions with an argument ``weights``.
"""

import torch
from torch import Tensor

from fl_lightning.aggregation.centers import CenteredClipping, GeometricMedian
from fl_lightning.aggregation.coordinates import MeanAroundMedian, Median, TrimmedMean, mix_by_position
from fl_lightning.aggregation.distances import NNM, Krum, KrumScore, MultiKrum, measure, mix
from fl_lightning.aggregation.masses import check_byzantine, within
from fl_lightning.aggregation.preaggregation import Bucketing
from fl_lightning.errors import ConfigurationError


def trimmed_mean(rows: Tensor, f: int) -> Tensor:
    """Apply :class:`~fl_lightning.aggregation.coordinates.TrimmedMean` to rows ``[n, d]``."""
    check_byzantine("trimmed_mean f", f, len(rows))
    return TrimmedMean(f)(rows)


def nearest_neighbor_mixing(rows: Tensor, f: int) -> Tensor:
    """Mix rows ``[n, d]`` by :class:`~fl_lightning.aggregation.distances.NNM`."""
    check_byzantine("nearest_neighbor_mixing f", f, len(rows))
    return NNM()([rows], f)[0]


def krum(rows: Tensor, f: int, *, score: KrumScore = "byzfl") -> Tensor:
    """Apply :class:`~fl_lightning.aggregation.distances.Krum` to rows ``[n, d]``."""
    check_byzantine("krum f", f, len(rows))
    return Krum(f, score=score)(rows)


def multi_krum(rows: Tensor, f: int, *, score: KrumScore = "byzfl") -> Tensor:
    """Apply :class:`~fl_lightning.aggregation.distances.MultiKrum` to rows ``[n, d]``."""
    check_byzantine("multi_krum f", f, len(rows))
    return MultiKrum(f, score=score)(rows)


def geometric_median(rows: Tensor) -> Tensor:
    """Apply :class:`~fl_lightning.aggregation.centers.GeometricMedian` to rows ``[n, d]``."""
    return GeometricMedian()(rows)


def mean_around_median(rows: Tensor, f: int) -> Tensor:
    """Apply :class:`~fl_lightning.aggregation.coordinates.MeanAroundMedian` to rows ``[n, d]``."""
    check_byzantine("mean_around_median f", f, len(rows))
    return MeanAroundMedian(f)(rows)


def centered_clipping(rows: Tensor, tau: float, iterations: int = 1, start: Tensor | None = None) -> Tensor:
    """Apply :class:`~fl_lightning.aggregation.centers.CenteredClipping` to rows ``[n, d]``.

    Args:
        rows: The clients' rows, ``[n, d]``.
        tau: Largest L2 norm of a client's deviation, > 0.
        iterations: Number of iterations, >= 1.
        start: Start point, ``[d]``. Default: the coordinate-wise median.
    """
    distances = measure([rows], None if start is None else [start])
    shares = CenteredClipping(tau, iterations).mixing(distances, None)[None]
    return mix([rows], shares, distances.centres, distances.rejected)[0][0]


def bucketing(rows: Tensor, size: int) -> Tensor:
    """Return the means of random buckets of ``size`` rows, ``[ceil(n / size), d]``.

    See :class:`~fl_lightning.aggregation.preaggregation.Bucketing`.
    """
    return Bucketing(size)([rows], 0)[0]


def weighted_median(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted median of each column of ``rows [n, d]``, ``[d]``.

    See :class:`~fl_lightning.aggregation.coordinates.Median`. ``weights`` has the shape ``[n]``.
    """
    return Median(weighting="weighted", max_weight=torch.inf)(rows, weights)


@torch.no_grad()
def weighted_trimmed_mean(rows: Tensor, weights: Tensor, t: float) -> Tensor:
    """Return the weighted trimmed mean of each column, ``[d]``.

    In each column, the smallest values and the largest values are dropped, each with the share
    ``t`` of the total weight. The last of these values may be dropped only in part.

    Args:
        rows: The clients' rows, ``[n, d]``. NaN counts as the largest value.
        weights: Weight of each row, ``[n]``, >= 0.
        t: Share of the total weight to drop at each end, in [0, 1/2).

    Raises:
        ConfigurationError: ``t`` is out of range.
    """
    if not 0 <= t < 0.5:
        raise ConfigurationError(f"weighted_trimmed_mean t: {t} must be at least 0 and less than 0.5")
    return mix_by_position(rows, weights.double(), lambda ascending, ordered: within(ordered, t, 1 - t))
