"""The executor that clips the gradient of each sample and adds noise."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fl_lightning.batch_norm.stacked import StackedBatchNorm
from fl_lightning.client_data.batches import BatchStack
from fl_lightning.clients.task import ClientTask, cannot_vectorize
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.base import Executor
from fl_lightning.models.dropout import Dropout


def per_sample_executor(clip: float, noise: float, expected: Mapping[int, float], samples: int) -> Any:
    """Return an executor that clips the gradient of each sample, adds noise to the sum, and divides by b.

    Its attribute ``clients`` must be the run's executor.

    Args:
        clip: Largest norm C of a sample's gradient over all trained parameters.
        noise: Standard deviation sigma of the noise, in units of ``clip``.
        expected: Expected number of samples b in a batch of each client, by client id.
        samples: Number of samples that are computed at once. Each needs the memory of a gradient.
    """
    return _PerSampleExecutor(clip, noise, expected, samples)


def filled_batches(executor: Executor) -> Executor:
    """Return an executor for batches that may be empty: clients with no or one sample have the gradient 0.

    A single sample has no batch statistics.
    """
    return _FilledBatches(executor)


class _PerSampleExecutor(Executor):
    """Executor of DP-SGD (Abadi et al., arXiv 1607.00133, Algorithm 1).

    The gradient of a client is ``(1 / b) (sum_j min(1, C / (|g_j| + 1e-6)) g_j + N(0, sigma^2 C^2 I))``; the
    1e-6 are Opacus's. A batch without samples gives noise alone. Buffers do not change.

    ``torch.func.vmap`` computes the samples, each as a batch of one with a copy of its client's
    parameters. Samples of several clients are computed together if the run's executor computes
    several clients at once.
    """

    def __init__(self, clip: float, noise: float, expected: Mapping[int, float], samples: int) -> None:
        self.clip, self.noise, self.expected, self.samples = clip, noise, expected, samples
        self.clients: Executor | None = None  # the run's executor

    def backward(
        self, task: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        """Compute a local step, see :meth:`~fl_lightning.execution.base.Executor.backward`."""
        assert self.clients is not None
        together = self.clients.clients_together(len(rows)) or 1
        batches = batch.batches()
        for block in cohort.trained_blocks:
            cohort.grads.blocks[block][cohort.index([*rows])] = 0
        losses = [
            self._clipped(task, cohort, rows[first : first + together], batches[first : first + together])
            for first in range(0, len(rows), together)
        ]
        generators = cohort.generators("private noise")
        for row in rows:
            for block in cohort.trained_blocks:
                gradient = cohort.grads.blocks[block][row]
                if self.noise:
                    drawn = torch.randn(gradient.shape, generator=generators[row], dtype=gradient.dtype)
                    gradient += (self.noise * self.clip) * _sent(drawn, gradient.device)
                gradient /= self.expected[cohort.client_ids[row]]
        return torch.cat(losses)

    def _clipped(
        self, task: ClientTask, cohort: RoundCohort, rows: Sequence[int], batches: Sequence[Any]
    ) -> Tensor:
        """Write the sums of the clipped gradients of some clients, and return the clients' mean losses."""
        sizes = BatchStack(batches=batches).sizes()
        # a batch of one for each sample
        samples = tree_map(lambda *parts: torch.cat(parts).unsqueeze(1), batches[0], *batches[1:])
        owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes))
        places = torch.cat([torch.arange(size) for size in sizes])
        index = cohort.index([*rows])
        state = cohort.params.copies(index), cohort.buffers.copies(index)
        losses = torch.zeros(len(rows), device=task.device)
        for first in range(0, len(owners), self.samples):
            part = slice(first, first + self.samples)
            chunk = tree_map(itemgetter(part), samples)
            found, gradients = self._gradients(task, cohort, state, chunk, owners[part], places[part])
            norms = torch.stack([x.flatten(1).square().sum(1) for x in gradients.values()]).sum(0).sqrt()
            # a sample without a finite gradient adds nothing: otherwise it would decide whether its client diverges
            factors = (self.clip / (norms + 1e-6)).clamp(max=1.0).nan_to_num(0.0)
            done = 0
            # client by client, as a gradient that is not finite must not reach another client
            for owner, count in enumerate(owners[part].bincount(minlength=len(rows)).tolist()):
                own = slice(done, done + count)
                losses[owner] += found[own].sum() / max(sizes[owner], 1)
                for name, rows_of in cohort.grads.row(rows[owner]).items():
                    if name in gradients:
                        rows_of += torch.einsum(
                            "n,n...->...", factors[own], gradients[name][own].nan_to_num(0.0, 0.0, 0.0)
                        )
                done += count
        return losses

    def _gradients(
        self,
        task: ClientTask,
        cohort: RoundCohort,
        state: tuple[dict[str, Tensor], dict[str, Tensor]],
        batch: Any,
        owners: Tensor,
        places: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses and gradients ``[n, ...]`` of single samples.

        Args:
            task: What a client computes.
            cohort: The round's cohort.
            state: Parameters and buffers ``[clients, ...]`` of some clients, by name.
            batch: The samples, each as a batch of one.
            owners: Client of each sample, as an index into ``state``.
            places: Number of each sample in its client's batch.
        """
        row_of = _sent(owners, task.device)

        def of_samples(x: Tensor) -> Tensor:
            return x.expand(len(owners), *x.shape[1:]) if len(x) == 1 else x[row_of]

        params = {n: of_samples(x).requires_grad_() for n, x in state[0].items()}
        # clone: samples must not share the memory of a buffer
        buffers = {n: of_samples(x).clone() for n, x in state[1].items()}
        keys = {f"{n}.key" for n, layer in task.model.named_modules() if isinstance(layer, Dropout)}
        for name in keys & buffers.keys():  # each sample of a batch has its own mask
            buffers[name] = (buffers[name] + _sent(places, task.device)) & (2**63 - 1)

        versions = {name: value._version for name, value in buffers.items()}

        def passed(
            params: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            with task.slots.filled({**params, **buffers}):
                loss, objective = task.losses(batch)
                return loss, objective, task.slots.read(buffers)

        try:
            with task.together(cohort, batch), StackedBatchNorm():
                losses, objectives, after = torch.func.vmap(passed)(params, dict(buffers), batch)
            leaves = [params[name] for name in cohort.trained_names]
            gradients = torch.autograd.grad(objectives.sum(), leaves, materialize_grads=True)
        except RuntimeError as error:
            if (refusal := cannot_vectorize(task.model, error)) is not None:
                raise ConfigurationError(
                    f"PrivateSGD: the gradient of a single sample needs torch.func.vmap, and {refusal}"
                ) from error
            raise
        for name, given in buffers.items():
            if given._version != versions[name] or _place(after[name]) != _place(given):
                raise ConfigurationError(
                    f"PrivateSGD: a forward pass of {type(task.model).__name__} changes the buffer {name!r}, and no noise would protect "
                    "the samples in it; leave the layer out, or freeze its statistics"
                )
        return losses.detach(), dict(zip(cohort.trained_names, gradients, strict=True))


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device, for which the CPU does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


class _FilledBatches(Executor):
    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def backward(
        self, task: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        """Compute a local step, see :meth:`~fl_lightning.execution.base.Executor.backward`."""
        filled = [place for place, size in enumerate(batch.sizes()) if size > 1]
        losses = torch.zeros(len(rows), device=task.device)
        for block in cohort.trained_blocks:
            cohort.grads.blocks[block][cohort.index([*rows])] = 0
        if filled:
            part = BatchStack(batches=[batch.batches()[place] for place in filled])
            found = self.executor.backward(task, cohort, part, [rows[place] for place in filled])
            losses[filled] = found.to(losses.dtype)
        return losses


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
