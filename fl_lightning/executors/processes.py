"""The executor that uses every core of a machine: clients spread over processes, their state in shared memory."""

import shutil
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.client_data.cohort_batch import CohortBatch
from fl_lightning.cohort.client_rows import ClientRows
from fl_lightning.errors import ConfigurationError, check_choice
from fl_lightning.executors.base import ClientTask, Executor
from fl_lightning.executors.cores import usable_cores
from fl_lightning.executors.module_state import ModuleState, ModuleStateReader, common_tensors
from fl_lightning.executors.sequential import SequentialExecutor
from fl_lightning.executors.staging import to_shared_memory
from fl_lightning.executors.worker import InitMessage, StepMessage
from fl_lightning.executors.worker_process import CannotFork, WorkerHandle, forked, pickled, spawned

_SHARED_MEMORY = Path("/dev/shm")


class ProcessExecutor(Executor):
    """The cohort spread over processes, each of which computes its clients one after the other on one thread.

    The same numbers as :class:`~fl_lightning.executors.sequential.SequentialExecutor` on one thread, bit for bit, whatever
    ``num_workers``. Workers start with the first round, as copies of this process (``fork``), and anew where a part of the
    model or the loss is replaced by another object. Tensors of the cohort, and numbers and words that the module and its
    layers hold, alone or in lists and dicts, are always those of the step, and other tensors follow what is written into
    them. What else there is, is what was there when the workers started: attributes whose names begin with ``_``, hooks,
    buffers that are assigned anew, inside of objects of one's own and of lists of tensors. What a model itself changes or
    makes in its forward pass beside its buffers (a counter, a random matrix) stays in its process. Of the trainer they
    see the round and nothing more.
    Where that is not possible (not on Linux; or a GPU is there and this process has computed gradients before) they are
    new processes (``spawn``): that takes seconds, needs a module that can be pickled, and in a script of one's own
    ``if __name__ == "__main__":`` before what it runs.

    Args:
        num_workers: Processes that compute, this one included. Default: the cores that this process may use.
        compile: Whether each of them compiles the model, see ``SequentialExecutor``.
        start: ``"fork"`` or ``"spawn"``. Default: the first of them that is possible.

    Raises:
        ConfigurationError: ``num_workers`` is below 1, or there is no such way to start.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        compile: bool = False,
        start: Literal["fork", "spawn"] | None = None,
    ) -> None:
        if num_workers is not None and num_workers < 1:
            raise ConfigurationError(
                f"ProcessExecutor.num_workers: {num_workers} must be at least 1 (or null for one per core)"
            )
        if start is not None:
            check_choice("ProcessExecutor.start", start, ("fork", "spawn"))
        self.num_workers, self.compile, self.start = num_workers, compile, start
        self._pool: _WorkerPool | None = None
        self._own = SequentialExecutor(compile)
        self._state_reader = ModuleStateReader()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has workers of its own."""
        return {**vars(self), "_pool": None, "_state_reader": ModuleStateReader()}

    def backward(
        self, module: ClientTask, cohort: ClientRows, batch: CohortBatch, rows: Sequence[int]
    ) -> Tensor:
        """Fill ``cohort.grads`` and update ``cohort.buffers`` for ``rows``; see :meth:`~fl_lightning.executors.base.Executor.backward`."""
        state = self._state_reader.read(module)
        if self._pool is None or not self._pool.belongs_to(cohort, state):
            self.close()
            self._pool = _WorkerPool(module, cohort, state, self._size(module, cohort) - 1, self)
        shares, batches = split_evenly(rows, len(self._pool.workers) + 1), batch.batches()
        own, first = CohortBatch(batches=batches[: len(shares[0])]), len(shares[0])
        with self.during_round(), self._pool.working(state, shares[1:], batches[first:]):
            losses = self._own.backward(module, cohort, own, shares[0])
        found = self._pool.losses[list(rows)].to(losses.dtype)
        found[:first] = losses
        # what the model itself has replaced meanwhile is no news for the workers
        self._pool.state = self._state_reader.read(module)
        return found

    @contextmanager
    def during_round(self) -> Iterator[None]:
        """One thread: with a process on every core, another one waits for its sibling or keeps a core from its process."""
        threads = torch.get_num_threads()
        if threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    @property
    def threads(self) -> int:
        """One: see :meth:`during_round`."""
        return 1

    def close(self) -> None:
        """Let go of the worker processes."""
        if self._pool is not None:
            self._pool.release()
            self._pool = None
        self._state_reader = ModuleStateReader()

    def _size(self, module: ClientTask, cohort: ClientRows) -> int:
        if module.device.type != "cpu":
            raise ConfigurationError(
                f"executor ProcessExecutor: it is for the CPU, and this run is on {module.device}; use VectorizedExecutor"
            )
        clients = len(next(iter(cohort.params.values())))
        return min(self.num_workers or usable_cores(), clients)


def split_evenly(rows: Sequence[int], parts: int) -> list[list[int]]:
    """Split rows into consecutive shares whose sizes differ by one at most, the larger first."""
    size, larger = divmod(len(rows), parts)
    ends = [size * (part + 1) + min(part + 1, larger) for part in range(parts)]
    return [list(rows[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


class _WorkerPool:
    """The workers of one cohort, which lies in shared memory from now on."""

    def __init__(
        self,
        module: ClientTask,
        cohort: ClientRows,
        state: ModuleState,
        size: int,
        settings: ProcessExecutor,
    ) -> None:
        self.cohort, self.state = cohort, state
        stacks = (cohort.params, cohort.grads, cohort.buffers)
        blocks = [block for rows in stacks for block in rows.blocks.values()]
        self.losses = torch.zeros(len(blocks[0]), dtype=torch.float64)
        _check_shared_memory(blocks)
        common = common_tensors(module, {*cohort.params, *cohort.buffers})
        for block in (*blocks, self.losses, *common):
            to_shared_memory(block)
        rows = [(rows.layout, rows.blocks) for rows in stacks]
        load = InitMessage(module, rows, self.losses, common, settings.compile)
        self.workers: list[WorkerHandle] = []
        weakref.finalize(self, _kill_all, self.workers).atexit = False
        try:
            if settings.start != "spawn" and (settings.start or sys.platform == "linux"):
                self._fork_workers(load, size, settings.start is None)
            if len(self.workers) < size:
                load = pickled(load)
                self.workers += [spawned(load) for _ in range(size)]
                for worker in self.workers:
                    worker.answer(0)
        except BaseException:
            self.kill()
            raise

    def belongs_to(self, cohort: ClientRows, state: ModuleState) -> bool:
        """Whether the workers have what a step of this cohort needs."""
        return self.cohort is cohort and state.has_objects_of(self.state)

    def _fork_workers(self, load: InitMessage, size: int, or_otherwise: bool) -> None:
        try:
            for _ in range(size):
                self.workers.append(forked(load))
            for worker in self.workers:
                worker.answer(0)
        except CannotFork as reason:
            self.kill()
            if not or_otherwise:
                raise ConfigurationError(f"ProcessExecutor.start: fork: {reason}; use spawn") from reason

    @contextmanager
    def working(
        self, state: ModuleState, shares: Sequence[list[int]], batches: Sequence[Any]
    ) -> Iterator[None]:
        """Let the workers fill their shares of the rows while the block runs; afterwards they have."""
        attributes = state.attributes
        cohort, start, busy = self.cohort, 0, []
        common = (cohort.round, cohort.step, cohort.client_ids, cohort.trained_blocks)
        try:
            for worker, rows in zip(self.workers, shares, strict=True):
                if rows:
                    staged = worker.staging.put(batches[start : start + len(rows)])
                    start += len(rows)
                    news = None if attributes == worker.attributes else attributes
                    worker.send(StepMessage(*common, news, rows, staged))
                    worker.attributes = attributes
                    busy.append(worker)
            yield
            for worker in busy:
                worker.answer(cohort.round)
        except BaseException:
            self.kill()  # whatever they are at
            raise

    def release(self) -> None:
        """Make the workers free for another cohort, or end them."""
        for worker in self.workers:
            worker.release()
        self.workers.clear()

    def kill(self) -> None:
        """End the workers at once."""
        _kill_all(self.workers)


def _kill_all(workers: list[WorkerHandle]) -> None:
    for worker in workers:
        worker.kill()
    workers.clear()


def shared_memory_left() -> float:
    """Bytes of shared memory that a run may take."""
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else float("inf")


def _check_shared_memory(blocks: Sequence[Tensor]) -> None:
    needed, left = sum(block.numel() * block.element_size() for block in blocks), shared_memory_left()
    if needed > left:
        raise ConfigurationError(
            f"executor ProcessExecutor: the cohort needs {needed / 1e6:,.0f} MB of shared memory, and {_SHARED_MEMORY} has "
            f"{left / 1e6:,.0f} MB left; enlarge it (docker run --shm-size), or use SequentialExecutor"
        )
