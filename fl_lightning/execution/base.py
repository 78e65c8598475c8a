"""Base class of executors, which compute the losses and gradients of a local step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Decision whether to compile the clients' forward and backward passes.

    Attributes:
        compiled: Whether to compile the passes.
        reason: Reason for the decision, in a few words. The text is empty if a user's setting
            decides.
    """

    compiled: bool
    reason: str = ""


class ClientTask(Protocol):
    """Interface of the federated module for executors.

    Attributes:
        model: The server's model. While a client's loss is computed, the model holds the client's
            state.
        loss: Loss as a function of (outputs, targets).
        slots: Object that replaces the model's tensors by a client's tensors.
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
        """Device of the model and of the clients' tensors."""

    def client_loss(self, batch: Any) -> Tensor:
        """Return a client's loss on a batch as a scalar."""

    def logged(self) -> dict[str, Tensor]:
        """Return the values that the last ``client_loss`` has logged."""

    def named(self, client: int) -> str:
        """Return words for a client, such as ``"client 3"``."""

    def keeper(self) -> Callable[[Sequence[int], Mapping[str, Tensor]], None]:
        """Return a function (clients, logged) that keeps what clients log in a local step.

        ``logged`` are values ``[len(clients)]`` by name, with the names, weights and reductions of
        the last ``client_loss``.
        """

    def cannot_replay(self) -> str | None:
        """Return why the last ``client_loss`` needs its Python code in every local step, or None."""


class Executor(Recorded, ABC):
    """Base class of executors. An executor computes losses and gradients of a local step.

    Attributes:
        compilation: Decision whether to compile the passes. The module sets this attribute before
            round 1.
    """

    compilation = Compilation(False)

    @abstractmethod
    def backward(
        self, module: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        """Compute the losses and gradients of a local step for some clients.

        The gradients and the new buffers are written to the cohort.

        Args:
            module: The federated module.
            cohort: The round's cohort, with the stacked state of its clients.
            batch: One batch for each client in ``rows``.
            rows: The clients that take this local step, as indices into the cohort.

        Returns:
            The clients' losses ``[len(rows)]``, detached.
        """

    def clients_together(self, clients: int) -> int | None:
        """Return how many clients share a forward pass; None if clients have separate passes.

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
    """Add a description of model, loss and batch to exceptions from the ``with`` block.

    If the inputs do not fit the model, a ``ConfigurationError`` replaces the exception.
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
    model, loss = module.model, getattr(module.loss, "__qualname__", type(module.loss).__name__)
    numbers = str(next(model.parameters()).dtype).removeprefix("torch.")
    return (
        f"model {type(model).__name__} of {numbers}, loss {loss}, a batch of {describe_batch(batch)}; expected: "
        "inputs of the model's type and, for cross-entropy, integer labels below the number of its outputs"
    )


def client_loss(module: ClientTask, batch: Any) -> Tensor:
    """Return ``module.client_loss(batch)``, and add a remedy to some errors of PyTorch."""
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
    """Convert an error of ``torch.func.vmap`` to an error that names a remedy.

    Return None for any other error.
    """
    message = str(error)
    if not any(words in message for words in ("atching rule", "vmap", "functorch transform", "have storage")):
        return None
    return CannotVectorize(
        f"model {type(module.model).__name__} has an operation that torch.func.vmap cannot run for all clients at once "
        f"({message.splitlines()[0].rstrip('.')}); use SequentialExecutor, and no method that needs a joint forward pass (FedTAN)"
    )
