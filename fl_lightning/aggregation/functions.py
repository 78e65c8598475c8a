"""The robust rules as functions of rows ``[n, d]``, with every client alike; their classes say what each computes.

All raise :class:`~fl_lightning.errors.ConfigurationError` where f is negative or not below n/2.
"""

from torch import Tensor

from fl_lightning.aggregation.base import check_byzantine
from fl_lightning.aggregation.coordinates import TrimmedMean
from fl_lightning.aggregation.distances import NNM, Krum, KrumScore, MultiKrum
from fl_lightning.aggregation.weiszfeld import GeometricMedian


def trimmed_mean(rows: Tensor, f: int) -> Tensor:
    """:class:`~fl_lightning.aggregation.coordinates.TrimmedMean` of ``rows [n, d]``, shape ``[d]``."""
    check_byzantine("trimmed_mean f", f, len(rows))
    return TrimmedMean(f)(rows)


def nearest_neighbor_mixing(rows: Tensor, f: int) -> Tensor:
    """:class:`~fl_lightning.aggregation.distances.NNM` of ``rows [n, d]``: the mixed rows, shape ``[n, d]``."""
    check_byzantine("nearest_neighbor_mixing f", f, len(rows))
    return NNM()([rows], f)[0]


def krum(rows: Tensor, f: int, *, score: KrumScore = "byzfl") -> Tensor:
    """:class:`~fl_lightning.aggregation.distances.Krum` of ``rows [n, d]``, shape ``[d]``."""
    check_byzantine("krum f", f, len(rows))
    return Krum(f, score=score)(rows)


def multi_krum(rows: Tensor, f: int, *, score: KrumScore = "byzfl") -> Tensor:
    """:class:`~fl_lightning.aggregation.distances.MultiKrum` of ``rows [n, d]``, shape ``[d]``."""
    check_byzantine("multi_krum f", f, len(rows))
    return MultiKrum(f, score=score)(rows)


def geometric_median(rows: Tensor) -> Tensor:
    """:class:`~fl_lightning.aggregation.weiszfeld.GeometricMedian` of ``rows [n, d]``, shape ``[d]``."""
    return GeometricMedian()(rows)
