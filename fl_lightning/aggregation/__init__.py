"""Aggregation rules, which combine the clients' rows ``[n, d]`` into one row ``[d]``."""

from fl_lightning.aggregation.centers import CenteredClipping, GeometricMedian
from fl_lightning.aggregation.coordinates import MeanAroundMedian, Median, TrimmedMean, median
from fl_lightning.aggregation.distances import NNM, Krum, MultiKrum
from fl_lightning.aggregation.mean import Aggregator, WeightedMean, weighted_mean
from fl_lightning.aggregation.preaggregation import Bucketing, PreAggregator
from fl_lightning.aggregation.robust import RobustAggregator
from fl_lightning.aggregation.statistics import (
    Domain,
    LayerStatistics,
    StatisticsAggregator,
    require_weighted_mean,
    sent_statistics,
)

__all__ = [
    "NNM",
    "Aggregator",
    "Bucketing",
    "CenteredClipping",
    "Domain",
    "GeometricMedian",
    "Krum",
    "LayerStatistics",
    "MeanAroundMedian",
    "Median",
    "MultiKrum",
    "PreAggregator",
    "RobustAggregator",
    "StatisticsAggregator",
    "TrimmedMean",
    "WeightedMean",
    "median",
    "require_weighted_mean",
    "sent_statistics",
    "weighted_mean",
]
