"""fl_lightning: Batch Normalization in federated learning, on PyTorch Lightning.

The public names are imported on first use, so that ``import fl_lightning`` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fl_lightning import aliases

if TYPE_CHECKING:
    from fl_lightning.batch_norm.swapping import SwappedBatchNorm as SwappedBatchNorm
    from fl_lightning.batch_norm.swapping import swap_batch_norm as swap_batch_norm
    from fl_lightning.callbacks.observers.network_link import NetworkLink as NetworkLink
    from fl_lightning.client_data.federated import ClientDataModule as ClientDataModule
    from fl_lightning.client_data.federated import FederatedDataModule as FederatedDataModule
    from fl_lightning.cohort.client_memory import ClientMemory as ClientMemory
    from fl_lightning.cohort.cohort import Cohort as Cohort
    from fl_lightning.errors import ConfigurationError as ConfigurationError
    from fl_lightning.execution.sequential import SequentialExecutor as SequentialExecutor
    from fl_lightning.execution.vectorized import VectorizedExecutor as VectorizedExecutor
    from fl_lightning.experiments.run.progress import RoundProgress as RoundProgress
    from fl_lightning.experiments.run.run import Run as Run
    from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint as RoundCheckpoint
    from fl_lightning.methods.callback import FederatedCallback as FederatedCallback
    from fl_lightning.methods.freezing import Freezing as Freezing
    from fl_lightning.methods.local_state import LocalState as LocalState
    from fl_lightning.methods.report import Report as Report
    from fl_lightning.methods.report import Table as Table
    from fl_lightning.methods.statistics_pass import collect as collect
    from fl_lightning.methods.statistics_pass import measured_statistics as measured_statistics
    from fl_lightning.methods.variant_evaluation import VariantEvaluation as VariantEvaluation
    from fl_lightning.models.dropout import Dropout as Dropout
    from fl_lightning.optimizers.schedules import InverseSteps as InverseSteps
    from fl_lightning.optimizers.schedules import MultiStep as MultiStep
    from fl_lightning.optimizers.server import FedAdam as FedAdam
    from fl_lightning.optimizers.server import FedYogi as FedYogi
    from fl_lightning.round.failures import ClientFailures as ClientFailures
    from fl_lightning.round.module import FederatedModule as FederatedModule
    from fl_lightning.round.tasks import Classification as Classification
    from fl_lightning.round.tasks import Segmentation as Segmentation
    from fl_lightning.round.tasks import Task as Task

__version__ = "0.1.0"

aliases.install()

HOMES = {
    "Classification": "round.tasks",
    "ClientDataModule": "client_data.federated",
    "ClientFailures": "round.failures",
    "ClientMemory": "cohort.client_memory",
    "Cohort": "cohort.cohort",
    "ConfigurationError": "errors",
    "Dropout": "models.dropout",
    "FedAdam": "optimizers.server",
    "FedYogi": "optimizers.server",
    "FederatedCallback": "methods.callback",
    "FederatedDataModule": "client_data.federated",
    "FederatedModule": "round.module",
    "Freezing": "methods.freezing",
    "InverseSteps": "optimizers.schedules",
    "LocalState": "methods.local_state",
    "MultiStep": "optimizers.schedules",
    "NetworkLink": "callbacks.observers.network_link",
    "Report": "methods.report",
    "RoundCheckpoint": "experiments.run_directory.checkpoints",
    "RoundProgress": "experiments.run.progress",
    "Run": "experiments.run.run",
    "Segmentation": "round.tasks",
    "SequentialExecutor": "execution.sequential",
    "SwappedBatchNorm": "batch_norm.swapping",
    "Table": "methods.report",
    "Task": "round.tasks",
    "VariantEvaluation": "methods.variant_evaluation",
    "VectorizedExecutor": "execution.vectorized",
    "collect": "methods.statistics_pass",
    "measured_statistics": "methods.statistics_pass",
    "swap_batch_norm": "batch_norm.swapping",
}
"""Where each public name is defined. A class is named by ``fl_lightning`` alone in configurations, so none changes with a move."""

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
