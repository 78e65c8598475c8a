"""Aggregation rules: pure functions on rows ``[n, d] -> [d]``, one row per client, and the classes that name them in YAML."""

from fl_lightning.aggregation.base import Aggregator, WeightedMean, require_weighted_mean, weighted_mean
from fl_lightning.aggregation.coordinates import median, trimmed_mean
from fl_lightning.aggregation.distances import krum, multi_krum, nearest_neighbor_mixing
from fl_lightning.aggregation.robust import (
    NNM,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    PreAggregator,
    RobustAggregator,
    TrimmedMean,
)
from fl_lightning.aggregation.weiszfeld import geometric_median

__all__ = [
    "NNM",
    "Aggregator",
    "GeometricMedian",
    "Krum",
    "Median",
    "MultiKrum",
    "PreAggregator",
    "RobustAggregator",
    "TrimmedMean",
    "WeightedMean",
    "geometric_median",
    "krum",
    "median",
    "multi_krum",
    "nearest_neighbor_mixing",
    "require_weighted_mean",
    "trimmed_mean",
    "weighted_mean",
]
