"""Federated LightningModule: ``training_step`` is one communication round."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from fl_lightning.aggregation import Aggregator, Domain, StatisticsAggregator, WeightedMean
from fl_lightning.batch_norm.layers import batch_norm_layers, refuse_synchronised, set_momentum
from fl_lightning.batch_norm.swapping import evaluating, overriding_train, restore_batch_norm
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.client_data.loaders import check_evaluated
from fl_lightning.clients import ClientTask, Task, task_of
from fl_lightning.clients.metrics import MetricSetting, check_names, keep_states_apart, make_metrics
from fl_lightning.clients.task import ClientSettings
from fl_lightning.clients.tasks import check_quality
from fl_lightning.clients.unsaved import check_unsaved
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.errors import ConfigurationError, check_choice, stopped
from fl_lightning.execution.base import Compilation, Executor
from fl_lightning.execution.choice import ExecutorChoice, choose_executor
from fl_lightning.execution.compiling import decide
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.models.checks import check_model
from fl_lightning.models.dropout import convert_dropout
from fl_lightning.models.weights import load_weights
from fl_lightning.optimizers.checks import check_server_optimizer
from fl_lightning.optimizers.client_lr import LRSchedule
from fl_lightning.optimizers.settings import OptimizerCallable
from fl_lightning.randomness import isolated
from fl_lightning.recorded import Recorded
from fl_lightning.round import hooks
from fl_lightning.round.against_copies import compare_with_copies
from fl_lightning.round.combinations import check_together
from fl_lightning.round.context import RunContext
from fl_lightning.round.evaluation_loop import EvaluationLoop
from fl_lightning.round.failures import ClientFailures
from fl_lightning.round.first_steps import check_first_steps
from fl_lightning.round.plan import RoundPlan, Weighting, check_local_work, cohort_size, require_clients
from fl_lightning.round.policy import declared_parts
from fl_lightning.round.record import RunRecord
from fl_lightning.round.round import communication_round, skip_round
from fl_lightning.round.saved_run import restore_run, save_run
from fl_lightning.round.survivors import RoundSkipped
from fl_lightning.round.trained import refuse_trained
from fl_lightning.round.trainer_checks import check_trainer


class FederatedModule(Recorded, RunContext):
    """LightningModule for federated learning, in which an epoch is one communication round.

    A round is FedAvg (McMahan et al. 2017, Algorithm 1) with a server optimizer that takes a step
    on the pseudo-gradient (FedOpt, Reddi et al. 2021). The server optimizer ``SGD(lr=1)`` gives
    FedAvg, and ``SGD(lr=1, momentum=0.9)`` gives FedAvgM. ``FedAdam`` and ``FedYogi`` have no bias
    correction, unlike torch's ``Adam``.

    Rounds count from 1, and ``max_epochs`` is the number of rounds. ``state_dict()`` contains
    exactly the server model's state. Methods are callbacks, see
    :class:`~fl_lightning.methods.callback.FederatedCallback`.

    Args:
        model: The server's model; every client trains a copy. A LightningModule with a
            ``training_step`` brings its own loss, metrics and optimizer, see
            docs/lightning-module.md. A :class:`~fl_lightning.clients.task.ClientTask` is a model with
            a loss or an evaluation of your own.
        client_optimizer: Function that makes the client optimizer from parameters. The function is
            called in each round. A LightningModule with a ``training_step`` has no such argument:
            its ``configure_optimizers`` is used.
        server_optimizer: Function that makes the server optimizer. Default: ``SGD(lr=1)``.
        local_steps: Number E of local steps of each client in a round. Set either ``local_steps``
            or ``local_epochs``.
        local_epochs: Number of passes over a client's data in a round.
        participation: Clients in a round, as a fraction in (0, 1] (float) or a number (int).
        cohort_sampling: With ``"fixed"``, every round has this number of clients. With ``"poisson"``, each
            client takes part with this probability, independently of the others; a round without
            clients is skipped. ``PrivateFedAvg`` needs such cohorts.
        executor: Executor of the clients' forward and backward passes. Default: chosen by
            :func:`~fl_lightning.execution.choice.choose_executor` at the start of training.
        aggregator: Rule that combines the clients' parameters. Default: ``WeightedMean``.
        statistics_aggregator: Rule that combines running statistics. Default: ``aggregator``.
        statistics_domain: Form in which running statistics are combined, such as
            ``"log_variance"``, see
            :class:`~fl_lightning.aggregation.statistics.StatisticsAggregator`.
        weighting: Aggregation weights of the clients. With ``"examples"``, weights are proportional
            to the clients' numbers of examples n_i. With ``"uniform"``, weights are equal. With
            ``"samples"``, weights are proportional to the number of samples that a client processes
            in the round. Before the local steps end, this number is an estimate.
        task: Task with its loss and metrics. Default:
            :class:`~fl_lightning.clients.tasks.Classification`.
        metrics: Further metrics by name: torchmetrics classes, functions that make a metric, or
            metric objects. Metrics that require ``num_classes`` get the data's number of classes.
            ``None`` for the names ``sensitivity``, ``specificity``, ``calibration`` and ``auroc``.
        loss: Loss of (outputs, targets), averaged over the batch. A loss must not have trainable
            parameters of its own. Default: the task's loss.
        client_lr_schedule: Function of (round, planned rounds) that returns a factor for the client
            learning rate. Default: the factor 1.
        parameter_groups: Client optimizer settings by parameter group. The groups are
            ``batch_norm``, ``scalars`` and ``bias``. The setting ``lr_scale`` multiplies the
            learning rate.
        bn_momentum: ``momentum`` of every BN layer, in (0, 1]: the weight of a new batch in the
            running statistics. Default: the model's values.
        initial_weights: File with the initial weights: a state dict, or the checkpoint of another
            run (see :func:`~fl_lightning.models.weights.load_weights`). A resumed run ignores the
            file.
        budget_epochs: Number of passes over all training data in the run, which determines the
            number of rounds. The last round may have fewer local steps.
        on_divergence: Reaction to a client's non-finite update. ``"error"`` stops the run and names
            the client. ``"record"`` continues and flags the run as diverged. ``"drop"`` leaves the
            client out of the round. With a robust aggregator, ``"error"`` and ``"record"`` react
            only to a non-finite aggregate.
        failures: Clients that drop out of rounds or take fewer local steps. Default: no failures.
        min_clients: Smallest number of clients to aggregate. With fewer clients, the round is
            skipped and the server keeps its state, unless a method adds noise.
        centralised: Whether one model trains on the union of the cohort's batches, without
            communication.
        tf32: Whether a GPU may use TF32 for convolutions and matrix products. TF32 has a precision
            of about 3 decimal digits.
        check_first_steps: Whether to compare two local steps with plain PyTorch before training,
            see :func:`~fl_lightning.round.first_steps.check_first_steps`.
        seed: Seed of participation and dropout.

    Attributes of a run, such as ``plan`` and ``record``, are described in
    :class:`~fl_lightning.round.context.RunContext`.

    Attributes:
        accept_data: Whether the data may differ from the data of the loaded checkpoint.
        executor_choice: The chosen executor and the reason; None if the user has set an executor.
        merged: Tensors that the model's ``eval()`` has changed, such as merged LoRA weights, with their
            values in training. The values are restored after the evaluation. Outside of
            evaluations, the dict is empty.

    Raises:
        ConfigurationError: A setting is invalid or contradicts another setting, or the model cannot
            be trained.

    Example:
        >>> from functools import partial
        >>> from fl_lightning.testing import blobs, fit, small_cnn
        >>> sgd = partial(torch.optim.SGD, lr=0.1)
        >>> module = FederatedModule(small_cnn(), client_optimizer=sgd, local_steps=5)
        >>> fit(module, blobs(), rounds=2).current_epoch
        2
    """

    deciding_files = ("initial_weights",)

    def __init__(
        self,
        model: nn.Module | ClientTask,
        client_optimizer: OptimizerCallable | None = None,
        server_optimizer: OptimizerCallable | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        participation: int | float = 1.0,
        cohort_sampling: Literal["fixed", "poisson"] = "fixed",
        executor: Executor | None = None,
        aggregator: Aggregator | None = None,
        statistics_aggregator: Aggregator | None = None,
        statistics_domain: Domain | None = None,
        weighting: Weighting = "examples",
        # with nn.Module in the type, the command line accepts torch's losses by class name
        loss: nn.Module | Callable[[Tensor, Tensor], Tensor] | None = None,
        task: Task | None = None,
        metrics: dict[str, MetricSetting] | None = None,
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
        super().__init__()
        client = task_of(model)
        model = client.model
        check_model(model, loss)
        if server_optimizer is not None:
            check_server_optimizer(server_optimizer, (p for p in model.parameters() if p.requires_grad))
        check_local_work(local_steps, local_epochs, budget_epochs, participation)
        if bn_momentum is not None:
            set_momentum(model, bn_momentum)
        groups = parameter_groups or {}
        client.take_settings(
            ClientSettings(client_optimizer, groups, client_lr_schedule, loss, task, metrics or {})
        )
        convert_dropout(model)
        self.automatic_optimization = False
        self.model = model
        self.client, client.run = client, self
        self.server_optimizer = server_optimizer or partial(torch.optim.SGD, lr=1.0)
        self.local_steps = local_steps
        self.local_epochs = local_epochs
        self.participation = participation
        check_choice("model.cohort_sampling", cohort_sampling, ("fixed", "poisson"))
        self.cohort_sampling = cohort_sampling
        self.executor = executor or SequentialExecutor()
        self.chooses_executor = executor is None
        self.aggregator = aggregator or WeightedMean()
        self.statistics = StatisticsAggregator(statistics_aggregator or self.aggregator, statistics_domain)
        self.weighting = weighting
        self.task, self.loss = client.task, client.loss
        self.strict_loading = client.strict_loading
        self.task_metrics = check_names(metrics or {}, self.task)
        self.client_lr_schedule = client_lr_schedule
        self.initial_weights = initial_weights
        self.budget_epochs = budget_epochs
        self.on_divergence = on_divergence
        self.failures = failures
        self.min_clients = min_clients
        self.centralised = centralised
        self.tf32 = tf32
        self.check_first_steps = check_first_steps
        self.seed = seed

        self.evaluation = client.new_evaluation()
        self.executor_choice: ExecutorChoice | None = None
        self.accept_data = False
        self.merged: dict[str, Tensor] = {}
        self._modes: dict[nn.Module, bool] = {}
        self._eval_mode = ExitStack()
        self._resumed = self._unchecked = False
        self._unsaved: dict[str, str] | None = None
        self._evaluate_every: int | None = None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the newest round, such as ``{"round": 12, "train/loss": 0.7}``."""
        return self.record.metrics

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run a communication round.

        Only the clients' forward and backward passes use autocast.
        """
        try:
            with torch.autocast(self.device.type, enabled=False):
                communication_round(self)
        except RoundSkipped as skipped:
            skip_round(self, skipped)
        except BaseException as error:
            restore_batch_norm(self.model)
            self.executor.close()
            self.data.teardown("fit")
            if isinstance(error, StopIteration):  # to Lightning, the end of training
                raise stopped(error) from error
            raise

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the server optimizer for the trainable parameters."""
        optimizer = self.server_optimizer([p for p in self.model.parameters() if p.requires_grad])
        if len(optimizer.param_groups) == 1:
            # Lightning's LearningRateMonitor then logs lr-SGD/server instead of lr-SGD
            optimizer.param_groups[0].setdefault("name", "server")
        return optimizer

    def prepare_data(self) -> None:
        """Let a LightningModule prepare its data."""
        self.client.call("prepare_data")

    def configure_callbacks(self) -> Any:
        """Return the callbacks of a LightningModule."""
        return self.client.call("configure_callbacks") or []

    def setup(self, stage: str) -> None:
        """Convert weights to the run's precision, plan rounds, and let methods replace layers."""
        # correct the rank, because Lightning uses a scheduler's rank even for separate runs
        rank_zero_only.rank = self.trainer.global_rank  # type: ignore[attr-defined]  # an attribute of the function
        if stage == "fit":
            self.evaluation.kept = {}
            check_trainer(self.trainer)
            require_clients(self.data)
            self.plan = self.make_plan(self.data)
            self.plan.check((self.aggregator, self.statistics.rule))
        budget, limit = self._asked_rounds() if stage == "fit" else (None, None)
        self.client.setup(stage, budget or limit or 1)
        hooks.extend_model(self.model, self.federated_callbacks, self.seed)
        # convert before a checkpoint is loaded, because float32 tensors would round float64 weights
        self.trainer.precision_plugin.convert_module(self)
        if self.ranks.size > 1:
            keep_states_apart(self)  # every rank has every batch
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.tf32
        self.on_validation_model_train()  # after an exception, a layer may still be in eval mode
        for layer, training in self._modes.items():
            layer.training = training
        frozen = [layer for layer in self.model.modules() if not layer.training]
        for layer in overriding_train(self.model):
            layer.train(layer.training)
        for layer in frozen:
            layer.training = False
        self._parts = None
        layers = batch_norm_layers(self.model).values()
        self.tracking_layers = [layer for layer in layers if layer.training] or list(layers)
        self.prepare_metrics()
        if stage != "fit":
            return
        for note in self.data.notes:
            self.print(note)
        if self.data.num_classes == 2 and (named := [n for n, x in self.task_metrics.items() if x is None]):
            positive = "class 1" + (f" ({self.data.class_names[1]})" if self.data.class_names else "")
            self.print(f"positive class of {', '.join(named)}: {positive}")
        restore_batch_norm(self.model)  # a failed fit may have left replaced layers in the model
        if self.ranks.size > 1:
            refuse_synchronised(self.model)
        check_together(self.federated_callbacks)
        hooks.configure_batch_norm(self, self.federated_callbacks)

    def make_plan(self, data: FederatedDataModule) -> RoundPlan:
        """Return the plan of a run on ``data``, which must be set up already."""
        size = cohort_size(data.num_clients, self.participation)
        whole = isinstance(self.participation, int)
        rate = size / data.num_clients if whole else float(self.participation)
        return RoundPlan(
            data,
            self.local_steps,
            self.local_epochs,
            size,
            self.seed,
            self.weighting,
            self.centralised,
            self.failures,
            self.min_clients,
            rate=rate if self.cohort_sampling == "poisson" else None,
        )

    def prepare_metrics(self) -> None:
        """Make the metrics of the setting ``model.metrics``."""
        classes = self.data.num_classes if self.task_metrics else None
        self.task.measured = make_metrics(self.task_metrics, classes)

    def on_fit_start(self) -> None:
        """Load the initial weights and plan the number of rounds.

        A resumed run has the weights and the number of rounds of its checkpoint.
        """
        if self.initial_weights is not None and self.total_rounds is None:
            self.print(load_weights(self.model, self.initial_weights))
        rounds = self._fix_rounds()
        joint = self.joint_method or type(self.executor).__name__
        self.client.start_fit(rounds, None if joint == "SequentialExecutor" else joint)
        self._parts = declared_parts(self.model, self.federated_callbacks, rounds)
        if not self.record.samples:
            refuse_trained(method for method in self.federated_callbacks if method.state_dict())
        hooks.open_memories(self)
        per_sample = any(method.per_sample for method in self.federated_callbacks)
        if getattr(self.data, "sampling", "epochs") == "poisson" and not per_sample:
            raise ConfigurationError(
                "data.sampling: poisson draws batches of any size, some of them empty; add PrivateSGD to trainer.callbacks (clip: .inf and "
                "noise: 0 train without privacy), or leave data.sampling out"
            )
        self.client.slots = StateSlots(self.model)
        self.data.keep_on(self.device)
        self._prepare_executor(rounds)
        self.tracking_layers = [x for x in batch_norm_layers(self.model).values() if x.training]
        self._modes = {layer: layer.training for layer in self.modules()}
        self._cohort = None

    def _prepare_executor(self, rounds: int) -> None:
        """Choose the executor, and decide whether it compiles."""
        usual = self.plan.usual()
        clients, steps = usual.trained(1)
        if self.chooses_executor:
            self.executor.close()  # a failed fit may not have closed the executor
            alone = self.client.one_by_one
            reason = f"one client after the other: {alone} of {type(self.model).__name__}"
            self.executor_choice = (
                ExecutorChoice(SequentialExecutor(), reason)
                if alone
                else choose_executor(self.client, len(clients))
            )
            self.executor = self.executor_choice.executor
        setting = self.executor.compile if isinstance(self.executor, SequentialExecutor) else False

        def decided() -> Compilation:
            return decide(
                setting,
                self.client,
                rounds * sum(steps),
                lambda: self.planned_batches(usual, clients[:1], 0).batches()[0],
                self.record.compiled,
            )

        choices = self.ranks.exchange(decided)
        # if one rank cannot compile, no rank compiles
        self.executor.compilation = next((choice for choice in choices if not choice.compiled), choices[0])
        self.record.compiled = self.executor.compilation.compiled

    def on_train_start(self) -> None:
        """Check metrics and outputs, and record digests of the data."""
        row = self.record.metrics if self.record.metrics.get("round") == 0 else {}
        check_quality(self.task, row, self.data.fit_split)
        self.client.start_training()
        self.record.data = self.record.data or self.data.fingerprint()
        self._unchecked = self.check_first_steps

    def on_train_epoch_start(self) -> None:
        """Check the first local steps, and request an evaluation in the last round."""
        self.client.start_round()
        if self._unchecked:  # not earlier, because steps may read what on_train_epoch_start sets
            self.ranks.exchange(self._check_first_steps)
            self._unchecked = False
        self.client.forget_steps()
        if self.round == self.trainer.max_epochs and self.trainer.check_val_every_n_epoch:
            self._evaluate_every = self.trainer.check_val_every_n_epoch
            self.trainer.check_val_every_n_epoch = 1

    def on_train_epoch_end(self) -> None:
        """Pass the round's metrics to the loggers. Lightning saves a checkpoint afterwards."""
        values, shown = self.client.end_round()
        if self.client.logs_itself:
            self.ranks.agree(lambda: {"logged values": values}, f"round {self.round}")
        for is_shown in (False, True):
            self.log_numbers({n: x for n, x in values.items() if (n in shown) == is_shown}, is_shown)
        self.record.write(self.record.finish_line(self.round), self.trainer.loggers)

    def on_fit_end(self) -> None:
        """Restore the train mode and the original forward pass of the BN layers."""
        self.client.call("on_fit_end")
        for layer in self.tracking_layers:
            layer.train()
        self._modes = {}
        restore_batch_norm(self.model)
        self.executor.close()

    def teardown(self, stage: str) -> None:
        """Restore the train mode, and ``check_val_every_n_epoch``, which the last round may change."""
        self.on_validation_model_train()
        self.client.teardown(stage)
        if self._evaluate_every is not None:
            self.trainer.check_val_every_n_epoch, self._evaluate_every = self._evaluate_every, None

    def _asked_rounds(self) -> tuple[int | None, int | None]:
        """Return the rounds of ``model.budget_epochs``, and of ``trainer.max_epochs``."""
        limit = self.trainer.max_epochs
        budget = self.plan.limit(self.budget_epochs) if self.budget_epochs is not None else None
        return budget, None if limit == -1 else limit

    def _fix_rounds(self) -> int:
        """Set and return the planned number of rounds. A resumed run keeps the number."""
        trainer = self.trainer
        if not self._resumed and not trainer.current_epoch:
            # discard the totals of an earlier fit of this module
            self.total_rounds, self.record = None, RunRecord()
        self._resumed = False
        budget, limit = self._asked_rounds()
        planned = self.total_rounds or budget or limit
        if planned is None:
            raise ConfigurationError("trainer.max_epochs: set the number of rounds, or model.budget_epochs")
        self.total_rounds = planned
        if budget is not None and (limit is None or limit > budget):
            trainer.fit_loop.max_epochs = budget
        elif limit is not None and limit > planned:
            self.print(
                f"Training continues to round {limit}. The run was planned for {planned} rounds: freeze rounds and "
                "learning-rate milestones stay as planned."
            )
        return planned

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the planned number of rounds, the run's record and the methods' client state."""
        save_run(self, checkpoint, self.merged)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the planned number of rounds and the run's record.

        Raises:
            ConfigurationError: The data differ, or no FederatedModule wrote the checkpoint.
        """
        state = restore_run(self, checkpoint, self._trainer, accept_data=self.accept_data)
        self._resumed = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
        self._parts, self._unsaved = state["parts"], state["unsaved"]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # passed on
        """Return the state of the server model. Other state of this module is not included."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a server model's state.

        Raises:
            ConfigurationError: Tensors that the loaded checkpoint leaves out differ from those of
                the checkpoint's run.
        """
        result = self.model.load_state_dict(state_dict, strict=strict, assign=assign)
        known, self._unsaved = self._unsaved, None
        if known is not None and not strict:
            check_unsaved(self.model, state_dict, known)
        return result

    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]  # keywords only
        """Log a metric of this round. A later value replaces an earlier value.

        Args:
            name: Metric name, such as ``"bn/drift"``.
            value: A number, a one-element tensor or a torchmetrics metric.
            kwargs: Arguments of ``LightningModule.log``. In ``fit``, ``logger`` defaults to False,
                because loggers get all metrics at the end of a round.
        """
        logger = False if self.trainer.state.fn == TrainerFn.FITTING else None
        self.record.add(name, value)
        # log_dict passes None for arguments that are not given
        given = {key: setting for key, setting in kwargs.items() if setting is not None}
        defaults = {"on_step": False, "on_epoch": True, "batch_size": 1, "logger": logger}
        # without sync_dist, Lightning prints a warning
        super().log(name, value, **{**defaults, **given, "sync_dist": True})

    def forward(self, inputs: Any) -> Any:
        """Return the server model's outputs."""
        return self.model(inputs)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Evaluate the server model on a batch of evaluation data."""
        with isolated():
            return self.client.evaluate_in_loop(batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Evaluate the server model on a batch of test data."""
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the server model's outputs on a batch."""
        return self.client.predict(batch, batch_idx, dataloader_idx)

    def on_validation_model_eval(self) -> None:
        """Set the module to eval mode."""
        merged = self._eval_mode.enter_context(evaluating(self))
        self.merged = {name.removeprefix("model."): value for name, value in merged.items()}

    def on_validation_model_train(self) -> None:
        """Restore the train mode, and tensors that ``eval()`` has changed."""
        self._eval_mode.close()
        self.merged = {}

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_validation_model_train

    def refuse_merged(self, user: str, tensors: Mapping[str, Tensor]) -> None:
        """Check that an evaluation with other weights has no layer that has merged the server's.

        Raises:
            ConfigurationError: ``eval()`` has changed the model, and ``tensors`` has other
                parameters than the server.
        """
        for name, value in self.model.named_parameters() if self.merged else ():
            if name in tensors and not torch.equal(tensors[name].to(value), value):
                raise ConfigurationError(
                    f"{user}: eval() changes {next(iter(self.merged))!r} of the model {type(self.model).__name__}, which would be "
                    f"evaluated without the other {name!r} of {user}; use layers that merge no weights in eval()"
                )

    def on_train_batch_end(self, *_: Any) -> None:
        """Seed what loaders of evaluation data draw when their iteration starts."""
        self.seed_evaluation_data()

    def on_validation_epoch_start(self) -> None:
        """Start an evaluation of the server model."""
        self.seed_evaluation_data()
        self._loop = EvaluationLoop(self)

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the evaluation. An evaluation before training is logged as round 0."""
        metrics = self._loop.finish(self.data.fit_split)
        if self.trainer.sanity_checking:
            line = {**self.record.finish_line(0), **metrics}
            if self.trainer.num_sanity_val_steps == float("inf") and not self.trainer.global_step:
                self.record.write(line, self.trainer.loggers)
        else:
            self._loop.log(metrics)

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._loop.log(self._loop.finish("test"))

    def on_predict_epoch_end(self) -> None:
        """Check that all batches have predictions."""
        loop = self.trainer.predict_loop
        check_evaluated(loop.batch_progress.current.completed, sum(loop.max_batches))

    def _check_first_steps(self) -> None:
        self.client.trial()
        if not self.client.uses_copies:
            check_first_steps(self)
            return
        alone = type(self.executor) is SequentialExecutor and self.joint_method is None
        if alone and not self.executor.compilation.compiled:
            return  # this is what would be compared with
        try:
            compare_with_copies(self)
        except ConfigurationError as error:
            if alone or not self.chooses_executor or self.joint_method is not None:
                raise
            self.print(f"clients one after the other: {error}")
            self.executor = SequentialExecutor()
