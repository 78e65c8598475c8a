"""Executors, which compute the clients' forward and backward passes."""

from fl_lightning.execution.base import Executor
from fl_lightning.execution.graphs import GraphExecutor
from fl_lightning.execution.per_sample import filled_batches, per_sample_executor
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor, joint_executor

__all__ = [
    "Executor",
    "GraphExecutor",
    "SequentialExecutor",
    "VectorizedExecutor",
    "filled_batches",
    "joint_executor",
    "per_sample_executor",
]
