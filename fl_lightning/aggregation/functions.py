"""The robust rules as functions of rows ``[n, d]``; see their classes for the definitions.

All raise :class:`~fl_lightning.errors.ConfigurationError` if f is negative or not below n/2. All
clients have equal weight, except in functions with an argument ``weights``.
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
    """Return the :class:`~fl_lightning.aggregation.coordinates.TrimmedMean` of ``rows [n, d]``, ``[d]``."""
    check_byzantine("trimmed_mean f", f, len(rows))
    return TrimmedMean(f)(rows)


def nearest_neighbor_mixing(rows: Tensor, f: int) -> Tensor:
    """Return ``rows [n, d]`` mixed by :class:`~fl_lightning.aggregation.distances.NNM`, shape ``[n, d]``."""
    check_byzantine("nearest_neighbor_mixing f", f, len(rows))
    return NNM()([rows], f)[0]


def krum(rows: Tensor, f: int, *, score: KrumScore = "byzfl") -> Tensor:
    """Return :class:`~fl_lightning.aggregation.distances.Krum` of ``rows [n, d]``, shape ``[d]``."""
    check_byzantine("krum f", f, len(rows))
    return Krum(f, score=score)(rows)


def multi_krum(rows: Tensor, f: int, *, score: KrumScore = "byzfl") -> Tensor:
    """Return :class:`~fl_lightning.aggregation.distances.MultiKrum` of ``rows [n, d]``, shape ``[d]``."""
    check_byzantine("multi_krum f", f, len(rows))
    return MultiKrum(f, score=score)(rows)


def geometric_median(rows: Tensor) -> Tensor:
    """Return the :class:`~fl_lightning.aggregation.centers.GeometricMedian` of ``rows [n, d]``, ``[d]``."""
    return GeometricMedian()(rows)


def mean_around_median(rows: Tensor, f: int) -> Tensor:
    """Return :class:`~fl_lightning.aggregation.coordinates.MeanAroundMedian` of ``rows [n, d]``, ``[d]``."""
    check_byzantine("mean_around_median f", f, len(rows))
    return MeanAroundMedian(f)(rows)


def centered_clipping(rows: Tensor, tau: float, iterations: int = 1, start: Tensor | None = None) -> Tensor:
    """Return :class:`~fl_lightning.aggregation.centers.CenteredClipping` from ``start`` (default: median)."""
    distances = measure([rows], None if start is None else [start])
    shares = CenteredClipping(tau, iterations).mixing(distances, None)[None]
    return mix([rows], shares, distances.centres, distances.rejected)[0][0]


def bucketing(rows: Tensor, size: int) -> Tensor:
    """Return the :class:`~fl_lightning.aggregation.preaggregation.Bucketing` means, ``[ceil(n / size), d]``."""
    return Bucketing(size)([rows], 0)[0]


def weighted_median(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted :class:`~fl_lightning.aggregation.coordinates.Median` of ``rows [n, d]``, ``[d]``."""
    return Median(weighting="weighted", max_weight=torch.inf)(rows, weights)


@torch.no_grad()
def weighted_trimmed_mean(rows: Tensor, weights: Tensor, t: float) -> Tensor:
    """Return the mean per coordinate, ``[d]``, without a share ``t`` of the weight at either end.

    Args:
        rows: Shape ``[n, d]``; NaN is the largest value.
        weights: Non-negative weights ``[n]``. A row at an edge is trimmed in part.
        t: Trimmed share at either end, in [0, 1/2).

    Raises:
        ConfigurationError: t is out of range.
    """
    if not 0 <= t < 0.5:
        raise ConfigurationError(f"weighted_trimmed_mean t: {t} must be at least 0 and less than 0.5")
    return mix_by_position(rows, weights.double(), lambda ascending, ordered: within(ordered, t, 1 - t))
