"""fl_lightning: Batch Normalization in federated learning, on PyTorch Lightning.

The public names are imported on first use, so that ``import fl_lightning`` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.batch_norm.swapping import SwappedBatchNorm, swap_batch_norm
    from fl_lightning.client_data.federated import ClientDataModule, FederatedDataModule
    from fl_lightning.cohort.cohort import Cohort
    from fl_lightning.errors import ConfigurationError
    from fl_lightning.executors.processes import ProcessExecutor
    from fl_lightning.executors.sequential import SequentialExecutor
    from fl_lightning.executors.vectorized import VectorizedExecutor
    from fl_lightning.mechanisms.freezing import Freezing
    from fl_lightning.mechanisms.local_state import LocalState
    from fl_lightning.mechanisms.statistics_pass import collect, measured_statistics
    from fl_lightning.mechanisms.variant_evaluation import VariantEvaluation
    from fl_lightning.round.callback import FederatedCallback
    from fl_lightning.round.module import FederatedModule
    from fl_lightning.run_directory.report import Report, Table

__version__ = "0.1.0"

_HOME = {
    "ClientDataModule": "client_data.federated",
    "Cohort": "cohort.cohort",
    "ConfigurationError": "errors",
    "FederatedCallback": "round.callback",
    "FederatedDataModule": "client_data.federated",
    "FederatedModule": "round.module",
    "Freezing": "mechanisms.freezing",
    "LocalState": "mechanisms.local_state",
    "ProcessExecutor": "executors.processes",
    "Report": "run_directory.report",
    "SequentialExecutor": "executors.sequential",
    "SwappedBatchNorm": "batch_norm.swapping",
    "Table": "run_directory.report",
    "VariantEvaluation": "mechanisms.variant_evaluation",
    "VectorizedExecutor": "executors.vectorized",
    "collect": "mechanisms.statistics_pass",
    "measured_statistics": "mechanisms.statistics_pass",
    "swap_batch_norm": "batch_norm.swapping",
}

__all__ = [
    "ClientDataModule",
    "Cohort",
    "ConfigurationError",
    "FederatedCallback",
    "FederatedDataModule",
    "FederatedModule",
    "Freezing",
    "LocalState",
    "ProcessExecutor",
    "Report",
    "SequentialExecutor",
    "SwappedBatchNorm",
    "Table",
    "VariantEvaluation",
    "VectorizedExecutor",
    "collect",
    "measured_statistics",
    "swap_batch_norm",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
