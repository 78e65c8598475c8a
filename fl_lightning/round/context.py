"""State of a run, and the operations on it that rounds, executors, evaluations and methods use."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.aggregation import Aggregator, StatisticsAggregator
from fl_lightning.batch_norm.freezing import freeze_statistics
from fl_lightning.client_data.batches import BatchStack
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.clients import ClientTask, Task
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError, doing
from fl_lightning.execution.base import Executor
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import joint_executor
from fl_lightning.optimizers.client_lr import lr_factor
from fl_lightning.randomness import derive_seed, seed_everything, seed_global
from fl_lightning.ranks import Ranks
from fl_lightning.round.clock import RoundClock
from fl_lightning.round.communication import Communication
from fl_lightning.round.declarations import in_order, numbered
from fl_lightning.round.plan import RoundPlan, Weighting
from fl_lightning.round.policy import declared_parts, resolve_policy
from fl_lightning.round.record import RunRecord


class RunContext(L.LightningModule):
    """State of a run; :class:`~fl_lightning.round.module.FederatedModule` adds Lightning's hooks.

    Settings, such as ``weighting``, are described in ``FederatedModule``.

    Attributes:
        client: What clients compute.
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

    model: nn.Module
    client: ClientTask
    client_lr_schedule: Callable[[int, int], float] | None
    executor: Executor
    chooses_executor: bool
    aggregator: Aggregator
    statistics: StatisticsAggregator
    weighting: Weighting
    on_divergence: Literal["error", "record", "drop"]
    min_clients: int
    centralised: bool
    tf32: bool
    seed: int
    task: Task
    loss: Callable[[Tensor, Tensor], Tensor]
    evaluation: Any

    def __init__(self) -> None:
        super().__init__()
        self.plan: RoundPlan
        self.total_rounds: int | None = None
        self.record = RunRecord()
        self.clock = RoundClock()
        self.communication = Communication()
        self.tracking_layers: list[_BatchNorm] = []
        self._cohort: RoundCohort | None = None
        self._parts: tuple[str, ...] | None = None

    @property
    def data(self) -> FederatedDataModule:
        """The federated data of the run."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]  # set by Trainer.fit(datamodule=...)
        if not isinstance(data, FederatedDataModule):
            raise ConfigurationError(
                f"data: FederatedModule needs a FederatedDataModule, got {type(data).__name__}; pass "
                "datamodule=FederatedDataModule(clients=[...]) to fit()"
            )
        return data

    @property
    def ranks(self) -> Ranks:
        """The ranks (processes) of the run. Without the cohort strategy, there is a single rank."""
        return getattr(self.trainer.strategy, "ranks", Ranks())

    @property
    def round(self) -> int:
        """The current communication round, from 1."""
        return self.trainer.current_epoch + 1

    @property
    def planned_rounds(self) -> int:
        """Planned number of rounds, which is known from round 1 on.

        A milestone such as ``freeze_round=0.5`` is a fraction of this number.
        """
        assert self.total_rounds is not None
        return self.total_rounds

    @property
    def evaluates_now(self) -> bool:
        """Whether this round is the last one, or an evaluation follows it."""
        every = self.trainer.check_val_every_n_epoch or 1
        return self.round % every == 0 or self.round == self.planned_rounds

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the model parts that methods treat separately, such as ``"fc"``."""
        if self._parts is None:
            self._parts = declared_parts(self.model, self.federated_callbacks, self.total_rounds or 1)
        return self._parts

    def call_hook(self, hook: str, cohort: RoundCohort, *step: int) -> None:
        """Call a hook of every method.

        Random generators are seeded by method, hook, round and step.
        """
        for method, _, name in numbered(self.federated_callbacks, hook):
            with self.clock.part("callbacks"), doing(f"{name}, round {cohort.round}"):
                seed_global(derive_seed(self.seed, name, cohort.round, *step), self.device)
                getattr(method, hook)(self.trainer, self, cohort, *step)

    def seed_evaluation_data(self) -> None:
        """Seed what evaluation data draw, such as random transforms, whatever was drawn before."""
        seed_everything(derive_seed(self.seed, "evaluation data", self.trainer.global_step))

    @property
    def federated_callbacks(self) -> list[Any]:
        """The methods of this run, in the order in which their hooks are called."""
        return in_order(self.trainer.callbacks)  # type: ignore[attr-defined]  # the trainer's helpers set it

    @property
    def joint_method(self) -> str | None:
        """Name of the method that needs a joint forward pass of all clients, or None."""
        return next((type(cb).__name__ for cb in self.federated_callbacks if cb.needs_joint_forward), None)

    def step_executor(self, step: int) -> Executor:
        """Return the executor of a local step, from 0, which methods may replace."""
        if step == 0 and self.joint_method is not None:
            return joint_executor(self.joint_method, self.ranks)
        executor = self.executor
        for method in self.federated_callbacks:
            executor = method.step_executor(self, executor)
        return executor

    def start_round(self) -> RoundCohort:
        """Sample the cohort of this round, and broadcast the server's state to its clients."""
        with self.clock.part("aggregation"):
            clients, steps = self.plan.trained(self.round)
            policy = resolve_policy(self.federated_callbacks, self.round, self.planned_rounds)
            made, base = (self.client.parameter_groups, self.parts), self._cohort
            if base is None or (base.parameter_groups, base.parts) != made or len(base) < len(clients):
                base = RoundCohort(
                    self.model, len(clients), made[0], self.ranks, self.parts, self.client.group_of
                )
            cohort = base.first(len(clients))
            cohort.broadcast(
                round_number=self.round,
                client_ids=clients,
                weights=self.plan.weights(clients, self.round).to(self.device),
                local_steps=steps,
                policy=policy,
                optimizer=self.client.optimizer,
                lr_factor=lr_factor(self.client_lr_schedule, self.round, self.planned_rounds),
                seed=self.seed,
            )
            freeze_statistics(self.model, self.tracking_layers, cohort.treatments)
            self.client.enter(cohort, alone=type(self.executor) is SequentialExecutor)
        self._cohort = base
        return cohort

    def client_batches(self, cohort: Cohort, indices: Sequence[int], step: int) -> BatchStack:
        """Return the batches of some clients at a local step, on the device of the run.

        ``indices`` are the positions of the clients in the cohort.
        """
        return self.planned_batches(self.plan, [cohort.client_ids[row] for row in indices], step)

    def planned_batches(self, plan: RoundPlan, clients: Sequence[int], step: int) -> BatchStack:
        """Return the batches of some clients at a local step, according to ``plan``."""
        self.client.at_step(step)
        sources = plan.sources(clients, self.round, step)
        batches = self.data.cohort_batch(*sources)
        for method in (method for method in self.federated_callbacks if method.role == "attack"):
            batches = method.change_batches(self, sources[0], batches)
        batches = batches.union() if self.centralised else batches
        return self.client.moved(batches, *sources)

    def named(self, client: int) -> str:
        """Return words for a client, such as ``"client 3"`` or ``"client 3 (Oslo)"``."""
        return self.data.named(client)

    def weight_share(self, cohort: Cohort) -> float:
        """Return the cohort's share of the total weight of all clients.

        With uniform weights, this is the cohort's size divided by the number of clients. Failures
        do not change the weights.
        """
        return self.plan.usual().weight_share(cohort.client_ids, self.round)

    def usual_weights(self, cohort: Cohort) -> Tensor:
        """Return the cohort's aggregation weights ``[C]``, as they would be without failures.

        Methods use these weights for means over several rounds.
        """
        return self.plan.usual().weights(cohort.client_ids, self.round).to(self.device)

    def server_step(self) -> None:
        """Take a step of the server optimizer on the pseudo-gradient of the round."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        optimizer.step()

    def log_numbers(self, metrics: Mapping[str, float], prog_bar: bool = False) -> None:
        """Log metrics of this round that are plain numbers. This is faster than ``log``.

        Args:
            metrics: Numbers by name.
            prog_bar: Whether progress bars show the numbers.
        """
        for name, value in metrics.items():
            self.record.add(name, value)
        self.show_to_callbacks(metrics)
        if prog_bar:
            self.trainer.progress_bar_metrics.update(metrics)

    def show_to_callbacks(self, metrics: Mapping[str, float]) -> None:
        """Set values of ``trainer.callback_metrics``."""
        self.trainer.callback_metrics.update(
            zip(metrics, torch.tensor([*metrics.values()]).unbind(), strict=True)
        )

    def on_device(self, batch: Any) -> Any:
        """Move a batch to this module's device, and convert it to the run's precision."""
        return self.client.on_device(batch)
