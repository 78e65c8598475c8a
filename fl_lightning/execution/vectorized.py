"""The executor that computes several clients at once."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fl_lightning.batch_norm.joint import averaging_by, mean_of_all
from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.batch_norm.stacked import StackedBatchNorm
from fl_lightning.client_data.batches import BatchStack, require_one
from fl_lightning.clients.task import ClientTask, cannot_vectorize
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import CannotVectorize, ConfigurationError, doing
from fl_lightning.execution.base import Executor
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.randomness import python_states
from fl_lightning.ranks import Ranks

_log = logging.getLogger("fl_lightning")


class VectorizedExecutor(Executor):
    """Executor that divides the clients into blocks, and computes each block at once with vmap.

    All batches of a block have the same number of samples, and must have the same shape.

    If a GPU runs out of memory, the executor halves the block size and continues.

    Args:
        block_size: Number of clients that ``torch.func.vmap`` computes at once. Smaller blocks need
            less memory. Default: all clients of the round.
        where_possible: Whether to compute clients one by one if the model or the batches cannot be
            vectorized. With False (default), this case is an error.

    Raises:
        ConfigurationError: ``block_size`` is below 1.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, executor=VectorizedExecutor())
    """

    _in_blocks = True  # whether a cohort may be divided into blocks

    def __init__(self, block_size: int | None = None, where_possible: bool = False) -> None:
        if block_size is not None and block_size < 1:
            raise ConfigurationError(
                f"VectorizedExecutor.block_size: {block_size} must be at least 1 (or null for all)"
            )
        self.block_size, self.where_possible = block_size, where_possible
        self._largest: int | None = None
        self._warned: set[str] = set()
        # texts for the error about batches of different shapes
        self.user, self.instead = "executor VectorizedExecutor", "use SequentialExecutor"

    def backward(
        self, task: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        """Compute a local step, see :meth:`~fl_lightning.execution.base.Executor.backward`."""
        rows, done = list(rows), 0
        if self._in_blocks and len(groups := batch.by_size()) > 1:
            parts = []
            for group in groups:
                part = BatchStack(batches=[batch.batches()[i] for i in group])
                parts.append(self.backward(task, cohort, part, [rows[i] for i in group]))
            return torch.cat(parts)[torch.tensor([*chain(*groups)]).argsort()]
        losses: list[Tensor] = []
        while done < len(rows):
            size = min(self.block_size or len(rows), self._largest or len(rows), len(rows) - done)
            try:
                stack = self._stacked(batch)
                # clone: a block that is repeated needs the same batch
                part = tree_map(lambda x: x[done : done + size].clone(), stack)  # noqa: B023  # used at once
                ids = [cohort.client_ids[row] for row in (rows[done], rows[done + size - 1])]
                with doing(f"computing clients {ids[0]} to {ids[1]} at once"):
                    losses.append(self._block(task, cohort, part, rows[done : done + size]))
            except torch.OutOfMemoryError:
                if size == 1 or not self._in_blocks:
                    raise
                self._largest, size = size // 2, 0  # repeat the block with half of the clients
                torch.cuda.empty_cache()
            except CannotVectorize as reason:
                if not self.where_possible:
                    raise
                if str(reason) not in self._warned:
                    self._warned.add(str(reason))
                    _log.warning("one client after the other: %s", reason)
                break
            done += size
        if done < len(rows):
            rest = BatchStack(batches=batch.batches()[done:])
            losses.append(SequentialExecutor().backward(task, cohort, rest, rows[done:]))
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def clients_together(self, clients: int) -> int:
        """Return the block size, which is halved each time the GPU runs out of memory."""
        return min(self.block_size or clients, self._largest or clients, clients)

    def close(self) -> None:
        """Reset the block size, which a lack of GPU memory may have halved."""
        self._largest = None

    def _stacked(self, batch: BatchStack) -> Any:
        try:
            return self._stack(batch)
        except CannotVectorize as error:
            raise CannotVectorize(
                f"{self.user} needs batches of equal shape from every client, but {error}; give the client loaders "
                f"drop_last=True or {self.instead}"
            ) from None

    def _stack(self, batch: BatchStack) -> Any:
        return batch.stack()

    def _block(self, task: ClientTask, cohort: RoundCohort, batch: Any, rows: list[int]) -> Tensor:
        slots, trained, index = task.slots, cohort.trained_names, cohort.index(rows)
        params = {name: value.requires_grad_() for name, value in cohort.params.copies(index).items()}
        buffers = cohort.buffers.copies(index)

        def losses_and_buffers(
            params: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
        ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
            with slots.filled({**params, **buffers}):
                loss, objective = task.losses(batch)
                if objective is not loss and not self._in_blocks:
                    raise ConfigurationError(
                        f"add_loss: {self.user} cannot have loss terms of layers; leave out the term or the method"
                    )
                return loss, objective, slots.read(buffers), task.logged()

        versions = {name: value._version for name, value in params.items()}
        drawn = python_states()
        with task.together(cohort, batch), self._one_reason(task):
            with _numeric_momentum(task.model, buffers), StackedBatchNorm():
                losses, objectives, updated, logged = torch.func.vmap(losses_and_buffers)(
                    params, buffers, batch
                )
            if python_states() != drawn:
                raise CannotVectorize(
                    f"model: {type(task.model).__name__} draws random numbers of NumPy or Python, which {self.user} cannot draw per client; use "
                    "SequentialExecutor, and no method that needs a joint forward pass (FedTAN)"
                )
            leaves = [params[name] for name in trained]
            try:  # hooks and checkpointed layers, which run here, may not support vmap
                gradients = torch.autograd.grad(objectives.sum(), leaves, allow_unused=True)
            except RuntimeError as error:
                if (refusal := cannot_vectorize(task.model, error)) is not None:
                    raise refusal from error
                raise
        filled = {
            n: torch.zeros_like(params[n]) if g is None else g
            for n, g in zip(trained, gradients, strict=True)
        }
        if unused := [name for name, g in zip(trained, gradients, strict=True) if g is None]:
            cohort.skip(rows, unused)
        for block, layout in cohort.params.layout.items():  # the forward pass may change parameters
            if any(params[name]._version != versions[name] for name in layout.shapes):
                cohort.params.write(index, block, params)
        for block in cohort.trained_blocks:
            cohort.grads.write(index, block, filled)
        for block in cohort.buffers.layout:
            cohort.buffers.write(index, block, updated)
        task.keeper()([cohort.client_ids[row] for row in rows], logged)
        return losses.detach()

    @contextmanager
    def _one_reason(self, task: ClientTask) -> Iterator[None]:
        """Take any failure as a reason to compute clients one by one, which repeats a fault of the user's."""
        try:
            yield
        except (ConfigurationError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not self.where_possible:
                raise
            line = str(error).partition("\n")[0]
            raise CannotVectorize(
                f"model {type(task.model).__name__} failed for several clients at once ({type(error).__name__}: {line})"
            ) from error


@contextmanager
def _numeric_momentum(model: nn.Module, buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace ``momentum=None`` (cumulative average) by 1/(k+1), where k counts earlier batches.

    Under vmap, PyTorch cannot read k from a layer's counter.
    """
    seen: dict[str, int] = {}
    cumulative = {name: layer for name, layer in batch_norm_layers(model).items() if layer.momentum is None}
    try:
        for name, layer in cumulative.items():
            if layer.track_running_stats:
                counts = buffers[f"{name}.num_batches_tracked"]
                if not bool((counts == counts[0]).all()):
                    raise CannotVectorize(
                        f"BN layer {name!r} has momentum=None and clients with different counters, which "
                        "VectorizedExecutor cannot run; use SequentialExecutor"
                    )
                layer.momentum = 1.0 / (int(counts[0]) + 1)
                seen[name] = int(counts[0])
        yield
        for name, count in seen.items():
            if bool((buffers[f"{name}.num_batches_tracked"] > count + 1).any()):
                raise CannotVectorize(
                    f"BN layer {name!r} has momentum=None and runs more than once in a forward pass, which VectorizedExecutor "
                    "cannot do; use SequentialExecutor"
                )
    finally:
        for layer in cumulative.values():
            layer.momentum = None


def joint_executor(method: str, ranks: Ranks | None = None) -> VectorizedExecutor:
    """Return the executor for a local step in which all clients share one forward pass.

    Args:
        method: Name of the method, for error messages.
        ranks: The ranks of the run. Each rank computes some of the clients. Default: this process
            computes all clients.
    """
    return _JointExecutor(method, ranks or Ranks())


class _JointExecutor(VectorizedExecutor):
    _in_blocks = False

    def __init__(self, method: str, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self.user = f"the joint forward pass of {method} in the first local step"
        self.instead = "a batch_size that each client's samples fill"

    def backward(
        self, task: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        if self._ranks.size == 1:
            return super().backward(task, cohort, batch, rows)
        with averaging_by(self._mean):
            return super().backward(task, cohort, batch, rows)

    def _stack(self, batch: BatchStack) -> Any:
        stack = batch.stack()
        require_one(self._ranks.exchange(lambda: tuple(leaf.shape[1:] for leaf in tree_leaves(stack))))
        return stack

    def _mean(self, own: Tensor, clients: int) -> Tensor:
        """Return the mean of a tensor over the clients of all ranks.

        In the backward pass, the gradients of all clients are averaged as well.
        """
        mean = own.clone()
        with torch.no_grad():
            mean.copy_(self._mean_of_values(own, clients))
        if mean.requires_grad:
            mean.register_hook(lambda gradients: self._mean_of_values(gradients, clients))  # type: ignore[no-untyped-call]  # torch gives it no types
        return mean

    def _mean_of_values(self, own: Tensor, clients: int) -> Tensor:
        sent = own.detach()[: len(self._ranks.share(clients))].cpu()
        # clone, because pickle would write the whole storage of a view
        everyone = torch.cat(self._ranks.exchange(sent.clone))
        return mean_of_all(everyone.to(own.device), clients)[:1].expand_as(own)
