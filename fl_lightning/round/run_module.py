"""A run of communication rounds: how many there are, what it refuses, what a checkpoint keeps."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn

from fl_lightning.aggregation import Aggregator
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.batch_norm.swapping import restore_batch_norm
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.errors import ConfigurationError
from fl_lightning.executors.base import Executor
from fl_lightning.executors.choice import Choice, choose_executor
from fl_lightning.optimizers.client import OptimizerCallable
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.round.plan import RoundPlan, cohort_size
from fl_lightning.round.policy import resolve_policy
from fl_lightning.round.record import RunRecord
from fl_lightning.round.server import ServerModule
from fl_lightning.round.trainer import allow_tf32, check_trainer


class RunModule(ServerModule):
    """A server and the plan of its rounds: what a federated module is apart from the round itself.

    Attributes:
        plan: Who takes part in which round, with how many local steps; known from ``setup("fit")`` on.
        total_rounds: Number of rounds planned at round 1, None before.
        slots: Where a client's state hangs in the model; known from the start of training on.
    """

    server_optimizer: OptimizerCallable
    aggregator: Aggregator
    centralised: bool
    local_steps: int | None
    local_epochs: int | None
    participation: int | float
    budget_epochs: float | None
    executor: Executor
    chooses_executor: bool
    executor_choice: Choice | None = None
    seed: int
    client_loss: Callable[[Any], torch.Tensor]
    plan: RoundPlan
    slots: StateSlots
    total_rounds: int | None = None
    _cohort: Cohort | None = None
    tf32: bool
    _resumed = False
    _tf32_before: tuple[bool, bool] | None = None

    @property
    def planned_rounds(self) -> int:
        """Number of rounds that was planned at round 1: what fractions of a run refer to."""
        assert self.total_rounds is not None
        return self.total_rounds

    @property
    def federated_callbacks(self) -> list[FederatedCallback]:
        """The methods that are active in this run."""
        return [cb for cb in self.trainer.callbacks if isinstance(cb, FederatedCallback)]  # type: ignore[attr-defined]  # set in a helper of the trainer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The server optimizer; it sees trainable parameters only, never statistics."""
        return self.server_optimizer([p for p in self.model.parameters() if p.requires_grad])

    def setup(self, stage: str) -> None:
        """Prepare what depends on the trainer: the plan of local work."""
        # Lightning converts after it has loaded a checkpoint: a float64 checkpoint would pass through float32.
        self.trainer.precision_plugin.convert_module(self)
        if self._tf32_before is None:
            self._tf32_before = allow_tf32(self.tf32, self.tf32)
        if stage != "fit":
            return
        check_trainer(self.trainer)
        if self.data.num_clients == 0:
            raise ConfigurationError(
                f"data: {type(self.data).__name__} has no clients; pass clients=[...], or name a data set such as Digits"
            )
        size = cohort_size(self.data.num_clients, self.participation)
        if not self.centralised:
            self.aggregator.check(size)
        self.plan = RoundPlan(self.data, self.local_steps, self.local_epochs, size, self.seed)

    def teardown(self, stage: str) -> None:
        """Give back what other code on this device was allowed."""
        if self._tf32_before is not None:
            allow_tf32(*self._tf32_before)
            self._tf32_before = None

    def on_fit_start(self) -> None:
        """Fix the number of rounds at round 1; a resumed run keeps it."""
        if not self._resumed and not self.trainer.current_epoch:
            self.total_rounds, self.record = (
                None,
                RunRecord(),
            )  # an earlier fit planned and counted its own run
        self._resumed = False
        limit = self.trainer.max_epochs
        rounds = self.plan.limit(self.budget_epochs) if self.budget_epochs is not None else None
        if self.total_rounds is None:
            self.total_rounds = rounds or limit
            if self.total_rounds is None or self.total_rounds < 0:
                raise ConfigurationError(
                    "trainer.max_epochs: set the number of rounds, or model.budget_epochs"
                )
        elif limit is not None and limit > self.total_rounds and rounds is None:
            self.print(
                f"Training goes on to round {limit}. The run was planned for {self.total_rounds} rounds: freeze rounds and "
                "learning-rate milestones stay as planned."
            )
        if rounds is not None and (limit is None or limit < 0 or limit > rounds):
            self.trainer.fit_loop.max_epochs = rounds
        for round_number in range(1, self.total_rounds + 1):
            resolve_policy(self.federated_callbacks, round_number, self.total_rounds)
        self.slots = StateSlots(self.model)
        self.data.keep_on(self.device)
        if self.chooses_executor:
            self.executor.close()  # of a fit that an error ended
            self.executor_choice = choose_executor(self, 1 if self.centralised else self.plan.cohort_size)
            self.executor = self.executor_choice.executor
            logging.getLogger("fl_lightning").info("executor: %s", self.executor_choice)
        # A BN layer that the user has put in eval mode stays there.
        self._batch_norm_in_training = [x for x in batch_norm_layers(self.model).values() if x.training]
        self._cohort = None

    def on_fit_end(self) -> None:
        """Give the BN layers back as they came: in training mode, with their own forward pass."""
        for layer in self._batch_norm_in_training:
            layer.train()
        restore_batch_norm(self.model)
        self.executor.close()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what the run has planned and counted."""
        checkpoint["fl_lightning"] = {"total_rounds": self.total_rounds, "record": self.record.state_dict()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up what the run had planned and counted."""
        state = checkpoint.get("fl_lightning")
        if state is None:
            raise ConfigurationError("ckpt_path: the checkpoint was not written by a FederatedModule")
        self._resumed = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
        self.total_rounds = state["total_rounds"]
        self.record.load_state_dict(state["record"])
