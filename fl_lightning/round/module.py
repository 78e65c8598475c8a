"""The federated LightningModule: ``training_step`` is one communication round."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.aggregation import Aggregator, Domain, StatisticsAggregator, WeightedMean
from fl_lightning.batch_norm.layers import batch_norm_layers, set_momentum
from fl_lightning.batch_norm.swapping import restore_batch_norm
from fl_lightning.client_data.batches import BatchStack
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.errors import doing
from fl_lightning.execution.base import Executor
from fl_lightning.execution.choice import Choice, choose_executor, decide_compilation
from fl_lightning.execution.joint import joint_executor
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.models.dropout import convert_dropout
from fl_lightning.models.weights import load_weights
from fl_lightning.optimizers import OptimizerCallable
from fl_lightning.optimizers.checks import check_elementwise, check_overrides
from fl_lightning.optimizers.schedules import LRSchedule, lr_factor
from fl_lightning.randomness import derive_seed, seed_global
from fl_lightning.round.communication import Communication
from fl_lightning.round.declarations import ROLES, Declarations
from fl_lightning.round.failures import ClientFailures, RoundSkipped
from fl_lightning.round.first_steps import check_first_steps
from fl_lightning.round.local_steps import agree, attacked, open_memories, take_local_steps
from fl_lightning.round.plan import RoundPlan, Weighting, check_local_work, plan_rounds
from fl_lightning.round.policy import check_together, resolve_policy
from fl_lightning.round.reports import log_round, skip_round, too_few
from fl_lightning.round.server import ServerModule
from fl_lightning.round.server_update import update_server
from fl_lightning.round.survivors import check_aggregate, check_updates, leave_out
from fl_lightning.round.tasks import Task
from fl_lightning.round.trained import mark_trained, refuse_trained
from fl_lightning.round.trainer import check_trainer


class FederatedModule(ServerModule):
    """Federated learning as a LightningModule: one epoch, one batch, one ``training_step`` is one communication round.

    The round is Algorithm 1 of FedAvg (McMahan et al. 2017) with a server optimizer on the pseudo-gradient (FedOpt,
    Reddi et al. 2021): ``SGD(lr=1)`` is FedAvg, ``SGD(lr=1, momentum=0.9)`` FedAvgM; ``FedAdam`` and ``FedYogi`` are theirs,
    without the bias correction of torch's ``Adam``. Rounds count from 1; ``max_epochs`` is the number of rounds.
    ``state_dict()`` is exactly the server model's. Methods are callbacks (see
    :class:`~fl_lightning.methods.callback.FederatedCallback`).

    Args:
        model: The server's model; every client trains a copy.
        client_optimizer: Makes the client optimizer from parameters. Its state is reset each round.
        server_optimizer: Makes the server optimizer from parameters. Default: ``SGD(lr=1)``, which is FedAvg.
        local_steps: Local steps E of each client in a round. Give this or ``local_epochs``.
        local_epochs: Passes over a client's own data in a round.
        participation: Clients in a round: a fraction in (0, 1] (float) or a number (int).
        executor: Who computes the clients' gradients. None chooses when training starts, see
            :func:`~fl_lightning.execution.choice.choose_executor`.
        aggregator: How the server combines the clients. Default: :class:`~fl_lightning.aggregation.base.WeightedMean`.
        statistics_aggregator: How it combines their running statistics. Default: ``aggregator``.
        statistics_domain: In which coordinates, see :class:`~fl_lightning.aggregation.statistics.StatisticsAggregator`.
        weighting: Aggregation weights: ``"examples"`` (p_i = n_i / sum of n_j over the cohort), ``"uniform"``, or ``"samples"`` (in
            proportion to the samples that a client processes in the round: with one local step its batch size, so that the mean
            gradient is that of the union batch; before the local steps they are those to be expected).
        task: What is learnt, with its loss and metrics. Default: :class:`~fl_lightning.round.tasks.Classification`.
        loss: Loss of (outputs, targets), averaged over the batch, in place of the task's.
        client_lr_schedule: Factor on the client learning rate, a function of (round, planned rounds).
        parameter_groups: Client optimizer settings by group (``batch_norm``, ``scalars``, ``bias``); ``lr_scale`` multiplies the rate.
        bn_momentum: ``momentum`` of every BN layer, in (0, 1], the weight of a new batch. None keeps the model's own (torch: 0.1).
        initial_weights: File whose weights the server's model starts from, see :func:`~fl_lightning.models.weights.load_weights`:
            a state dict, or the checkpoint of another run. A run that goes on from a checkpoint of its own has those.
        budget_epochs: Sets the number of rounds so that all together see this many times the training data; the last may be shorter.
        on_divergence: What happens when a client's update is not finite: ``"error"`` stops and names it, or under a robust rule when
            the aggregate is not; ``"record"`` goes on and flags the run as diverged; ``"drop"`` leaves the client out of the round.
        failures: Clients that drop out of rounds or take fewer local steps. None: all report, with all steps.
        min_clients: The fewest clients with which a round is aggregated; with fewer the server keeps its state.
        centralised: Train one model on the union of the batches that the round's clients would have drawn; nothing is sent.
        tf32: Whether a GPU may compute float32 convolutions and matrix products in TF32: faster, with about three digits.
        check_first_steps: Whether a run compares two local steps with plain PyTorch before it trains, see
            :func:`~fl_lightning.round.first_steps.check_first_steps`.
        seed: Seed of participation and dropout.

    Attributes:
        plan: Who takes part in which round, with how many local steps; known from ``setup("fit")`` on.
        slots: Where a client's state hangs in the model; known from the start of training on.
        executor_choice: The executor that was chosen for this run and why; None where one was given.
        communication: What the clients of the newest round have sent and received.
        tracking_layers: The BN layers that track statistics in training: all but those that the user has put in eval mode.

    Raises:
        ConfigurationError: A setting is out of range or contradicts another one.
    """

    deciding_files = ("initial_weights",)

    def __init__(
        self,
        model: nn.Module,
        client_optimizer: OptimizerCallable,
        server_optimizer: OptimizerCallable | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        participation: int | float = 1.0,
        executor: Executor | None = None,
        aggregator: Aggregator | None = None,
        statistics_aggregator: Aggregator | None = None,
        statistics_domain: Domain | None = None,
        weighting: Weighting = "examples",
        # nn.Module is a callable, named so that the command line knows torch's losses by their bare names
        loss: nn.Module | Callable[[Tensor, Tensor], Tensor] | None = None,
        task: Task | None = None,
        client_lr_schedule: LRSchedule | Callable[[int, int], float] | None = None,
        parameter_groups: dict[str, dict[str, float]] | None = None,
        bn_momentum: float | None = None,
        initial_weights: str | None = None,
        budget_epochs: float | None = None,
        on_divergence: Literal["error", "record", "drop"] = "error",
        failures: ClientFailures | None = None,
        min_clients: int = 1,
        centralised: bool = False,
        tf32: bool = False,
        check_first_steps: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(model, server_optimizer, loss, tf32, task)
        check_local_work(local_steps, local_epochs, budget_epochs, participation)
        if bn_momentum is not None:
            set_momentum(model, bn_momentum)
        check_elementwise(client_optimizer)
        check_overrides(client_optimizer, parameter_groups or {})
        convert_dropout(model)
        self.client_optimizer = client_optimizer
        self.local_steps, self.local_epochs, self.participation = local_steps, local_epochs, participation
        self.executor, self.chooses_executor = executor or SequentialExecutor(), executor is None
        self.aggregator = aggregator or WeightedMean()
        self.statistics = StatisticsAggregator(statistics_aggregator or self.aggregator, statistics_domain)
        self.weighting, self.min_clients, self.failures = weighting, min_clients, failures
        self.parameter_groups, self.client_lr_schedule = parameter_groups or {}, client_lr_schedule
        self.initial_weights, self.budget_epochs = initial_weights, budget_epochs
        self.on_divergence, self.centralised, self.seed = on_divergence, centralised, seed
        self.check_first_steps = check_first_steps
        self.output_check.applies &= type(self).client_loss is FederatedModule.client_loss
        self.plan: RoundPlan
        self.slots: StateSlots
        self.executor_choice: Choice | None = None
        self.communication = Communication()
        self._cohort: RoundCohort | None = None
        self.tracking_layers: list[_BatchNorm] = []
        self._modes: dict[nn.Module, bool] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One communication round, in the precision of the weights: only clients' losses are computed in mixed precision."""
        try:
            with torch.autocast(self.device.type, enabled=False):
                self.communication_round()
        except RoundSkipped as skipped:
            skip_round(self, skipped)
        except BaseException:
            restore_batch_norm(self.model)
            self.executor.close()
            raise

    def communication_round(self) -> None:
        """Broadcast, local steps, aggregation, server step."""
        cohort = self.start_round()
        self.call_hook("on_round_start", cohort)
        part = cohort.part()
        counts = self.ranks.exchange(lambda: take_local_steps(self, cohort, part))
        with self.clock.part("gather"):
            samples = [number for count in counts for number in count]
            cohort.finish_steps(part, samples, weigh_samples=self.weighting == "samples")
            cohort = leave_out(self, cohort)
        self.call_hook("on_before_aggregate", cohort)
        with self.clock.part("aggregation"):
            seed_global(derive_seed(self.seed, "aggregation", cohort.round), self.device)
            cohort = check_updates(self, cohort)
            update_server(cohort, self.aggregator, self.statistics, strict=self.on_divergence == "error")
            mark_trained([self.model, *self.federated_callbacks])
            self.server_step()
        self.call_hook("on_round_end", cohort)
        check_aggregate(self, cohort)
        agree(self, f"round {cohort.round}")
        log_round(self, cohort)

    def start_round(self) -> RoundCohort:
        """Sample the cohort of this round and broadcast the server's state to it."""
        self.clock.start()
        with self.clock.part("aggregation"):
            clients, steps = self.plan.trained(self.round)
            if not clients:
                raise too_few(self, len(self.plan.reporting(self.round)))
            policy = resolve_policy(self.federated_callbacks, self.round, self.planned_rounds)
            for layer in self.tracking_layers:
                layer.train(policy["mean"] != "frozen")
            made_for = (len(clients), self.parameter_groups)
            if self._cohort is None or (len(self._cohort), self._cohort.parameter_groups) != made_for:
                self._cohort = RoundCohort(self.model, *made_for, self.ranks)
            self._cohort.broadcast(
                round_number=self.round,
                client_ids=clients,
                weights=self.plan.weights(clients, self.round).to(self.device),
                local_steps=steps,
                policy=policy,
                optimizer=self.client_optimizer,
                lr_factor=lr_factor(self.client_lr_schedule, self.round, self.planned_rounds),
                seed=self.seed,
            )
        return self._cohort

    def compute_gradients(self, cohort: RoundCohort, step: int) -> None:
        """The active clients' forward and backward passes of a local step: fills the gradient rows and the buffers."""
        if not (indices := cohort.begin_step(step)):
            return
        place = f"round {cohort.round}, local step {step + 1}"
        with self.clock.part("data"), doing(place):
            batches = self.client_batches(cohort, indices, step)
        with self.clock.part("forward_backward"), doing(place):
            joint = self.joint_method if step == 0 else None
            executor = self.executor if joint is None else joint_executor(joint, self.ranks)
            losses = executor.backward(self, cohort, batches, indices)
            cohort.add_losses(indices, losses, batches.sizes())

    def client_batches(self, cohort: Cohort, indices: Sequence[int], step: int) -> BatchStack:
        """The batches of some rows at local step ``step`` of the round, on this module's device and in its precision."""
        return self.planned_batches(self.plan, [cohort.client_ids[row] for row in indices], step)

    def planned_batches(self, plan: RoundPlan, clients: Sequence[int], step: int) -> BatchStack:
        """The batches of some clients at local step ``step`` of the round, by a plan: the run's own, or one without failures."""
        sources = plan.sources(clients, self.round, step)
        batches = attacked(self, sources[0], self.data.cohort_batch(*sources))
        return (batches.union() if self.centralised else batches).map(self.on_device)

    def client_loss(self, batch: Any) -> Tensor:
        """A client's loss on its batch, a scalar: override it where a batch is not ``(inputs, targets)``."""
        inputs, targets = batch
        return self.loss(self.model(inputs), targets)

    def weight_share(self, cohort: Cohort) -> float:
        """The cohort's part of all clients' aggregation weight: ``|S| / n`` where all weigh alike. Stragglers count with all of their steps."""
        return self.plan.usual().weight_share(cohort.client_ids, self.round)

    def usual_weights(self, cohort: Cohort) -> Tensor:
        """The cohort's aggregation weights ``[C]`` where all clients take all of their steps: for means over several rounds."""
        return self.plan.usual().weights(cohort.client_ids, self.round).to(self.device)

    def call_hook(self, hook: str, cohort: RoundCohort, *step: int) -> None:
        """Call a hook of every method: what it draws depends on neither the executor nor on earlier draws."""
        for method in self.federated_callbacks:
            own = f"{type(method).__name__}.{hook}"
            with self.clock.part("callbacks"), doing(f"{own}, round {cohort.round}"):
                seed_global(derive_seed(self.seed, own, cohort.round, *step), self.device)
                getattr(method, hook)(self.trainer, self, cohort, *step)

    @property
    def federated_callbacks(self) -> list[Any]:
        """The methods that are active in this run, in the order in which their hooks are called: by role, then as in the list."""
        found = [cb for cb in self.trainer.callbacks if isinstance(cb, Declarations)]  # type: ignore[attr-defined]  # set in a helper of the trainer
        return sorted(found, key=lambda callback: ROLES.index(callback.role))

    @property
    def joint_method(self) -> str | None:
        """The method for whose sake the first local step is one forward pass over all clients; None without."""
        return next((type(cb).__name__ for cb in self.federated_callbacks if cb.needs_joint_forward), None)

    def setup(self, stage: str) -> None:
        """Plan the local work, and let methods change the BN layers."""
        super().setup(stage)
        for layer, training in self._modes.items():  # of a fit that an exception ended, in an evaluation say
            layer.training = training
        layers = batch_norm_layers(self.model).values()
        self.tracking_layers = [layer for layer in layers if layer.training] or list(layers)
        if stage != "fit":
            return
        check_trainer(self.trainer)
        self.plan = plan_rounds(self)
        restore_batch_norm(self.model)  # a fit that failed may have left them
        check_together(self.federated_callbacks)
        for method in self.federated_callbacks:
            method.configure_batch_norm(self)

    def on_fit_start(self) -> None:
        """Take the initial weights and fix the number of rounds at round 1; a resumed run keeps both."""
        if self.initial_weights is not None and self.total_rounds is None:
            self.print(load_weights(self.model, self.initial_weights))
        rounds = self.fix_rounds(self.plan, self.budget_epochs)
        for round_number in range(1, rounds + 1):
            resolve_policy(self.federated_callbacks, round_number, rounds)
        if not self.record.samples:
            refuse_trained(method for method in self.federated_callbacks if method.state_dict())
        open_memories(self)
        self.slots = StateSlots(self.model)
        self.data.keep_on(self.device)
        usual = self.plan.usual()
        clients, steps = usual.trained(1)
        if self.chooses_executor:
            self.executor.close()  # of a fit that an error ended
            self.executor_choice = choose_executor(self, len(clients))
            self.executor = self.executor_choice.executor
        decide_compilation(
            self, rounds * sum(steps), lambda: self.planned_batches(usual, clients[:1], 0).batches()[0]
        )
        self.tracking_layers = [x for x in batch_norm_layers(self.model).values() if x.training]
        self._modes = {layer: layer.training for layer in self.modules()}
        self._cohort = None

    def on_train_start(self) -> None:
        """Check the model's outputs, then the first steps."""
        super().on_train_start()
        if self.check_first_steps:
            self.ranks.exchange(lambda: check_first_steps(self))

    def on_fit_end(self) -> None:
        """Give the BN layers back as they came: in training mode, with their own forward pass."""
        for layer in self.tracking_layers:
            layer.train()
        self._modes = {}
        restore_batch_norm(self.model)
        self.executor.close()
