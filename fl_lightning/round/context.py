"""Interface of a run for executors, evaluations and methods."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.aggregation import Aggregator, StatisticsAggregator
from fl_lightning.client_data.batches import BatchStack
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.client_module.client_module import ClientModule, ClientValues
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.execution.base import ClientTask, Executor
from fl_lightning.ranks import Ranks
from fl_lightning.round.clock import RoundClock
from fl_lightning.round.communication import Communication
from fl_lightning.round.plan import RoundPlan, Weighting
from fl_lightning.round.record import RunRecord
from fl_lightning.round.tasks import Task


class RunContext(ClientTask, Protocol):
    """Interface of a run, which :class:`~fl_lightning.round.module.FederatedModule` implements.

    Settings, such as ``weighting``, are described in ``FederatedModule``.

    Attributes:
        client_module: Hooks of the model, if it is a LightningModule with a ``training_step``.
        statistics: Rule that combines the clients' running statistics.
        total_rounds: Planned number of rounds; None before round 1.
        plan: Clients that take part in each round, and their local steps; set by ``setup("fit")``.
        record: Metrics and totals of the run.
        clock: Time of each stage of a round.
        communication: Bytes and exchanges of the newest round.
        tracking_layers: BN layers that update running statistics in training. BN layers in eval
            mode are not included.
        evaluation: Evaluation of the server's model.
    """

    client_module: ClientModule | None
    executor: Executor
    aggregator: Aggregator
    statistics: StatisticsAggregator
    weighting: Weighting
    on_divergence: Literal["error", "record", "drop"]
    min_clients: int
    centralised: bool
    tf32: bool
    task: Task
    total_rounds: int | None
    plan: RoundPlan
    record: RunRecord
    clock: RoundClock
    communication: Communication
    tracking_layers: list[_BatchNorm]
    evaluation: Any

    @property
    def data(self) -> FederatedDataModule:
        """The federated data."""

    @property
    def ranks(self) -> Ranks:
        """The ranks (processes) of the run."""

    @property
    def round(self) -> int:
        """The current communication round, from 1."""

    @property
    def planned_rounds(self) -> int:
        """Planned number of rounds, which is known from round 1 on."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the model parts that methods treat separately, such as ``"fc"``."""

    @property
    def federated_callbacks(self) -> list[Any]:
        """The methods of the run, in the order in which their hooks are called."""

    @property
    def joint_method(self) -> str | None:
        """Name of the method that needs a joint forward pass of all clients, or None."""

    def start_round(self) -> RoundCohort:
        """Sample the cohort of this round, and broadcast the server's state to its clients."""

    def call_hook(self, hook: str, cohort: RoundCohort, *step: int) -> None:
        """Call a hook of every method."""

    def client_batches(self, cohort: Cohort, indices: Sequence[int], step: int) -> BatchStack:
        """Return the batches of some clients at a local step.

        ``indices`` are the positions of the clients in the cohort.
        """

    def begin_steps(self, cohort: RoundCohort) -> None:
        """Set the settings of the client optimizer that a schedule over local steps changes."""

    def end_steps(self, cohort: RoundCohort) -> None:
        """Call ``on_train_batch_end`` of a client's LightningModule after each client's local step."""

    def logged_by_clients(self) -> ClientValues:
        """Return the values that the clients of this rank have logged in the round."""

    def merge_logged(self, clients: Sequence[int], of_ranks: Sequence[ClientValues]) -> None:
        """Combine the values that clients of all ranks have logged."""

    def planned_batches(self, plan: RoundPlan, clients: Sequence[int], step: int) -> BatchStack:
        """Return the batches of some clients at a local step, according to ``plan``."""

    def server_step(self) -> None:
        """Take a step of the server optimizer on the pseudo-gradient of the round."""

    def on_device(self, batch: Any) -> Any:
        """Move a batch to the run's device, and convert it to the run's precision."""

    def log_numbers(self, metrics: Mapping[str, float], prog_bar: bool = False) -> None:
        """Log metrics of this round that are plain numbers."""

    def show_to_callbacks(self, metrics: Mapping[str, float]) -> None:
        """Set values of ``trainer.callback_metrics``."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first rank only."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the server model's state."""
