"""What an executor is: it computes the losses and gradients of one local step for some rows of a cohort."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fl_lightning.batch_norm.layers import explain_batch_of_one
from fl_lightning.client_data.batches import BatchStack, describe_batch
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.errors import CannotVectorize, ConfigurationError, doing
from fl_lightning.recorded import Recorded


class Compilation(NamedTuple):
    """Whether clients' passes are compiled, and why or why not.

    Attributes:
        compiled: Whether they are.
        reason: Why, in a few words; empty where there was nothing to decide.
    """

    compiled: bool
    reason: str = ""


class ClientTask(Protocol):
    """What an executor needs to know of the federated module.

    Attributes:
        model: The server's model, in whose places clients' states hang while their losses are computed.
        loss: Loss of (outputs, targets).
        slots: These places.
        seed: The run's seed.
        trainer: Lightning's trainer, whose precision plugin computes the losses.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    slots: StateSlots
    seed: int

    @property
    def trainer(self) -> L.Trainer: ...  # noqa: D102  # described above

    @property
    def device(self) -> torch.device:
        """Where the model and the cohort are."""

    def client_loss(self, batch: Any) -> Tensor:
        """A client's loss on its batch, a scalar."""


class Executor(Recorded, ABC):
    """Computes one local step's losses and gradients for some rows of a cohort.

    Attributes:
        compilation: Whether passes are compiled; the module sets it before the first round.
    """

    compilation = Compilation(False)

    @abstractmethod
    def backward(
        self, module: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        """Fill ``cohort.grads`` and update ``cohort.buffers`` for ``rows``.

        Args:
            module: The federated module: ``client_loss`` gives a client's loss.
            cohort: The round's stacked client state.
            batch: One batch for each of ``rows``.
            rows: Indices of the active rows.

        Returns:
            The local losses, detached, shape ``[len(rows)]``.
        """

    def decide_compilation(
        self, module: ClientTask, client_steps: int, batch: Callable[[], Any], before: bool | None
    ) -> Compilation:
        """Whether a run's passes are to be compiled; most executors never do.

        Args:
            module: The federated module.
            client_steps: Local steps of all clients in the whole run.
            batch: Gives a client's first batch.
            before: What the run has done up to its checkpoint, None for a run from the start.
        """
        return Compilation(False)

    def clients_together(self, clients: int) -> int | None:
        """How many of some clients are computed in one pass; None where each is computed by itself."""
        return None

    def close(self) -> None:  # most hold nothing
        """Give back what the executor holds between local steps, such as processes; it can be used again."""


@contextmanager
def computing(module: ClientTask, batch: Any) -> Iterator[None]:
    """Note on an exception what is computed of a batch; inputs that the model's first layer refuses are one line."""
    try:
        with doing(lambda: _computation(module, batch)):
            yield
    except RuntimeError as error:
        _refuse_inputs(module.model, batch, error)
        raise


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
            "make the model for such inputs (in_channels, image_size), or give it others"
        ) from error


def _computation(module: ClientTask, batch: Any) -> str:
    """What is computed of a batch and what can be, in words for the error that it ends in."""
    model, loss = module.model, getattr(module.loss, "__qualname__", type(module.loss).__name__)
    numbers = str(next(model.parameters()).dtype).removeprefix("torch.")
    wanted = (
        "inputs of the model's type and, for cross-entropy, integer labels below the number of its outputs"
    )
    return f"model {type(model).__name__} of {numbers}, loss {loss}, a batch of {describe_batch(batch)}; wanted: {wanted}"


def client_loss(module: ClientTask, batch: Any) -> Tensor:
    """``module.client_loss(batch)``, with PyTorch's errors turned into those that name the way out."""
    try:
        with (
            module.trainer.precision_plugin.forward_context(),
            computing(module, batch),
            explain_batch_of_one(),
        ):
            return module.client_loss(batch)
    except RuntimeError as error:
        if "randomness" in str(error):
            raise CannotVectorize(
                f"model {type(module.model).__name__} draws random numbers that VectorizedExecutor (or a joint "
                "forward pass, as FedTAN's) cannot give each client by itself; use fl_lightning.models.dropout.Dropout, or SequentialExecutor"
            ) from error
        if (refusal := cannot_vectorize(module, error)) is not None:
            raise refusal from error
        raise


def cannot_vectorize(module: ClientTask, error: RuntimeError) -> CannotVectorize | None:
    """Return the error that names the way out where ``torch.func.vmap`` cannot run a model; None for other errors."""
    said = str(error)
    if not any(words in said for words in ("atching rule not implemented", "vmap", "functorch transform")):
        return None
    return CannotVectorize(
        f"model {type(module.model).__name__} has an operation that torch.func.vmap cannot run for all clients at once "
        f"({said.splitlines()[0].rstrip('.')}); use SequentialExecutor, and no method that needs a joint forward pass (FedTAN)"
    )
