"""Base class of executors, which compute the losses and gradients of a local step."""

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
from fl_lightning.models.loss_terms import collecting
from fl_lightning.recorded import Recorded


class Compilation(NamedTuple):
    """Decision on compilation of the clients' forward and backward passes.

    Attributes:
        compiled: Whether the passes are compiled.
        reason: Reason for the decision, in a few words. It is empty if the user's setting decides.
    """

    compiled: bool
    reason: str = ""


class ClientTask(Protocol):
    """Protocol with the attributes of the federated module that executors use.

    Attributes:
        model: The server's model. It holds a client's state while the client's loss is computed.
        loss: Loss as a function of (outputs, targets).
        slots: The model's slots, in which a client's tensors can replace the model's tensors.
        seed: The run's seed.
        trainer: Lightning's trainer. Its precision plugin wraps the losses.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    slots: StateSlots
    seed: int

    @property
    def trainer(self) -> L.Trainer: ...  # noqa: D102  # described above

    @property
    def device(self) -> torch.device:
        """Device on which the model and the cohort are."""

    def client_loss(self, batch: Any) -> Tensor:
        """Return a client's loss on its batch, a scalar."""


class Executor(Recorded, ABC):
    """Base class of executors. An executor computes losses and gradients of a local step.

    Attributes:
        compilation: Decision whether passes are compiled. The module sets it before the first
            round.
    """

    compilation = Compilation(False)

    @abstractmethod
    def backward(
        self, module: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        """Compute a local step for some clients, and write gradients and new buffers to the cohort.

        Args:
            module: The federated module.
            cohort: The round's cohort, with the stacked state of its clients.
            batch: One batch for each of ``rows``.
            rows: Rows of the clients that take this local step.

        Returns:
            The clients' losses, detached, shape ``[len(rows)]``.
        """

    def decide_compilation(
        self, module: ClientTask, client_steps: int, batch: Callable[[], Any], before: bool | None
    ) -> Compilation:
        """Decide whether a run compiles its passes. The base class decides not to compile.

        Args:
            module: The federated module.
            client_steps: Total number of local steps in the run, summed over the clients.
            batch: Function that returns a client's first batch.
            before: The decision in the checkpoint if the run was resumed, otherwise None.
        """
        return Compilation(False)

    def clients_together(self, clients: int) -> int | None:
        """Return how many clients one pass computes, or None if each client has a separate pass.

        Args:
            clients: Number of clients in the step.
        """
        return None

    def close(self) -> None:  # not abstract, because most executors hold no resources
        """Release the resources that the executor holds between local steps.

        The executor can be used again afterwards.
        """


@contextmanager
def computing(module: ClientTask, batch: Any) -> Iterator[None]:
    """Describe the model, the loss and the batch in exceptions from the ``with`` block.

    If the inputs do not fit the model, the exception becomes an error that says so.
    """
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
            "set in_channels or image_size of the model to fit these inputs, or use other inputs"
        ) from error


def _computation(module: ClientTask, batch: Any) -> str:
    """Return a text that describes the model, the loss, the batch and valid batches."""
    model, loss = module.model, getattr(module.loss, "__qualname__", type(module.loss).__name__)
    numbers = str(next(model.parameters()).dtype).removeprefix("torch.")
    return (
        f"model {type(model).__name__} of {numbers}, loss {loss}, a batch of {describe_batch(batch)}; expected: "
        "inputs of the model's type and, for cross-entropy, integer labels below the number of its outputs"
    )


def client_loss(module: ClientTask, batch: Any) -> Tensor:
    """Return ``module.client_loss(batch)``. Errors of PyTorch become errors that name a remedy."""
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
                f"model {type(module.model).__name__} draws random numbers, which VectorizedExecutor and joint forward passes "
                "(FedTAN) cannot draw per client; use fl_lightning.models.dropout.Dropout, or SequentialExecutor"
            ) from error
        if (refusal := cannot_vectorize(module, error)) is not None:
            raise refusal from error
        raise


def client_losses(module: ClientTask, batch: Any) -> tuple[Tensor, Tensor]:
    """Return two values of a client's loss: the first for reports, the second for gradients.

    Only the second value includes the terms of ``add_loss``.
    """
    with collecting() as terms:
        loss = client_loss(module, batch)
    return loss, sum(terms, loss)


def cannot_vectorize(module: ClientTask, error: RuntimeError) -> CannotVectorize | None:
    """Return an error that names a remedy, if ``error`` means that vmap cannot run the model.

    Return None for any other ``error``.
    """
    message = str(error)
    if not any(words in message for words in ("atching rule not implemented", "vmap", "functorch transform")):
        return None
    return CannotVectorize(
        f"model {type(module.model).__name__} has an operation that torch.func.vmap cannot run for all clients at once "
        f"({message.splitlines()[0].rstrip('.')}); use SequentialExecutor, and no method that needs a joint forward pass (FedTAN)"
    )
