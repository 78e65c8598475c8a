"""Batch Normalization layers and their state."""

from fl_lightning.batch_norm.joint import averaging_by, cohort_mean, mean_of_all
from fl_lightning.batch_norm.kinds import KINDS, STATISTICS, TREATMENTS, buffer_kinds, parameter_kinds
from fl_lightning.batch_norm.layers import (
    ONE_VALUE,
    batch_norm_layers,
    has_statistics,
    require_batch_norm,
    watching_inputs,
)
from fl_lightning.batch_norm.moments import merge_, moments, total_variance
from fl_lightning.batch_norm.swapping import (
    SwappedBatchNorm,
    batch_statistics,
    evaluating,
    restore_batch_norm,
    swap_batch_norm,
)

__all__ = [
    "KINDS",
    "ONE_VALUE",
    "STATISTICS",
    "TREATMENTS",
    "SwappedBatchNorm",
    "averaging_by",
    "batch_norm_layers",
    "batch_statistics",
    "buffer_kinds",
    "cohort_mean",
    "evaluating",
    "has_statistics",
    "mean_of_all",
    "merge_",
    "moments",
    "parameter_kinds",
    "require_batch_norm",
    "restore_batch_norm",
    "swap_batch_norm",
    "total_variance",
    "watching_inputs",
]
