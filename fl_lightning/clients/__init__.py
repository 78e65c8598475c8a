"""The programs of clients: a network with a loss, or a LightningModule of the user."""

from copy import copy

from torch import nn

from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.clients.label_weights import label_weights
from fl_lightning.clients.lightning_module import LightningModuleTask, trains_itself
from fl_lightning.clients.network import NetworkTask
from fl_lightning.clients.task import ClientTask
from fl_lightning.clients.tasks import Classification, Segmentation, Task

__all__ = [
    "Classification",
    "ClientTask",
    "LightningModuleTask",
    "NetworkTask",
    "Segmentation",
    "ServerEvaluation",
    "Task",
    "label_weights",
    "task_of",
]


def task_of(model: nn.Module | ClientTask) -> ClientTask:
    """Return what clients compute with a model."""
    if isinstance(model, ClientTask):
        task = copy(model)  # one object may be given to several runs
        task.run = None
        return task
    return LightningModuleTask(model) if trains_itself(model) else NetworkTask(model)
