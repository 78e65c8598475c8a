"""A LightningModule of the user's own, whose training step clients take."""

import inspect
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from fl_lightning.batch_norm.kinds import moved_by_steps
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.client_data.batches import BatchStack, copied
from fl_lightning.clients.changes import add_to_lists
from fl_lightning.clients.client_trainer import ClientTrainer, refuse
from fl_lightning.clients.configured_optimizer import ConfiguredOptimizer
from fl_lightning.clients.copies import ClientCopy, Copies, Traces, hooks_of_layers, whole_copy
from fl_lightning.clients.copies_optimizer import CopiesOptimizer
from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.clients.log_collector import LogCollector
from fl_lightning.clients.logged_values import LoggedValues
from fl_lightning.clients.metric_states import MetricObjects, MetricStates
from fl_lightning.clients.module_evaluation import ModuleEvaluation, _ModuleTask
from fl_lightning.clients.server_tensors import ServerTensors
from fl_lightning.clients.task import ClientSettings, ClientTask
from fl_lightning.clients.trial import moved_in_trial
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.errors import CannotVectorize, ConfigurationError, doing
from fl_lightning.optimizers.checks import check_elementwise
from fl_lightning.optimizers.settings import OptimizerCallable
from fl_lightning.randomness import derive_seed, isolated, seeded

_NEVER_CALLED = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step",
    "on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step",
    "on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad",
    "on_test_model_eval", "on_test_model_train", "on_predict_model_eval", "on_predict_model_train",
)  # fmt: skip
_BY_CLIENT = ("on_train_batch_start", "on_train_batch_end")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_PASSED_ON = (
    "on_train_end", "on_predict_start", "on_predict_epoch_start", "on_predict_batch_start",
    "on_predict_batch_end", "on_predict_epoch_end", "on_predict_end",
)  # fmt: skip
"""Hooks that Lightning calls on its own module, and at the right places for a client's module."""


class Told(NamedTuple):
    """Values of one client in a round.

    Attributes:
        values: The logged values.
        metrics: The states of metric objects.
        added: What the client has appended to lists of the module, by their names.
    """

    values: LoggedValues
    metrics: MetricStates
    added: dict[str, list[Any]]


def trains_itself(model: nn.Module) -> bool:
    """Return whether a model is a LightningModule with a ``training_step``."""
    module: Any = getattr(model, "_orig_mod", model)  # torch.compile wraps the model
    base = _base_of(type(module))
    return base is not None and type(module).training_step is not base.training_step


def _base_of(kind: Any) -> Any:
    # compare names: the package pytorch_lightning has the same class once more
    return next((each for each in kind.__mro__ if each.__name__ == "LightningModule"), None)


class LightningModuleTask(ClientTask):
    """A LightningModule whose hooks are called at the places of a round.

    Args:
        model: The user's module, which is the server's model.

    Attributes:
        module: The user's module.
        local_step: The current local step of the round, from 0.
        steps_taken: Local steps of the round that the optimizers have taken.
        local_steps: Local steps of a round, of the client with the most local steps.
        rounds: Planned number of rounds.
        metrics: The module's metric objects.
        transfers: Whether the module changes batches on their way to the device.
        by_client: What steps of this round have logged.

    Raises:
        ConfigurationError: The module overrides a hook that would never be called, or optimizes
            manually.
    """

    rate = "the lr of configure_optimizers"
    logs_itself = uses_copies = True

    def __init__(self, model: nn.Module) -> None:
        module: Any = model
        name = type(module).__name__
        if (compiled := getattr(model, "_orig_mod", None)) is not None:
            raise ConfigurationError(
                f"model: torch.compile hides the hooks of {type(compiled).__name__}; give the module itself, with "
                "SequentialExecutor(compile=True)"
            )
        super().__init__(model)
        self.module, self._base = module, _base_of(type(module))
        if not module.automatic_optimization:
            raise ConfigurationError(
                f"model: {name} sets automatic_optimization = False; return the loss from training_step, as "
                "clients' optimizers take the steps"
            )
        for hook in _NEVER_CALLED:
            if self.overrides(hook):
                raise ConfigurationError(
                    f"model: {name}.{hook} would never be called, as an executor computes the clients' gradients; use a method's "
                    "on_after_local_backward, or leave it out"
                )
        self.one_by_one = next(filter(self.overrides, _BY_CLIENT), None)
        self.transfers = any(map(self.overrides, _TRANSFER))
        self.strict_loading, self.has_test = module.strict_loading, self.overrides("test_step")
        self.predicts = self.overrides("predict_step")
        self.metrics = MetricObjects(module)
        self.local_step, self.steps_taken, self.local_steps, self.rounds = 0, 0, 1, 1
        self.by_client: dict[int, LoggedValues] = {}
        self.logs = LogCollector(self)
        self._pooled: MetricStates = {}
        self._ended: dict[int, tuple[Any, Any]] = {}
        self._configured: ConfiguredOptimizer | None = None
        self._copy: ClientCopy | None = None
        self._moved: list[str] = []
        self._own_hooks: list[Any] = []
        self._tried = False
        self._part: Any = None
        self._copies: dict[int, Copies] = {}
        self._servers: dict[int, ServerTensors] = {}
        self._traces: Traces | None = None
        self._at_once = False

    def take_settings(self, given: ClientSettings) -> None:
        """Refuse settings that the module decides.

        Raises:
            ConfigurationError: A setting is given.
        """
        for setting in (name for name, value in given._asdict().items() if value):
            raise ConfigurationError(
                f"{setting}: {type(self.module).__name__} has a training_step and a configure_optimizers of its own, which "
                "decide this; leave the setting out"
            )
        self.optimizer, self.task, self.loss = self.make_optimizer, _ModuleTask(), self.module.training_step

    def overrides(self, hook: str) -> bool:
        """Return whether the module overrides a hook of Lightning."""
        return getattr(type(self.module), hook, None) is not getattr(self._base, hook, None)

    @property
    def configured(self) -> ConfiguredOptimizer:
        """The client optimizer. The first use calls ``configure_optimizers``."""
        if self._configured is None:
            self._configured = ConfiguredOptimizer(self.module)
        return self._configured

    @property
    def group_of(self) -> Mapping[str, str]:
        """Parameter group of each parameter."""
        return self.configured.groups

    @property
    def optimizer_in_use(self) -> Optimizer:
        """The optimizer of the client whose step is computed, else that of the server's module."""
        own = self._copy and self._copy.optimizer
        template = self.configured.template
        return own or (cast(Optimizer, _Settings(template)) if self._at_once else template)

    def make_optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Return a new client optimizer, with the defaults of the module's optimizer."""
        return self.configured.make(parameters)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint what ``load_from_checkpoint`` of the module's class needs."""
        if self.module.hparams:
            checkpoint[self.module.CHECKPOINT_HYPER_PARAMS_KEY] = self._plain
            checkpoint[self.module.CHECKPOINT_HYPER_PARAMS_NAME] = self.module._hparams_name
        checkpoint["moved_by_steps"] = self._moved
        self.module.on_save_checkpoint(checkpoint)

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load the names of the parameters that steps move, and call ``on_load_checkpoint``."""
        self._moved, self._tried = checkpoint["moved_by_steps"], True
        self.call("on_load_checkpoint", checkpoint)

    def attach(self, rounds: int) -> None:
        """Give the module its trainer, and collect what it logs."""
        run, self.rounds = self.run, rounds
        self._configured, self.logs = None, LogCollector(self)
        self._plain = {name: value for name, value in self.module.hparams.items() if _is_plain(value)}
        others = [name for name in self.module.hparams if name not in self._plain]
        if others and run.trainer.state.fn == "fit":
            run.print(
                f"checkpoints leave out the hyperparameters {', '.join(others)} of {type(self.module).__name__}, which are no plain values; "
                "give them to load_from_checkpoint"
            )
        for hook in filter(self.overrides, _PASSED_ON):
            vars(run)[hook] = getattr(self.module, hook)
        for hook in filter(self.overrides, _TRANSFER):
            own = getattr(self.module, hook)
            # Lightning's own training batch stands for a round
            vars(run)[hook] = lambda batch, *given, own=own: (
                batch if run.trainer.training else own(batch, *given)
            )
        self.module.trainer = ClientTrainer(run, self)  # acts as a trainer
        # plain functions, because a copy of a module copies bound methods with their objects
        vars(self.module)["log"] = lambda *given, **named: self.logs.log(*given, **named)
        vars(self.module)["optimizers"] = lambda *_, **__: self.optimizer_in_use

    def setup(self, stage: str, rounds: int) -> None:
        """Attach the module to its run, and call ``setup`` and ``configure_model``."""
        data = self.run.data
        self.attach(rounds)
        if stage == "fit":
            self.local_steps = max(map(self.run.plan.full_steps, range(data.num_clients)))
        if stage == "test" and not self.has_test:
            raise ConfigurationError(
                f"model: {type(self.module).__name__} has no test_step to evaluate; write one, or use validate"
            )
        data.evaluates_clients = data.server is None
        if stage == "fit":
            data.note_missing_validation()
        self.call("setup", stage)
        self.call("configure_model")
        self.metrics = MetricObjects(self.module)  # these hooks may have made some
        self._own_hooks = hooks_of_layers(self.module)

    def teardown(self, stage: str) -> None:
        """Call ``teardown``, and undo :meth:`attach`."""
        self.call("teardown", stage)
        for hook in (*_PASSED_ON, *_TRANSFER):
            vars(self.run).pop(hook, None)
        for name in ("log", "optimizers"):
            vars(self.module).pop(name, None)
        self.module.trainer = None

    def start_fit(self, rounds: int, together: str | None) -> None:
        """Use the module's optimizer, and freeze parameters that the optimizer leaves out."""
        self.rounds = rounds
        name = type(self.module).__name__
        if not self.configured.groups:
            raise ConfigurationError(f"model: the optimizer of {name} has no trainable parameter")
        try:
            check_elementwise(self.make_optimizer)
        except ConfigurationError:  # each copy has its own optimizer, but stacked clients have one
            if self.configured.needs_closure:
                raise
            self.one_by_one = self.one_by_one or f"the optimizer {type(self.configured.template).__name__}"
        for parameter_name, parameter in self.module.named_parameters():
            parameter.requires_grad_(parameter_name in self.configured.groups)
        self.parameter_groups = self.configured.settings
        if not self._tried:
            self._moved = []
        for parameter_name, parameter in self.module.named_parameters():
            moved_by_steps(parameter, parameter_name in self._moved)
        if self.configured.has_hooks:
            self.one_by_one = self.one_by_one or "the hooks of the optimizer"
        if self.one_by_one and together:
            raise ConfigurationError(
                f"model.executor: {together} cannot compute {self.one_by_one} of "
                f"{name} for several clients at once; use SequentialExecutor, and no joint forward pass (FedTAN)"
            )
        self.call("on_fit_start")

    def start_training(self) -> None:
        """Call ``on_train_start``."""
        self.call("on_train_start")

    def call(self, hook: str, *args: Any) -> Any:
        """Call a hook of the module."""
        with doing(f"{type(self.module).__name__}.{hook}"):
            return getattr(self.module, hook)(*args)

    def on_device(self, batch: Any) -> Any:
        """Convert a batch, and move it to the module's device, with the hooks before and after it."""
        batch = self.run.trainer.precision_plugin.convert_input(batch)
        batch = self.module.on_before_batch_transfer(batch, 0)
        batch = self.module.transfer_batch_to_device(batch, self.module.device, 0)
        return self.module.on_after_batch_transfer(batch, 0)

    def moved(self, batches: BatchStack, clients: Sequence[int], positions: Sequence[int]) -> BatchStack:
        """Move the batches of a local step to the run's device, with random numbers for each client."""
        if not self.transfers:
            return super().moved(batches, clients, positions)
        found = []
        for client, position, batch in zip(
            clients, positions, batches.batches(), strict=not self.run.centralised
        ):
            with seeded(derive_seed(self.seed, "transfer", client, position)):
                found.append(self.on_device(batch))
        return BatchStack(batches=found)

    def at_step(self, step: int) -> None:
        """Let the module's trainer count this local step."""
        self.local_step = self.steps_taken = step

    def start_round(self) -> None:
        """Call ``on_train_epoch_start``.

        Raises:
            ConfigurationError: The hook freezes parameters or BN layers, or the reverse.
        """
        modes = {layer: layer.training for layer in batch_norm_layers(self.module).values()}
        with seeded(derive_seed(self.seed, "on_train_epoch_start", self.run.round)):
            self.call("on_train_epoch_start")
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        changed = sorted(trained ^ self.configured.groups.keys())
        changed += [type(layer).__name__ for layer, training in modes.items() if layer.training != training]
        if changed:
            raise ConfigurationError(
                f"model: {type(self.module).__name__}.on_train_epoch_start freezes or trains {changed[0]!r}, but clients train the same state "
                "in all rounds; freeze by a method, such as FixBN, or in configure_optimizers"
            )

    def trial(self) -> None:
        """Find parameters without gradient that steps move, such as a moving average of the weights.

        A copy takes the first client's local steps of a round. The server averages such parameters
        like buffers. A resumed run has those of its checkpoint.
        """
        tried, self._tried = self._tried, False
        frozen = {n: p for n, p in self.module.named_parameters() if not p.requires_grad}
        if tried or not frozen:
            return
        self._moved = moved_in_trial(self)
        for name in self._moved:
            moved_by_steps(frozen[name])
        if self._moved:
            others = f" and {len(self._moved) - 1} more" if len(self._moved) > 1 else ""
            self.run.print(
                f"{self._moved[0]}{others}  averaged, as steps move these parameters without a gradient"
            )

    def forget_steps(self) -> None:
        """Forget what local steps have logged."""
        self.by_client, self._pooled, self.local_step, self.steps_taken = {}, {}, 0, 0

    def client_loss(self, batch: Any) -> Tensor:
        """Return the loss that ``training_step`` returns for a batch."""
        if self._copy is None:  # the metric objects of a copy collect the round
            self.metrics.reset()
        self.logs.number = ""
        with self.logs.collecting(LoggedValues(), batch, local_step=True) as self.logs.step:
            if self.overrides("on_train_batch_start") and (
                self.module.on_train_batch_start(batch, self.local_step) == -1
            ):
                refuse("on_train_batch_start", "cannot skip the rest of a round by -1; use model.local_steps")
            outputs = self.call_step("training_step", batch, self.local_step)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor {[*loss.shape]}" if isinstance(loss, Tensor) else loss and type(loss).__name__
            raise ConfigurationError(
                f"model: {type(self.module).__name__}.training_step returns {kind}; "
                "return the loss, or a dict with the loss, as each client takes each of its local steps"
            )
        more = outputs if isinstance(outputs, Mapping) else {}
        self._outputs = {**more, "loss": loss.detach()}, batch
        return loss.reshape(())

    def losses_apart(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the losses of a pass of a copy with the tensors that the module has now."""
        with self._passing():
            return self.losses(batch)

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """Let a copy with the same tensors act, so that a pass changes no other attribute."""
        layers = batch_norm_layers(self.module)
        shared = (*self.module.parameters(), *(x for layer in layers.values() for x in layer.buffers()))
        copy = whole_copy(self, {id(x): x for x in shared})
        with self.acting(copy):
            yield
        for name, layer in layers.items():  # in which methods measure
            layer._buffers.update(copy.module.get_submodule(name)._buffers)

    def logged(self) -> dict[str, Tensor]:
        """Return the values that the last :meth:`client_loss` has logged, so that vmap can stack them.

        Raises:
            CannotVectorize: The step has updated a metric object for several clients at once.
        """
        if peek_interpreter_stack() is not None and (name := self.metrics.updated):
            self.metrics.reset()  # or the end of the run would move tensors of vmap, which fails
            raise CannotVectorize(
                f"model: training_step of {type(self.module).__name__} updates the metric object {name!r}, which cannot be done for several "
                "clients at once; use SequentialExecutor and no joint forward pass (FedTAN), or update it in validation_step only"
            )
        return self.logs.step.totals()

    def keeper(self) -> Callable[[Sequence[int], Mapping[str, Tensor]], None]:
        """Return a function that keeps the values of :meth:`logged`, each ``[len(clients)]``."""
        return partial(self._keep, self.logs.step)

    def cannot_replay(self) -> str | None:
        """Return why the last :meth:`client_loss` needs its Python code in every step; None if it does not."""
        name = type(self.module).__name__
        if self.metrics.updated:
            return f"training_step of {name} updates the metric object {self.metrics.updated!r}"
        if self.logs.number:
            return f"training_step of {name} logs {self.logs.number!r}, which is no tensor"
        return None

    def _keep(self, step: LoggedValues, clients: Sequence[int], logged: Mapping[str, Tensor]) -> None:
        for number, client in enumerate(clients):
            values = self.by_client.setdefault(client, LoggedValues())
            values.add_all(step.with_totals({n: x[number].detach() for n, x in logged.items()}))
            if self.overrides("on_train_batch_end"):
                self._ended[client] = self._outputs

    @property
    def fresh(self) -> set[str]:
        """Attributes that may change in a client's steps and start anew in each round, as named by the class."""
        return {f".{name}" for name in getattr(self.module, "fresh_each_round", ())}

    def shared_by_copies(self) -> list[Any]:
        """Return the objects that copies of the module share with it."""
        held = vars(self.module)
        return [held.get(name) for name in ("log", "optimizers", "_hparams_initial")]

    def hooks_of_methods(self) -> list[Any]:
        """Return the hooks of layers that methods have added since ``setup``."""
        own = {id(hook) for hook in self._own_hooks}
        return [hook for hook in hooks_of_layers(self.module) if id(hook) not in own]

    def enter(self, cohort: RoundCohort, *, alone: bool, optimizer: OptimizerCallable | None = None) -> None:
        """Give each client a copy of the module, if clients compute one after the other."""
        for copies in self._copies.values():
            for copy in copies.of_row:
                copy.release()
        self._part, self._copies, self._servers = cohort.part().params, {}, {}
        self._traces = None
        if not alone or self.run.joint_method is not None:
            self.watch(cohort)
        if alone:
            cohort.client_optimizer = CopiesOptimizer(self, cohort, optimizer)

    def models(self, cohort: RoundCohort) -> list[nn.Module]:
        """Return the clients' copies."""
        return [copy.module for copy in self.copies_of(cohort).of_row]

    def alone(self, cohort: RoundCohort) -> AbstractContextManager[None]:
        """Return a context in which the server's tensors hold NaN, as copies must not read them."""
        self.copies_of(cohort)  # not later, as copies are made of the server's values
        return self._server_of(cohort).hidden()

    @contextmanager
    def together(self, cohort: RoundCohort, batch: Any) -> Iterator[None]:
        """Refuse to read the server's tensors in this block, and watch what steps in slots change."""
        shapes = tuple(tuple(x.shape) for x in tree_leaves(batch) if isinstance(x, Tensor))
        traces = nullcontext() if self._traces is None else self._traces.step(shapes)
        joint = self.run.joint_method
        remedy = f"leave out {joint}" if joint else "use SequentialExecutor, which gives each client a copy"
        before, self._at_once = self._at_once, True
        try:
            with traces, self._server_of(cohort).unread(remedy):
                yield
        finally:
            self._at_once = before

    def _server_of(self, cohort: RoundCohort) -> ServerTensors:
        key = id(cohort.params)
        if key not in self._servers:
            self._servers[key] = ServerTensors(self.module, cohort)
        return self._servers[key]

    def pass_in_slots(self, cohort: RoundCohort, row: int, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a client's loss, gradients and buffers in the server's module, with the client's tensors."""
        with self.together(cohort, batch):
            return super().pass_in_slots(cohort, row, batch)

    def pass_alone(self, cohort: RoundCohort, row: int, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a client's loss and gradients by the client's copy."""
        copy = self.copies_of(cohort).of_row[row]
        with self.acting(copy):
            loss, objective = self.losses(batch)
            if not loss.isfinite():
                self._refuse_server_in_loss(cohort, batch)
            copy.metrics.refuse_running()
            logged = {name: value[None] for name, value in self.logged().items()}
            copy.clear_gradients()
            objective.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        copy.take_up()
        cohort.put_gradients(row, [parameter.grad for parameter in copy.trained.values()])
        copy.clear_gradients()
        return loss.detach(), logged

    def _refuse_server_in_loss(self, cohort: RoundCohort, batch: Any) -> None:
        """Refuse a loss that is NaN only as the server's tensors hold NaN."""
        with (
            self._server_of(cohort).shown(),
            isolated(),
            self.acting(whole_copy(self, {})),
        ):
            loss = self.losses(copied(batch))[0]
            server = {name: x for name, x in self.model.named_parameters() if x.requires_grad}
            found = torch.autograd.grad(loss, [*server.values()], allow_unused=True)
        if loss.isfinite():
            read = next(
                (repr(name) for name, x in zip(server, found, strict=True) if x is not None), "a tensor"
            )
            raise ConfigurationError(
                f"model: the loss of {type(self.module).__name__} reads {read} of the server's model and not of the client's, such as by a "
                "global variable; reach it from self"
            )

    def copies_of(self, cohort: RoundCohort) -> Copies:
        """Return the copies of a cohort's clients, which are made when they are first used."""
        key = id(cohort.params)
        if key not in self._copies:
            self._copies[key] = Copies(self, cohort)
        return self._copies[key]

    @contextmanager
    def acting(self, copy: ClientCopy) -> Iterator[None]:
        """Let a client's copy take the place of the server's module within the ``with`` block."""
        before = self.module, self.metrics, self._copy
        self.module, self.metrics, self._copy = copy.module, copy.metrics, copy
        try:
            yield
        finally:
            self.module, self.metrics, self._copy = before

    @contextmanager
    def trying(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Let a copy of the module compute in this block. The copy is thrown away."""
        before = dict(vars(self))
        frozen = (
            {} if dtype else {id(x): x for n, x in self.module.named_parameters() if not self._moves(n, x)}
        )
        copy = whole_copy(self, frozen, dtype)
        self.model = copy.module
        self.slots, self._copies, self._servers, self.by_client = StateSlots(self.model), {}, {}, {}
        try:
            with self.acting(copy):
                self._copy = None  # the copy stands for the server's module
                yield
        finally:
            vars(self).update(before)

    def _moves(self, name: str, parameter: Tensor) -> bool:
        return parameter.requires_grad or name in self._moved

    def watch(self, cohort: RoundCohort) -> None:
        """Watch what the next steps of several clients at once change in the module."""
        together = self.run.joint_method or type(self.run.executor).__name__
        self._traces = Traces(self, cohort, f"round {self.run.round}", together)

    def refuse_traces(self) -> None:
        """Check that the watched steps have changed no attribute that the clients share."""
        if self._traces is not None:
            self._traces.refuse()

    def begin_steps(self, cohort: RoundCohort) -> None:
        """Set the settings of the client optimizers that schedulers change."""
        scheduled = self.configured.scheduled(self.run.round - 1, self.local_steps, cohort.step)
        if isinstance(cohort.client_optimizer, CopiesOptimizer):
            cohort.client_optimizer.follow()
            cohort.client_optimizer.schedule(scheduled)
            return
        for block, settings in cohort.optimizer_groups.items() if scheduled else ():
            settings.update(scheduled[cohort.params.layout[block].group])

    def end_step_alone(self, step: int) -> None:
        """Call ``on_train_batch_end`` after the last step of the client that acts."""
        self.steps_taken = step + 1
        if self.overrides("on_train_batch_end"):
            self.module.on_train_batch_end(*self._outputs, step)

    def end_steps(self, cohort: RoundCohort) -> None:
        """Call ``on_train_batch_end`` after each client's local step."""
        ended, self._ended = self._ended, {}
        self.steps_taken = self.local_step + 1
        with self.alone(cohort) if ended else nullcontext():
            for client, (outputs, batch) in ended.items():
                copy = self.copies_of(cohort).of_row[cohort.client_ids.index(client)]
                logged = self.by_client[client]
                with self.acting(copy), self.logs.collecting(logged, batch, local_step=True):
                    copy.module.on_train_batch_end(outputs, batch, self.local_step)
                copy.take_up()

    def logged_by_clients(self) -> dict[int, Told]:
        """Return what the clients of this rank have logged and added to lists, on the CPU.

        Raises:
            ConfigurationError: A client's steps have changed another attribute of the module.
        """
        told = {
            client: Told(values.with_totals({name: x.cpu() for name, x in values.totals().items()}), {}, {})
            for client, values in self.by_client.items()
        }
        self.refuse_traces()
        if (copies := self._copies.get(id(self._part))) is not None:
            metrics = {
                client: copy.metrics.take()
                for client, copy in zip(copies.clients, copies.of_row, strict=True)
            }
            for client, added in copies.additions(self.named, f"round {self.run.round}"):
                values = told[client].values if client in told else LoggedValues()
                told[client] = Told(values, *tree_map_only(Tensor, _on_cpu, (metrics[client], added)))
        return told

    def merge_logged(self, clients: Sequence[int], of_ranks: Sequence[Mapping[int, Any]]) -> None:
        """Combine what the clients of all ranks have logged, in the order of ``clients``."""
        # a rank without clients computes a client of the first rank again
        logged = {client: x for part in reversed(of_ranks) for client, x in part.items()}
        parts = [logged[client] for client in clients if client in logged]
        self.local_step = self.steps_taken = self.local_steps
        for part in parts:
            self.logs.round.add_all(part.values)
            add_to_lists(self.module, part.added)
        self._pooled = self.metrics.merged([part.metrics for part in parts])
        self.metrics.put(self._pooled)
        numbers = self.logs.round.numbers(self.metrics.metrics)
        self.metrics.reset()
        self.run.show_to_callbacks(numbers)

    def end_round(self) -> tuple[dict[str, float], set[str]]:
        """Call ``on_train_epoch_end``; return the round's values, and names that progress bars show."""
        kept = self.run.evaluation.kept  # of the best values; the entry "train" is that of the round before
        self.metrics.put({**kept.get("train", {}), **self._pooled})
        self.call("on_train_epoch_end")
        values = self.logs.round.numbers(self.metrics.metrics)
        if both := sorted(values.keys() & (self.logged_names - self.logs.told)):
            self.logs.told.update(both)
            self.run.print(
                f"self.log({both[0]!r}): logged in training and in evaluations, so the metrics of a round have the value of training"
            )
        shown = {name for name, logged in self.logs.round.items() if logged.prog_bar}
        kept["train"] = self.metrics.take_best(self.logs.round)
        self.logs.round.clear()
        self.local_step = self.steps_taken = 0  # Lightning now counts the round
        return values, shown

    def new_evaluation(self) -> ModuleEvaluation:
        """Return an evaluation by the module's steps."""
        return ModuleEvaluation(self)

    def evaluate_batch(self, batch: Any, evaluation: ServerEvaluation) -> None:
        """Call ``validation_step`` or ``test_step`` for the next batch of an evaluation."""
        if isinstance(evaluation, ModuleEvaluation):
            evaluation.step(batch)
        else:  # only the forward pass is wanted
            with self._passing():
                self.evaluate("validation", batch, 0, None, LoggedValues())

    def evaluate_in_loop(self, batch: Any, batch_idx: int, loader: int) -> Any:
        """Evaluate the server's model on a batch of a loop of Lightning, and return the step's outputs."""
        return self.run.evaluation.step_of_loop(batch, batch_idx, loader)

    @contextmanager
    def apart(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let a copy of the server's module, with some other tensors, be evaluated in this block."""
        server = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        others = {name: value.detach().clone() for name, value in tensors.items()}
        copy = whole_copy(self, {id(server[name]): value for name, value in others.items()})
        with self.acting(copy):
            yield

    def holding(self, slots: StateSlots, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return an empty context, as the copy of :meth:`apart` has the tensors."""
        return nullcontext()

    def evaluated(self, layers: Iterable[nn.Module]) -> list[Any]:
        """Return the layers of the copy of :meth:`apart`."""
        names = {layer: name for name, layer in self.model.named_modules()}
        return [self.module.get_submodule(names[layer]) for layer in layers]

    def metric_name(self, split: str, name: str) -> str:
        """Return the name by which the module logs a metric."""
        self.logged_names.add(name)
        return name

    def require_outputs(self, user: str) -> None:
        """Raise a ``ConfigurationError``, as evaluation steps do not return what ``user`` measures."""
        raise ConfigurationError(
            f"{user}: measures class scores, which the validation_step of {type(self.module).__name__} does not return; leave it "
            "out, or give the network itself as model.model"
        )

    def predict(self, batch: Any, batch_idx: int, loader: int) -> Any:
        """Return what ``predict_step`` returns, or the module's outputs."""
        if not self.predicts:
            return super().predict(batch, batch_idx, loader)
        return self.call_step("predict_step", batch, batch_idx, loader)

    def evaluate(
        self, kind: str, batch: Any, batch_idx: int, loader: int | None, values: LoggedValues
    ) -> Any:
        """Return what the evaluation step returns for a batch; call the hooks before and after it.

        Args:
            kind: ``"validation"`` or ``"test"``.
            batch: The batch.
            batch_idx: The batch's number in its loader, from 0.
            loader: Number of the loader; None if there is only one loader.
            values: The values to which the logged values are added.
        """
        self.logs.loader = loader
        with self.logs.collecting(values, batch):
            place = (batch_idx, loader or 0)
            self.call(f"on_{kind}_batch_start", batch, *place)
            numbers = place if loader is not None else place[:1]
            outputs = self.call_step(f"{kind}_step", batch, *numbers)
            self.call(f"on_{kind}_batch_end", outputs, batch, *place)
        self.logs.loader = None
        return outputs

    def call_step(self, step: str, batch: Any, *numbers: int) -> Any:
        """Call a step with the batch, and with as many of the numbers as its signature accepts."""
        function = getattr(self.module, step)
        inner = getattr(function, "__func__", None)
        return function(batch, *numbers[: _accepted(inner or function, 2 if inner else 1)])


class _Settings:
    """An optimizer of several clients at once, whose settings can be read."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        raise CannotVectorize(
            f"model: a step reads {name!r} of its optimizer, which clients at once do not have; use SequentialExecutor"
        )


@cache
def _accepted(step: Any, others: int) -> int | None:
    """Return how many numbers a step accepts besides its other arguments; None for any number."""
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    return None if inspect.Parameter.VAR_POSITIONAL in kinds else len(kinds) - others


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _is_plain(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001  # pickle calls the object's own code
        return False
    return True
