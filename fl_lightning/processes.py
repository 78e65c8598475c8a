"""The executor that uses every core of a machine: clients spread over processes, their state in shared memory."""

import atexit
import copy
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fl_lightning.batches import CohortBatch
from fl_lightning.client_rows import ClientRows
from fl_lightning.errors import ConfigurationError
from fl_lightning.executors import Executor, SequentialExecutor
from fl_lightning.worker import Load, Staged, Step, serve

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

_SHARED_MEMORY = Path("/dev/shm")
_SERVER_ONLY = (
    "client_optimizer",
    "server_optimizer",
    "executor",
    "aggregator",
    "client_lr_schedule",
    "plan",
    "record",
    "slots",
    "_cohort",
    "_hparams",
    "_hparams_initial",
    "_batch_norm_in_training",
)
"""What a client's loss has no use for, some of it impossible to send."""


class ProcessExecutor(Executor):
    """The cohort spread over processes, each of which computes its clients one after the other on one thread.

    The same numbers as :class:`~fl_lightning.executors.SequentialExecutor` on one thread, bit for bit, whatever
    ``num_workers``. Worker processes start with the first round (a few seconds, in which each imports torch) and are
    used again by later runs of the process. What a subclass's ``client_loss`` reads of the module is what the module had
    when they started; tensors of the cohort are always those of the step. A script that uses it needs
    ``if __name__ == "__main__":``, as with any library that starts processes.

    Args:
        num_workers: Processes that compute, this one included. Default: the cores that this process may use.
        compile: Whether each of them compiles the model, see ``SequentialExecutor``.

    Raises:
        ConfigurationError: ``num_workers`` is below 1.
    """

    def __init__(self, num_workers: int | None = None, compile: bool = False) -> None:
        if num_workers is not None and num_workers < 1:
            raise ConfigurationError(
                f"ProcessExecutor.num_workers: {num_workers} must be at least 1 (or null for one per core)"
            )
        self.num_workers = num_workers
        self._crew: _Crew | None = None
        self.compile = compile
        self._own = SequentialExecutor(compile)

    def backward(
        self, module: "FederatedModule", cohort: ClientRows, batch: CohortBatch, rows: Sequence[int]
    ) -> Tensor:
        """Fill ``cohort.grads`` and update ``cohort.buffers`` for ``rows``; see :meth:`Executor.backward`."""
        if self._crew is None or self._crew.cohort is not cohort:
            self.close()
            self._crew = _Crew(module, cohort, self._size(module, cohort) - 1, self.compile)
        shares = shares_of(rows, len(self._crew.workers) + 1)
        batches = batch.rows()
        own, first = CohortBatch(rows=batches[: len(shares[0])]), len(shares[0])
        with _one_thread(), self._crew.working(module, shares[1:], batches[first:]):
            losses = self._own.backward(module, cohort, own, shares[0])
        found = self._crew.losses[list(rows)].to(losses.dtype)
        found[:first] = losses
        return found

    def close(self) -> None:
        """Let go of the worker processes."""
        if self._crew is not None:
            self._crew.release()
            self._crew = None

    def _size(self, module: "FederatedModule", cohort: ClientRows) -> int:
        if module.device.type != "cpu":
            raise ConfigurationError(
                f"executor ProcessExecutor: it is for the CPU, and this run is on {module.device}; use VectorizedExecutor"
            )
        clients = len(next(iter(cohort.params.values())))
        return min(self.num_workers or len(os.sched_getaffinity(0)), clients)


def shares_of(rows: Sequence[int], parts: int) -> list[list[int]]:
    """Split rows into consecutive shares whose sizes differ by one at most, the larger first."""
    size, larger = divmod(len(rows), parts)
    ends = [size * (part + 1) + min(part + 1, larger) for part in range(parts)]
    return [list(rows[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


class _Crew:
    """The workers of one cohort, which lies in shared memory from now on."""

    def __init__(self, module: "FederatedModule", cohort: ClientRows, size: int, compile: bool) -> None:
        self.cohort = cohort
        stacks = (cohort.params, cohort.grads, cohort.buffers)
        blocks = [block for rows in stacks for block in rows.blocks.values()]
        self.losses = torch.zeros(len(blocks[0]), dtype=torch.float64)
        _check_shared_memory(blocks)
        for block in (*blocks, self.losses):
            _share(block)
        load = Load(
            _pickled(module),
            [(rows.layout, rows.blocks) for rows in stacks],
            self.losses,
            torch.get_float32_matmul_precision(),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            compile,
        )
        self.workers = [_hire() for _ in range(size)]
        try:
            for worker in self.workers:
                worker.send(load)
            for worker in self.workers:
                worker.answer(0)
        except BaseException:
            self.dismiss()
            raise

    @contextmanager
    def working(
        self, module: "FederatedModule", shares: Sequence[list[int]], batches: Sequence[Any]
    ) -> Iterator[None]:
        """Let the workers fill their shares of the rows while the block runs; afterwards they have."""
        modes = bytes(part.training for part in module.model.modules())
        cohort, start, busy = self.cohort, 0, []
        try:
            for worker, share in zip(self.workers, shares, strict=True):
                if not share:
                    continue
                staged = worker.stage(batches[start : start + len(share)])
                start += len(share)
                worker.send(
                    Step(
                        cohort.round,
                        cohort.step,
                        share,
                        cohort.client_ids,
                        cohort.trained_blocks,
                        modes,
                        staged,
                    )
                )
                busy.append(worker)
            yield
            for worker in busy:
                worker.answer(cohort.round)
        except BaseException:
            self.dismiss()  # whatever they are at
            raise

    def release(self) -> None:
        """Make the workers free for another cohort."""
        for worker in self.workers:
            worker.let_go()
        self.workers = []

    def dismiss(self) -> None:
        """End the workers at once."""
        for worker in self.workers:
            worker.process.kill()
        self.workers = []


class _Worker:
    """A worker process as this one sees it."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        # no signal ends a worker, and Python waits for it at the end: let go of it before
        atexit.register(self.connection.close)
        self._staged: list[Tensor] = []
        self._kind: Any = None

    def send(self, request: Any) -> None:
        try:
            self.connection.send(request)
        except OSError as error:
            raise self._gone(0) from error

    def answer(self, round_number: int) -> None:
        """Wait until the newest request is done."""
        wait([self.connection, self.process.sentinel])
        try:
            kind, text = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone(round_number) from error
        if kind == "refused":
            raise ConfigurationError(text)
        if kind == "failed":
            raise RuntimeError(f"in a worker process of ProcessExecutor:\n{text}")

    def stage(self, batches: Sequence[Any]) -> Staged | list[Any]:
        """Put batches where the worker reads them: tensors of equal shape into memory that is kept for them."""
        flat = [tree_flatten(batch) for batch in batches]
        kinds = [
            (
                spec,
                [
                    (leaf.shape, leaf.dtype, leaf.stride()) if torch.is_tensor(leaf) else None
                    for leaf in leaves
                ],
            )
            for leaves, spec in flat
        ]
        if any(kind != kinds[0] for kind in kinds) or None in kinds[0][1]:
            return list(batches)
        new = kinds[0] != self._kind or len(batches) > len(self._staged[0])
        if new:
            self._kind = kinds[0]
            self._staged = [_shared_like(leaf, len(batches)) for leaf in flat[0][0]]
        for index, (leaves, _) in enumerate(flat):
            for target, leaf in zip(self._staged, leaves, strict=True):
                target[index].copy_(leaf)
        return Staged(flat[0][1], self._staged if new else None)

    def let_go(self) -> None:
        self._staged, self._kind = [], None
        try:
            self.connection.send(None)
            self.answer(0)
        except (OSError, ConfigurationError):
            return
        _idle.append(self)

    def _gone(self, round_number: int) -> ConfigurationError:
        self.process.join(1)
        code = self.process.exitcode
        when = f"round {round_number}" if round_number else "its start"
        return ConfigurationError(
            f"executor ProcessExecutor: a worker process ended in {when} (exit code {code}"
            f"{': killed, perhaps for want of memory' if code == -9 else ''}); use fewer num_workers or SequentialExecutor, "
            'and in a script of your own put what it runs under if __name__ == "__main__":'
        )


def _share(tensor: Tensor) -> None:
    """Move a tensor, in place and with all its views, into memory that other processes can map."""
    tensor.share_memory_()  # type: ignore[no-untyped-call]


def _shared_like(tensor: Tensor, count: int) -> Tensor:
    """Shared memory ``[count, *shape]`` for tensors like the given one, in its memory format."""
    strides = torch.empty_like(tensor, device="meta").stride()
    memory = torch.empty(count * tensor.numel(), dtype=tensor.dtype)
    _share(memory)
    return memory.as_strided((count, *tensor.shape), (tensor.numel(), *strides))


_idle: list[_Worker] = []
"""Workers that have started and wait for a cohort."""


def _hire() -> _Worker:
    while _idle:
        worker = _idle.pop()
        if worker.process.is_alive():
            return worker
    return _Worker()


def _pickled(module: "FederatedModule") -> bytes:
    """A module and its precision plugin, without what only the server needs."""
    light = copy.copy(module)
    for name in _SERVER_ONLY:
        light.__dict__.pop(name, None)
    try:
        return pickle.dumps((light, module.trainer.precision_plugin))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"executor ProcessExecutor: the module cannot be sent to worker processes ({error}); use SequentialExecutor, or "
            "functions and classes of a module instead of lambdas and local ones"
        ) from error


def _check_shared_memory(blocks: Sequence[Tensor]) -> None:
    needed = sum(block.numel() * block.element_size() for block in blocks)
    if not _SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if needed > free:
        raise ConfigurationError(
            f"executor ProcessExecutor: the cohort needs {needed / 1e6:,.0f} MB of shared memory, and {_SHARED_MEMORY} has "
            f"{free / 1e6:,.0f} MB left; enlarge it (docker run --shm-size), or use SequentialExecutor"
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: with a process on every core a second one waits for its sibling."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
