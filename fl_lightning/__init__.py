"""fl_lightning: Batch Normalization in federated learning, on PyTorch Lightning.

The public names are imported on first use, so that ``import fl_lightning`` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.client_data.federated import ClientDataModule, FederatedDataModule
    from fl_lightning.cohort.cohort import Cohort
    from fl_lightning.errors import ConfigurationError
    from fl_lightning.executors.processes import ProcessExecutor
    from fl_lightning.executors.sequential import SequentialExecutor
    from fl_lightning.executors.vectorized import VectorizedExecutor
    from fl_lightning.round.callback import FederatedCallback
    from fl_lightning.round.module import FederatedModule

__version__ = "0.1.0"

_HOME = {
    "ClientDataModule": "client_data.federated",
    "Cohort": "cohort.cohort",
    "ConfigurationError": "errors",
    "FederatedCallback": "round.callback",
    "FederatedDataModule": "client_data.federated",
    "FederatedModule": "round.module",
    "ProcessExecutor": "executors.processes",
    "SequentialExecutor": "executors.vectorized",
    "VectorizedExecutor": "executors.vectorized",
}

__all__ = [
    "ClientDataModule",
    "Cohort",
    "ConfigurationError",
    "FederatedCallback",
    "FederatedDataModule",
    "FederatedModule",
    "ProcessExecutor",
    "SequentialExecutor",
    "VectorizedExecutor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
