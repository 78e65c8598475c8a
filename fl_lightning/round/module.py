"""The federated LightningModule: ``training_step`` is one communication round."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from fl_lightning.aggregation import Aggregator, WeightedMean
from fl_lightning.batch_norm.layers import check_variances, set_momentum
from fl_lightning.batch_norm.swapping import restore_batch_norm
from fl_lightning.cli.progress import RoundProgress
from fl_lightning.client_data.cohort_batch import CohortBatch
from fl_lightning.cohort.blocks import parameter_blocks
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.errors import ConfigurationError
from fl_lightning.executors.base import Executor
from fl_lightning.executors.joint import joint_executor
from fl_lightning.executors.sequential import SequentialExecutor
from fl_lightning.models.dropout import convert_dropout, dropout_keys
from fl_lightning.optimizers.checks import check_elementwise, check_overrides, check_server_optimizer
from fl_lightning.optimizers.client import OptimizerCallable
from fl_lightning.optimizers.schedules import LRSchedule
from fl_lightning.randomness import derive_seed, seed_global
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.round.communication import Communication, round_communication, total
from fl_lightning.round.plan import check_participation
from fl_lightning.round.policy import resolve_policy
from fl_lightning.round.run_module import RunModule
from fl_lightning.round.server_update import (
    diverged_clients,
    set_local_parameters,
    set_pseudo_gradient,
    set_statistics,
)


class FederatedModule(RunModule):
    """Federated learning as a LightningModule: one epoch, one batch, one ``training_step`` is one communication round.

    The round is Algorithm 1 of FedAvg (McMahan et al. 2017) with a server optimizer on the pseudo-gradient (FedOpt,
    Reddi et al. 2021): ``SGD(lr=1)`` is FedAvg, ``SGD(lr=1, momentum=0.9)`` FedAvgM; ``FedAdam`` and ``FedYogi`` are theirs,
    without the bias correction of torch's ``Adam``. Rounds count from 1; ``max_epochs`` is the number of rounds.
    ``state_dict()`` is exactly the server model's. Methods are callbacks (see
    :class:`~fl_lightning.round.callback.FederatedCallback`).

    Args:
        model: The server's model; every client trains a copy.
        client_optimizer: Makes the client optimizer from parameters. Its state is reset each round.
        server_optimizer: Makes the server optimizer from parameters. Default: ``SGD(lr=1)``, which is FedAvg.
        local_steps: Local steps E of each client in a round. Give this or ``local_epochs``.
        local_epochs: Passes over a client's own data in a round.
        participation: Clients in a round: a fraction in (0, 1] (float) or a number (int).
        executor: Who computes the clients' gradients. None chooses when training starts, see
            :func:`~fl_lightning.executors.choice.choose_executor`.
        aggregator: How the server combines the clients. Default: :class:`~fl_lightning.aggregation.base.WeightedMean`.
        weighting: Aggregation weights: ``"examples"`` (p_i = n_i / sum of n_j over the cohort), ``"uniform"``, or
            ``"samples"`` (in proportion to the samples that a client processes in the round: with one local step its
            batch size, so that the mean gradient is that of the union batch; before the local steps they are those to
            be expected).
        loss: Loss of (outputs, targets), averaged over the batch. Default: cross-entropy.
        client_lr_schedule: Factor on the client learning rate, a function of (round, planned rounds).
        parameter_groups: Client optimizer settings by parameter group (``batch_norm``, ``scalars``, ``bias``): values
            override, ``lr_scale`` multiplies the learning rate.
        bn_momentum: ``momentum`` of every BN layer, in (0, 1]: the weight of a new batch in the running statistics. None
            keeps the model's own (torch: 0.1).
        budget_epochs: Sets the number of rounds so that all rounds together see this many times the training data; the
            last round is cut short where the budget ends.
        on_divergence: ``"error"`` stops when a client's update is not finite and names it; ``"record"`` goes on and flags
            the run as diverged.
        centralised: Train one model on the union of the batches that the round's clients would have drawn, step by step:
            the same configuration without the federation. Nothing is sent.
        tf32: Whether a GPU may compute float32 convolutions and matrix products in TF32: faster, with about three digits.
        seed: Seed of participation and dropout.

    Attributes:
        executor_choice: The executor that was chosen for this run and why; None where one was given.
        traffic: What the clients of the newest round have sent and received.

    Raises:
        ConfigurationError: A setting is out of range or contradicts another one.
    """

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
        weighting: Literal["examples", "uniform", "samples"] = "examples",
        # nn.Module is a callable, named so that the command line knows torch's losses by their bare names
        loss: nn.Module | Callable[[Tensor, Tensor], Tensor] | None = None,
        client_lr_schedule: LRSchedule | Callable[[int, int], float] | None = None,
        parameter_groups: dict[str, dict[str, float]] | None = None,
        bn_momentum: float | None = None,
        budget_epochs: float | None = None,
        on_divergence: Literal["error", "record"] = "error",
        centralised: bool = False,
        tf32: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(model, loss)
        self.automatic_optimization = False
        if (local_steps is None) == (local_epochs is None):
            raise ConfigurationError(
                f"local_steps: {local_steps} and local_epochs: {local_epochs}: give exactly one of them, such as "
                "local_steps: 20 (null switches the other off)"
            )
        for setting, value in (("local_steps", local_steps), ("local_epochs", local_epochs)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{setting}: {value} must be at least 1")
        if budget_epochs is not None and budget_epochs <= 0:
            raise ConfigurationError(f"budget_epochs: {budget_epochs} must be positive")
        if bn_momentum is not None:
            set_momentum(model, bn_momentum)
        check_participation(participation)
        check_elementwise(client_optimizer)
        check_overrides(client_optimizer, parameter_groups or {})
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigurationError(f"model: {type(model).__name__} has no trainable parameters")
        if server_optimizer is not None:
            check_server_optimizer(server_optimizer, [p for p in model.parameters() if p.requires_grad])
        self.num_dropout_layers = convert_dropout(model)
        self.client_optimizer = client_optimizer
        self.server_optimizer = server_optimizer or partial(torch.optim.SGD, lr=1.0)
        self.local_steps, self.local_epochs = local_steps, local_epochs
        self.participation = participation
        self.executor = executor or SequentialExecutor()
        self.chooses_executor = executor is None
        self.aggregator = aggregator or WeightedMean()
        self.weighting = weighting
        self.client_lr_schedule = client_lr_schedule
        self.parameter_groups = parameter_groups or {}
        self.budget_epochs = budget_epochs
        self.on_divergence = on_divergence
        self.centralised = centralised
        self.tf32 = tf32
        self.seed = seed

    # One communication round

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One communication round, in the precision of the weights: only clients' losses are computed in mixed precision."""
        try:
            with self.executor.during_round():
                if torch.is_autocast_enabled(self.device.type):
                    with torch.autocast(self.device.type, enabled=False):
                        self.communication_round()
                else:
                    self.communication_round()
        except BaseException:
            restore_batch_norm(self.model)
            self.executor.close()
            raise

    def communication_round(self) -> None:
        """Broadcast, local steps, aggregation, server step."""
        clock = self.clock
        clock.start()
        cohort = self.start_round()
        clock.lap("aggregation")
        self._call("on_round_start", cohort)
        loss_sum, samples = torch.zeros(len(cohort), device=self.device), [0] * len(cohort)
        for step in range(max(cohort.local_steps)):
            cohort.begin_step(step)
            rows = cohort.active_rows()
            batches = self.client_batches(cohort, rows, step)
            clock.lap("data")
            losses = self._executor(step).backward(self, cohort, batches, rows)
            loss_sum[cohort.index(rows)] += losses.to(loss_sum.dtype)
            sizes = batches.sizes()
            self.record.add_samples(sum(sizes))
            for row, size in zip(rows, sizes, strict=True):
                samples[row] += size
            clock.lap("forward_backward")
            self._call("on_after_local_backward", cohort, step)
            cohort.take_step()
            clock.lap("optimizer")
            self._call("on_local_step_end", cohort, step)
            cohort.finish_step(step)
            self._show_progress(step + 1, max(cohort.local_steps))
            clock.lap("other")
        cohort.restore_finished()
        cohort.losses = loss_sum / torch.tensor(cohort.local_steps, device=self.device)
        if self.weighting == "samples":
            cohort.weights = (torch.tensor(samples).double() / sum(samples)).to(self.device)
        clock.lap("other")
        self._call("on_before_aggregate", cohort)
        self.aggregate(cohort)
        self.server_step()
        clock.lap("aggregation")
        self._call("on_round_end", cohort)
        found = cohort.losses.tolist()
        mean = sum(weight * loss for weight, loss in zip(cohort.weights.tolist(), found, strict=True))
        self.log_numbers({"train/loss": mean}, prog_bar=True)
        self.record.add_clients(cohort.client_ids, cohort.local_steps, found)
        self._log_costs(cohort)

    def start_round(self) -> Cohort:
        """Sample the cohort of this round and broadcast the server's state to it."""
        members = self.plan.cohort(self.round)
        clients = [0] if self.centralised else members
        steps = [self.plan.steps(client, self.round) for client in members]
        policy = resolve_policy(self.federated_callbacks, self.round, self.planned_rounds)
        for layer in self._batch_norm_in_training:
            layer.train(policy["mean"] != "frozen")
        if self._cohort is None or len(self._cohort) != len(clients):
            self._cohort = Cohort(
                self.model, len(clients), parameter_blocks(self.model, self.parameter_groups)
            )
        sizes = [1.0] if self.centralised else self._weights(clients, steps)
        schedule = self.client_lr_schedule
        self._cohort.broadcast(
            round_number=self.round,
            client_ids=clients,
            weights=torch.tensor([size / sum(sizes) for size in sizes], dtype=torch.float64).to(self.device),
            local_steps=[max(steps)] if self.centralised else steps,
            policy=policy,
            optimizer=self.client_optimizer,
            overrides=self.parameter_groups,
            lr_factor=schedule(self.round, self.planned_rounds) if schedule is not None else 1.0,
        )
        return self._cohort

    def client_batches(self, cohort: Cohort, rows: Sequence[int], step: int) -> CohortBatch:
        """The batches of the active clients at a local step, on this module's device and in its precision."""
        if self.centralised:
            members = self.plan.cohort(self.round)
            clients = [client for client in members if step < self.plan.steps(client, self.round)]
        else:
            clients = [cohort.client_ids[row] for row in rows]
        positions = [self.plan.first_step(client, self.round) + step for client in clients]
        if self.num_dropout_layers:
            keys = dropout_keys(self.seed, self.round, cohort.client_ids, step)
            cohort.set_dropout_keys(keys.to(self.device, non_blocking=True))
        batches = self.data.cohort_batch(clients, positions)
        if self.centralised:
            batches = batches.union()
        convert = self.trainer.precision_plugin.convert_input
        return batches.map(lambda batch: convert(move_data_to_device(batch, self.device)))

    def client_loss(self, batch: Any) -> Tensor:
        """A client's loss on its batch, a scalar: override it where a batch is not ``(inputs, targets)``."""
        inputs, targets = batch
        return self.loss(self.model(inputs), targets)

    def aggregate(self, cohort: Cohort) -> None:
        """Set the server's statistics to the clients' aggregate and its gradients to the pseudo-gradient.

        Raises:
            ConfigurationError: A client's update is not finite, or a running variance is negative.
        """
        set_pseudo_gradient(cohort, self.aggregator)
        self._check_finite(cohort)
        check_variances(cohort.buffers, cohort.buffer_kinds, cohort.round, cohort.client_ids)
        set_local_parameters(cohort, self.aggregator)
        set_statistics(cohort, self.aggregator)
        check_variances(cohort.server_buffers, cohort.buffer_kinds, cohort.round)

    def server_step(self) -> None:
        """Step the server optimizer on the pseudo-gradient."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        optimizer.step()

    def weight_share(self, cohort: Cohort) -> float:
        """The cohort's part of all clients' aggregation weight: ``|S| / n`` where all weigh alike."""
        if self.centralised:
            return 1.0
        clients = range(self.data.num_clients)
        sizes = self._weights(clients, [self.plan.steps(client, self.round) for client in clients])
        return sum(sizes[client] for client in cohort.client_ids) / sum(sizes)

    def _log_costs(self, cohort: Cohort) -> None:
        self.communication = (
            Communication() if self.centralised else round_communication(cohort, self.federated_callbacks)
        )
        upload, download = total(self.communication.by_kind().values())
        self.clock.lap("other")
        seconds = self.clock.total()
        samples = self.record.finish_round(seconds, upload, download)
        costs = {
            "comm/upload_bytes": float(upload),
            "comm/download_bytes": float(download),
            "comm/exchanges": float(self.communication.exchanges),
            "time/round_s": seconds,
            "time/samples_per_s": samples / seconds,
            **{f"time/{part}_s": spent for part, spent in self.clock.seconds.items()},
        }
        self.log_numbers(costs)

    def _weights(self, clients: Sequence[int], steps: Sequence[int]) -> list[float]:
        """Aggregation weights before they are divided by their sum."""
        if self.weighting == "uniform":
            return [1.0] * len(clients)
        if self.weighting == "examples":
            return [float(self.data.num_examples(client)) for client in clients]
        return [
            self.data.samples_per_step(client) * taken for client, taken in zip(clients, steps, strict=True)
        ]

    def _executor(self, step: int) -> Executor:
        joint = [type(cb).__name__ for cb in self.federated_callbacks if cb.needs_joint_forward]
        return joint_executor(joint[0]) if joint and step == 0 else self.executor

    def _show_progress(self, step: int, of: int) -> None:
        progress = self.trainer.progress_bar_callback
        if isinstance(progress, RoundProgress):
            progress.local_step(step, of)

    def _call(self, hook: str, cohort: Cohort, *args: int) -> None:
        for callback in self.federated_callbacks:
            if getattr(type(callback), hook) is not getattr(FederatedCallback, hook):
                # What a hook draws depends on neither the executor nor on earlier draws.
                purpose = f"{type(callback).__name__}.{hook}"
                seed_global(derive_seed(self.seed, purpose, cohort.round, *args), self.device)
                getattr(callback, hook)(self.trainer, self, cohort, *args)
        self.clock.lap("callbacks")

    def _check_finite(self, cohort: Cohort) -> None:
        clients = diverged_clients(cohort, self.aggregator)
        self.record.diverged |= bool(clients)
        if clients and self.on_divergence == "error":
            raise ConfigurationError(
                f"round {cohort.round}: the update of client {clients[0]} is not finite; lower client_optimizer lr (now "
                f"{cohort.optimizer.param_groups[0]['lr']:g}), or set model.on_divergence: record to go on"
            )
