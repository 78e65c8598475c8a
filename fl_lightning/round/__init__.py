"""The communication round: the federated module, methods' hooks, aggregation and evaluation."""

from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.clients.tasks import Classification, Segmentation, Task
from fl_lightning.round.client_messages import sent_statistics_by_kind, sent_vectors
from fl_lightning.round.communication import Communication, UpDown, add, total
from fl_lightning.round.context import RunContext
from fl_lightning.round.failures import ClientFailures
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import policy_stages, resolve_policy
from fl_lightning.round.server_update import aggregate

__all__ = [
    "Classification",
    "ClientFailures",
    "Communication",
    "FederatedModule",
    "RunContext",
    "Segmentation",
    "ServerEvaluation",
    "Task",
    "UpDown",
    "add",
    "aggregate",
    "policy_stages",
    "resolve_policy",
    "sent_statistics_by_kind",
    "sent_vectors",
    "total",
]
