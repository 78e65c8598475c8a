"""The server: its model and optimizer, its evaluation, the metrics of each round and what a checkpoint keeps of them."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.cohort.client_memory import locate, saved
from fl_lightning.errors import ConfigurationError
from fl_lightning.optimizers import OptimizerCallable
from fl_lightning.optimizers.checks import check_server_optimizer
from fl_lightning.ranks import Ranks
from fl_lightning.recorded import Recorded
from fl_lightning.round.clock import RoundClock
from fl_lightning.round.evaluation import ServerEvaluation
from fl_lightning.round.label_weights import LabelWeights, ignored_label
from fl_lightning.round.outputs import OutputCheck
from fl_lightning.round.plan import RoundPlan
from fl_lightning.round.record import RunRecord, check_data
from fl_lightning.round.tasks import Classification, Task


class ServerModule(Recorded, L.LightningModule):
    """A model that a server holds, evaluates and reports on: what a federated module is apart from its rounds.

    Args:
        model: The server's model.
        server_optimizer: Makes the server optimizer from parameters. Default: ``SGD(lr=1)``.
        loss: Loss of (outputs, targets), averaged over the batch, which may weigh labels and ignore some. Default: that of the task.
        task: What is learnt: the loss and the metrics. Default: classification.
        tf32: Whether a GPU may compute float32 convolutions and matrix products in TF32.

    Attributes:
        total_rounds: Number of rounds planned at round 1, None before.
        record: What the run has logged and counted.
        clock: Where the time of the round goes.
        accept_data: Whether a run may go on, or be evaluated, with other data than those of its checkpoint, False by default.

    Raises:
        ConfigurationError: The model is scripted, has no trainable parameters, or the optimizer cannot step them.
    """

    def __init__(
        self,
        model: nn.Module,
        server_optimizer: OptimizerCallable | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        tf32: bool = False,
        task: Task | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"model: torch.jit.script hides the layers of {model.original_name}; give the model itself"
            )
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable:
            raise ConfigurationError(f"model: {type(model).__name__} has no trainable parameters")
        if server_optimizer is not None:
            check_server_optimizer(server_optimizer, trainable)
        self.model = model
        self.server_optimizer = server_optimizer or partial(torch.optim.SGD, lr=1.0)
        self.tf32 = tf32
        self.total_rounds: int | None = None
        self.accept_data = self._resumed = False
        self._evaluate_every: int | None = None
        self.task = task or Classification(-100 if (label := ignored_label(loss)) is None else label)
        self.loss = loss or self.task.loss
        self.label_weights = LabelWeights(loss)
        self.clock, self.record, self.evaluation = RoundClock(), RunRecord(), ServerEvaluation()
        self.output_check = OutputCheck(type(self).evaluate_batch is ServerModule.evaluate_batch)

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
        """The processes of the run; one where the trainer has another strategy than this project's."""
        return getattr(self.trainer.strategy, "ranks", Ranks())

    @property
    def round(self) -> int:
        """The communication round under way, from 1."""
        return self.trainer.current_epoch + 1

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the newest round, such as ``{"round": 12, "train/loss": 0.7, "val/accuracy": 0.8}``."""
        return self.record.metrics

    @property
    def planned_rounds(self) -> int:
        """Number of rounds that was planned at round 1: what fractions of a run refer to."""
        assert self.total_rounds is not None
        return self.total_rounds

    def fix_rounds(self, plan: RoundPlan, budget_epochs: float | None) -> int:
        """Fix the number of rounds when training starts; a resumed run keeps what was planned at round 1.

        Args:
            plan: The plan of the run.
            budget_epochs: The run's budget, see :meth:`~fl_lightning.round.plan.RoundPlan.limit`.

        Returns:
            The planned number of rounds.

        Raises:
            ConfigurationError: Neither the trainer nor the budget says how many.
        """
        trainer = self.trainer
        if not self._resumed and not trainer.current_epoch:  # an earlier fit planned and counted its own run
            self.total_rounds, self.record = None, RunRecord()
        self._resumed = False
        limit = None if trainer.max_epochs in (None, -1) else trainer.max_epochs
        budget = plan.limit(budget_epochs) if budget_epochs is not None else None
        planned = self.total_rounds or budget or limit
        if planned is None:
            raise ConfigurationError("trainer.max_epochs: set the number of rounds, or model.budget_epochs")
        self.total_rounds = planned
        if budget is not None and (limit is None or limit > budget):
            trainer.fit_loop.max_epochs = budget
        elif limit is not None and limit > planned:
            self.print(
                f"Training goes on to round {limit}. The run was planned for {planned} rounds: freeze rounds and "
                "learning-rate milestones stay as planned."
            )
        return planned

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The server optimizer; it sees trainable parameters only, never statistics."""
        return self.server_optimizer([p for p in self.model.parameters() if p.requires_grad])

    def setup(self, stage: str) -> None:
        """Convert the weights to the run's precision, and say for this process whether CUDA may compute in TF32."""
        # Lightning believes the environment, where a scheduler numbers runs that know nothing of each other
        rank_zero_only.rank = self.trainer.global_rank  # type: ignore[attr-defined]  # an attribute of the function
        # Lightning converts after it has loaded a checkpoint: a float64 checkpoint would pass through float32.
        self.trainer.precision_plugin.convert_module(self)
        if self.ranks.size > 1:
            for metric in (child for child in self.modules() if isinstance(child, Metric)):
                metric.sync_on_compute = metric._to_sync = False  # every rank updates it with every batch
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.tf32

    def teardown(self, stage: str) -> None:
        """Give back how often the trainer evaluates."""
        if self._evaluate_every is not None:
            self.trainer.check_val_every_n_epoch, self._evaluate_every = self._evaluate_every, None

    def server_step(self) -> None:
        """Step the server optimizer on the pseudo-gradient."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
        optimizer.step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what the run has planned and counted, and what methods keep of clients."""
        checkpoint["callbacks"] = saved(checkpoint.get("callbacks", {}), self.trainer.global_step)
        checkpoint["fl_lightning"] = {"total_rounds": self.total_rounds, "record": self.record.state_dict()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up what the run had planned and counted.

        Raises:
            ConfigurationError: The data are not those of the checkpoint (:func:`~fl_lightning.round.record.check_data`), or a module of another kind wrote the checkpoint.
        """
        state = checkpoint.get("fl_lightning")
        if state is None:
            raise ConfigurationError("ckpt_path: the checkpoint was not written by a FederatedModule")
        self._resumed = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
        locate(checkpoint.get("callbacks"), self._trainer and self._trainer.ckpt_path)
        self.total_rounds = state["total_rounds"]
        self.record = RunRecord()
        self.record.load_state_dict(state["record"])
        if self._trainer is not None:
            check_data(self, checkpoint["global_step"])

    def on_train_start(self) -> None:
        """Keep what the data of the run are, for its checkpoints; and check the model's outputs where no evaluation has."""
        self.output_check.before_training(self)
        self.record.data = self.record.data or self.data.fingerprint()

    def on_train_epoch_start(self) -> None:
        """Let the last round be evaluated, however rarely others are: the result is the last point of the curve."""
        if self.round == self.trainer.max_epochs and self.trainer.check_val_every_n_epoch:
            self._evaluate_every = self.trainer.check_val_every_n_epoch
            self.trainer.check_val_every_n_epoch = 1

    def on_train_epoch_end(self) -> None:
        """Write the round's metrics, before any checkpoint of the round."""
        self.record.write(self.record.finish_line(self.round), self.trainer.loggers)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # passed on
        """Exactly the server model's state."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a server model's state."""
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]  # keywords only
        """Log a metric of this round: its line in the metrics holds the last value of each name.

        Args:
            name: Metric name, such as ``"bn/drift"``.
            value: A number, a one-element tensor or a torchmetrics metric.
            kwargs: As for ``LightningModule.log``; in ``fit`` the loggers get the line, so ``logger`` is False there.
        """
        logger = False if self.trainer.state.fn == TrainerFn.FITTING else None
        self.record.add(name, value)
        given = {key: setting for key, setting in kwargs.items() if setting is not None}  # log_dict gives all
        defaults = {"on_step": False, "on_epoch": True, "batch_size": 1, "logger": logger}
        super().log(name, value, **{**defaults, **given, "sync_dist": True})  # or Lightning warns

    def log_numbers(self, metrics: Mapping[str, float], prog_bar: bool = False) -> None:
        """Log numbers of this round without the bookkeeping of :meth:`log` over steps and devices, which takes longer.

        Args:
            metrics: Numbers by metric name, for the round's metrics and ``trainer.callback_metrics``.
            prog_bar: Whether progress bars show them.
        """
        for name, value in metrics.items():
            self.record.add(name, value)
        self.trainer.callback_metrics.update(
            zip(metrics, torch.tensor([*metrics.values()]).unbind(), strict=True)
        )
        if prog_bar:
            self.trainer.progress_bar_metrics.update(metrics)

    def on_device(self, batch: Any) -> Any:
        """A batch on this module's device and in the run's precision."""
        return self.trainer.precision_plugin.convert_input(move_data_to_device(batch, self.device))

    def forward(self, inputs: Any) -> Any:
        """The server model's outputs."""
        return self.model(inputs)

    def evaluate_batch(self, batch: Any, evaluation: ServerEvaluation) -> None:
        """Add the model's outputs on a batch to an evaluation: override it where a batch is not ``(inputs, targets)``.

        One rank calls it with a batch, and nothing but the evaluation tells the others; metrics of your own belong into
        ``validation_step``, which sees all batches.
        """
        inputs, targets = batch
        self.output_check.check(self, outputs := self.model(inputs), targets)
        loss = self.loss(outputs, targets)
        targets, weights = self.label_weights.of(outputs, targets, self.task.ignored)
        evaluation.update(outputs, targets, loss, self.task, weights)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate the server model on a batch of evaluation data."""
        with isolate_rng():
            self.evaluation.divide(self, batch, batch_idx, self.evaluate_batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate the server model on a batch of test data."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The server model's outputs on a batch."""
        return self.model(batch[0] if isinstance(batch, list | tuple) else batch)

    def on_validation_epoch_start(self) -> None:
        """Start an evaluation."""
        self._evaluation_started = time.perf_counter()
        self.label_weights.forget()
        self.evaluation.start()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log the evaluation; before training, as row 0."""
        metrics = self._evaluated(self.data.fit_split)
        if self.trainer.sanity_checking:
            line = {**self.record.finish_line(0), **metrics}
            if self.trainer.num_sanity_val_steps == float("inf") and not self.trainer.global_step:
                self.record.write(line, self.trainer.loggers)
        else:
            self.log_dict(metrics, prog_bar=True)
            if self.trainer.state.fn == TrainerFn.FITTING:
                self.log_numbers({"time/evaluation_s": time.perf_counter() - self._evaluation_started})

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self.log_dict(self._evaluated("test"), prog_bar=True)

    def _evaluated(self, prefix: str) -> dict[str, float]:
        metrics = self.evaluation.finish()
        self.record.diverge(self.trainer.global_step, self.evaluation.diverged)
        return {f"{prefix}/{name}": value for name, value in metrics.items()}
