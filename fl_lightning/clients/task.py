"""The interface of a client's program: :class:`ClientTask`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fl_lightning.batch_norm.layers import explain_batch_of_one
from fl_lightning.client_data.batches import BatchStack, describe_batch
from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.clients.tasks import Task
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.errors import CannotVectorize, ConfigurationError, doing
from fl_lightning.models.loss_terms import collecting
from fl_lightning.optimizers.settings import GroupSettings, OptimizerCallable


class ClientSettings(NamedTuple):
    """Settings of ``FederatedModule`` that decide what a client computes; empty if not given."""

    client_optimizer: OptimizerCallable | None
    parameter_groups: GroupSettings
    client_lr_schedule: Callable[[int, int], float] | None
    loss: Callable[[Tensor, Tensor], Tensor] | None
    task: Task | None
    metrics: Mapping[str, Any]


class ClientTask:
    """A client's program: its loss, its optimizer and its evaluation.

    Rounds, executors, evaluations, checkpoints and commands ask a run's task, whatever kind of model
    the user has. A subclass defines :meth:`client_loss`, :meth:`evaluate_batch` and
    :meth:`take_settings`. All other methods have a default.

    Args:
        model: The server's model. While a client's loss is computed, the model holds the client's
            tensors.

    Attributes:
        run: The federated module.
        optimizer: Function that makes the client optimizer from parameters.
        parameter_groups: Settings of the client optimizer by parameter group.
        slots: Object that replaces the model's tensors by a client's tensors, during a fit.
        logs_itself: Whether the model logs metrics by names of its own. Its evaluations need all
            batches of a loader, in their order.
        uses_copies: Whether a client that computes alone has a copy of the model.
        strict_loading: Whether checkpoints contain all tensors of the model.
        one_by_one: What clients cannot compute in a common forward pass, or None.
        rate: Name of the setting of the client learning rate, for messages.
        predicts: Whether the model itself defines what it predicts.
        has_test: Whether the model can be tested.
        logged_names: Names of the metrics that evaluations of such a model have logged.
    """

    run: Any = None
    optimizer: OptimizerCallable
    parameter_groups: GroupSettings
    slots: StateSlots
    strict_loading = True
    one_by_one: str | None = None
    rate = "client_optimizer lr"
    logs_itself = False
    uses_copies = False
    predicts = False
    has_test = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameter_groups = {}
        self._task: Any = None
        self._loss: Any = None
        self.logged_names: set[str] = set()

    def take_settings(self, given: ClientSettings) -> None:
        """Take the settings of ``FederatedModule`` that decide what a client computes.

        Raises:
            ConfigurationError: A setting is missing, or the model decides it.
        """
        raise NotImplementedError

    def client_loss(self, batch: Any) -> Tensor:
        """Return a client's loss on a batch as a scalar."""
        raise NotImplementedError

    def evaluate_batch(self, batch: Any, evaluation: ServerEvaluation) -> None:
        """Add the model's outputs on a batch to an evaluation.

        Each batch is evaluated on only one rank, and the ranks share only ``evaluation``. Update your
        own metrics in ``validation_step``, which every rank calls for every batch.
        """
        raise NotImplementedError

    @property
    def task(self) -> Task:
        """Loss and metrics of outputs and targets. A method may replace the run's."""
        task: Task = getattr(self.run, "task", self._task)
        return task

    @task.setter
    def task(self, task: Task) -> None:
        self._task = task

    @property
    def loss(self) -> Callable[..., Tensor]:
        """Loss of a client. A method may replace the run's."""
        loss: Callable[..., Tensor] = getattr(self.run, "loss", self._loss)
        return loss

    @loss.setter
    def loss(self, loss: Callable[..., Tensor]) -> None:
        self._loss = loss

    @property
    def group_of(self) -> Mapping[str, str] | None:
        """Parameter group of each parameter; None for ``fl_lightning.cohort.rows.parameter_groups``."""
        return None

    @property
    def written_by_steps(self) -> list[Any]:
        """Objects whose attributes a local step must not write in a CUDA graph."""
        return [] if self.logs_itself else [self]

    @property
    def device(self) -> torch.device:
        """Device of the model and of the clients' tensors."""
        device: torch.device = self.run.device
        return device

    @property
    def seed(self) -> int:
        """The run's seed."""
        seed: int = self.run.seed
        return seed

    def named(self, client: int) -> str:
        """Return words for a client, such as ``"client 3"`` or ``"client 3 (Oslo)"``."""
        name: str = self.run.data.named(client)
        return name

    # the course of a run

    def call(self, hook: str, *args: Any) -> Any:
        """Call a hook of Lightning that the model may have. A network has none."""

    def attach(self, rounds: int) -> None:
        """Prepare the model's own code for a trainer, outside of a run.

        Args:
            rounds: Planned number of rounds.
        """

    def setup(self, stage: str, rounds: int) -> None:
        """Prepare ``fit``, ``validate``, ``test`` or ``predict``. The run has a trainer and data.

        Args:
            stage: Lightning's name of the stage.
            rounds: Planned number of rounds, or 1.
        """

    def teardown(self, stage: str) -> None:
        """Undo :meth:`setup`."""

    def start_fit(self, rounds: int, together: str | None) -> None:
        """Prepare the rounds.

        Args:
            rounds: Planned number of rounds.
            together: What computes several clients in a common forward pass, if the user has asked
                for it.
        """

    def start_training(self) -> None:
        """Check the model and its metrics before round 1."""

    def trial(self) -> None:
        """Find what steps change, by a trial of the first client's steps that is thrown away."""

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load what :meth:`save` has added to a checkpoint."""

    def start_round(self) -> None:
        """Prepare a round, before the check of the first steps."""

    def forget_steps(self) -> None:
        """Forget what the local steps have logged."""

    def end_round(self) -> tuple[dict[str, float], set[str]]:
        """Return the values that the model has logged, and the names that progress bars show."""
        return {}, set()

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add what the model itself needs to a checkpoint."""

    # a local step

    def at_step(self, step: int) -> None:
        """Take note of the local step whose batches are drawn next, from 0."""

    def on_device(self, batch: Any) -> Any:
        """Move a batch to the run's device, and convert it to the run's precision."""
        return self.run.trainer.precision_plugin.convert_input(move_data_to_device(batch, self.device))

    def moved(self, batches: BatchStack, clients: Sequence[int], positions: Sequence[int]) -> BatchStack:
        """Move the batches of a local step to the run's device.

        Args:
            batches: The batches.
            clients: The client of each batch.
            positions: Number of each batch among all batches of its client.
        """
        return batches.map(self.on_device)

    @contextmanager
    def computing(self, batch: Any) -> Iterator[None]:
        """Add a description of model, loss and batch to exceptions from the ``with`` block.

        If the inputs do not fit the model, a ``ConfigurationError`` replaces the exception.
        """
        try:
            with doing(lambda: self._computation(batch)):
                yield
        except RuntimeError as error:
            _refuse_inputs(self.model, batch, error)
            raise

    def _computation(self, batch: Any) -> str:
        loss = getattr(self.loss, "__qualname__", type(self.loss).__name__)
        numbers = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return (
            f"model {type(self.model).__name__} of {numbers}, loss {loss}, a batch of {describe_batch(batch)}; expected: "
            "inputs of the model's type and, for cross-entropy, integer labels below the number of its outputs"
        )

    def explained_loss(self, batch: Any) -> Tensor:
        """Return :meth:`client_loss`, and add a remedy to some errors of PyTorch."""
        try:
            with (
                self.run.trainer.precision_plugin.forward_context(),
                self.computing(batch),
                explain_batch_of_one(),
            ):
                return self.client_loss(batch)
        except RuntimeError as error:
            if "randomness" in str(error):
                raise CannotVectorize(
                    f"model {type(self.model).__name__} draws random numbers, which VectorizedExecutor and joint forward passes "
                    "(FedTAN) cannot draw per client; use fl_lightning.models.dropout.Dropout, or SequentialExecutor"
                ) from error
            if (refusal := cannot_vectorize(self.model, error)) is not None:
                raise refusal from error
            raise

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return two values of a client's loss: the first for reports, the second for gradients.

        Only the second value includes the terms of ``add_loss``.
        """
        with collecting() as terms:
            loss = self.explained_loss(batch)
        return loss, sum(terms, loss)

    def losses_apart(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return :meth:`losses` of a pass that is no local step, such as a method's to measure statistics.

        The pass uses the tensors, modes and hooks that the server's model has now.
        """
        return self.losses(batch)

    def logged(self) -> dict[str, Tensor]:
        """Return the values that the last :meth:`client_loss` has logged."""
        return {}

    def keeper(self) -> Callable[[Sequence[int], Mapping[str, Tensor]], None]:
        """Return a function (clients, logged) that keeps what clients log in a local step.

        ``logged`` are values ``[len(clients)]`` by name, with the names, weights and reductions of
        the last ``client_loss``.
        """
        return lambda clients, logged: None

    def cannot_replay(self) -> str | None:
        """Return why the last ``client_loss`` needs its Python code in every local step, or None."""
        return None

    def enter(self, cohort: RoundCohort, *, alone: bool, optimizer: OptimizerCallable | None = None) -> None:
        """Prepare the clients of a round, after the broadcast.

        Args:
            cohort: The round's cohort.
            alone: Whether the clients of a rank compute one after the other.
            optimizer: Client optimizer of a check, which replaces the model's own.
        """

    def models(self, cohort: RoundCohort) -> Sequence[nn.Module]:
        """Return the models that compute clients one after the other."""
        return [self.model]

    def alone(self, cohort: RoundCohort) -> AbstractContextManager[None]:
        """Return a context in which clients compute one after the other."""
        return nullcontext()

    def together(self, cohort: RoundCohort, batch: Any) -> AbstractContextManager[None]:
        """Return a context in which clients compute with the server's model at once."""
        return nullcontext()

    def trying(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """Let a copy of the model compute in this block. The copy is thrown away.

        Args:
            dtype: Type of the copy's floating-point tensors. Default: that of the model's tensors.
        """
        raise NotImplementedError

    def watch(self, cohort: RoundCohort) -> None:
        """Watch what the next steps of several clients at once change in the model."""

    def refuse_traces(self) -> None:
        """Check that the watched steps have changed no attribute that the clients share.

        Raises:
            ConfigurationError: An attribute has changed. A tensor that was missing or None is a cache.
        """

    def pass_alone(self, cohort: RoundCohort, row: int, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a client's loss, gradients and buffers. Return the loss and the logged values."""
        return self.pass_in_slots(cohort, row, batch)

    def pass_in_slots(self, cohort: RoundCohort, row: int, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute what :meth:`pass_alone` computes, in the server's model with the client's tensors."""
        state = cohort.row_state(row)
        with self.slots.filled(state.tensors):
            loss, objective = self.losses(batch)
            logged = {name: value[None] for name, value in self.logged().items()}
            # compute gradients in this block: hooks and checkpointed layers need the client's state
            gradients = torch.autograd.grad(objective, state.trained, allow_unused=True)
            updated = self.slots.read(state.tensors)
        cohort.take_up(row, updated)  # update after the backward pass, which may need the old tensors
        cohort.put_gradients(row, gradients)
        return loss.detach(), logged

    def begin_steps(self, cohort: RoundCohort) -> None:
        """Change settings of the client optimizers before a local step."""

    def end_steps(self, cohort: RoundCohort) -> None:
        """Finish a local step, after the steps of the client optimizers."""

    def logged_by_clients(self) -> dict[int, Any]:
        """Return what the clients of this rank have logged in the round, by client."""
        return {}

    def merge_logged(self, clients: Sequence[int], of_ranks: Sequence[Mapping[int, Any]]) -> None:
        """Combine what the clients of all ranks have logged, in the order of ``clients``."""

    # an evaluation

    def new_evaluation(self) -> ServerEvaluation:
        """Return an evaluation of a model."""
        return ServerEvaluation()

    def evaluate_in_loop(self, batch: Any, batch_idx: int, loader: int) -> Any:
        """Evaluate the server's model on a batch of a loop of Lightning.

        Args:
            batch: The batch.
            batch_idx: The batch's number in its loader, from 0.
            loader: Number of the loader, from 0.
        """
        if loader:
            raise ConfigurationError(
                "data: the server has several loaders of evaluation data; return one loader"
            )
        return self.run.evaluation.divide(self.run, batch, batch_idx, self.evaluate_batch)

    def apart(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context in which evaluations cannot change the server's model.

        Args:
            tensors: Parameters and buffers, by name, that replace the server's.
        """
        return nullcontext()

    def holding(self, slots: StateSlots, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context in which the evaluated model has these tensors. It is within :meth:`apart`."""
        return slots.filled(tensors)

    def evaluated(self, layers: Iterable[nn.Module]) -> list[Any]:
        """Return the layers of the evaluated model that correspond to layers of the server's."""
        return [*layers]

    def metric_name(self, split: str, name: str) -> str:
        """Return the full name of an evaluation's metric."""
        return f"{split}/{name}"

    def require_outputs(self, user: str) -> None:
        """Raise a ``ConfigurationError`` if evaluations hide the outputs that ``user`` measures."""

    def predict(self, batch: Any, batch_idx: int, loader: int) -> Any:
        """Return the server model's outputs on a batch."""
        return self.model(batch[0] if isinstance(batch, list | tuple) else batch)


def _refuse_inputs(model: nn.Module, batch: Any, error: RuntimeError) -> None:
    layers = ((name, layer) for name, layer in model.named_modules() if [*layer.parameters(recurse=False)])
    name, layer = next(layers, ("", None))
    inputs = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    if inputs is None or inputs.dim() < 2:
        return
    is_other = (
        isinstance(layer, nn.Conv2d) and inputs.dim() == 4 and layer.in_channels != inputs.shape[1]
    ) or (
        isinstance(layer, nn.Linear)
        and layer.in_features not in (inputs.shape[-1], inputs[0].numel())
        and "cannot be multiplied" in str(error)
    )
    if is_other:
        raise ConfigurationError(
            f"model: {type(model).__name__} cannot take inputs of the shape {list(inputs.shape)}: its first layer {name!r} is {layer}; "
            "set in_channels or image_size of the model to fit these inputs, or use other inputs"
        ) from error


def cannot_vectorize(model: nn.Module, error: RuntimeError) -> CannotVectorize | None:
    """Convert an error of ``torch.func.vmap`` to an error that names a remedy.

    Return None for any other error.
    """
    message = str(error)
    if not any(words in message for words in ("atching rule", "vmap", "functorch transform", "have storage")):
        return None
    return CannotVectorize(
        f"model {type(model).__name__} has an operation that torch.func.vmap cannot run for all clients at once "
        f"({message.splitlines()[0].rstrip('.')}); use SequentialExecutor, and no method that needs a joint forward pass (FedTAN)"
    )
