"""The executor that uses every core of a machine: clients spread over processes, their state in shared memory."""

import ctypes
import os
import pickle
import shutil
import signal
import sys
import traceback
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fl_lightning.client_data.cohort_batch import CohortBatch
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import ConfigurationError
from fl_lightning.executors.base import ClientTask, Executor
from fl_lightning.executors.sequential import SequentialExecutor

_SHARED_MEMORY = Path("/dev/shm")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_PATIENCE = 600  # seconds that a worker may be behind this process in a local step
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessExecutor(Executor):
    """The cohort spread over processes, each of which computes its clients one after the other on one thread.

    The same numbers as :class:`~fl_lightning.executors.sequential.SequentialExecutor` on one thread, bit for bit, whatever
    ``num_workers``. In the first local step of a round this process makes copies of itself (``fork``), which have all that
    it has, code and data of one's own too, and end with the round. Until then the rows of the cohort are common to them all;
    what else hooks change between two local steps (an attribute of a layer, say) the copies do not see, and what a model
    itself keeps of its forward pass beside its buffers (a counter) is lost with them.

    Args:
        num_workers: Processes that compute, this one included. Default: the cores that this process may use.
        compile: Whether the model is compiled, see ``SequentialExecutor``; this process does it, alone, in its first local step.

    Raises:
        ConfigurationError: ``num_workers`` is below 1.
    """

    def __init__(self, num_workers: int | None = None, compile: bool = False) -> None:
        if num_workers is not None and num_workers < 1:
            raise ConfigurationError(
                f"ProcessExecutor.num_workers: {num_workers} must be at least 1 (or null for one per core)"
            )
        self.num_workers, self.compile = num_workers, compile
        self._own = SequentialExecutor(compile)
        self._workers: list[_Worker] = []
        self._made_for: tuple[RoundCohort, int] | None = None
        weakref.finalize(self, _kill, self._workers)

    def __reduce__(self) -> Any:
        """A copy has workers of its own."""
        return ProcessExecutor, (self.num_workers, self.compile)

    def backward(
        self, module: ClientTask, cohort: RoundCohort, batch: CohortBatch, rows: Sequence[int]
    ) -> Tensor:
        """Fill ``cohort.grads`` and update ``cohort.buffers`` for ``rows``; see :meth:`~fl_lightning.executors.base.Executor.backward`."""
        if self.compile and not self._own.compiled_for(module.model):
            return self._own.backward(module, cohort, batch, rows)
        if self._made_for is None or self._made_for[0] is not cohort or self._made_for[1] != cohort.round:
            self.close()
            self._start(module, cohort)
        batches, shares = iter(batch.batches()), np.array_split(rows, len(self._workers) + 1)
        parts = [share.tolist() for share in shares if len(share)]
        own, *others = [(part, [next(batches) for _ in part]) for part in parts]
        busy = self._workers[: len(others)]
        try:
            for worker, part in zip(busy, others, strict=True):
                worker.send(cohort.step, *part)
            with self.during_round():
                losses = [self._own.backward(module, cohort, CohortBatch(batches=own[1]), own[0])]
            losses += [torch.tensor(worker.losses(), dtype=losses[0].dtype) for worker in busy]
        except BaseException:
            self.close()  # whatever they are at
            raise
        return torch.cat(losses)

    @contextmanager
    def during_round(self) -> Iterator[None]:
        """One thread: with a process on every core, another one waits for its sibling or keeps a core from its process."""
        threads = torch.get_num_threads()
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
        """End the worker processes."""
        _kill(self._workers)
        self._made_for = None

    def _start(self, module: ClientTask, cohort: RoundCohort) -> None:
        reason = cannot_fork() or (f"this run is on {module.device}" if module.device.type != "cpu" else None)
        if reason:
            raise ConfigurationError(
                f"executor ProcessExecutor: {reason}; use VectorizedExecutor on a GPU, else SequentialExecutor"
            )
        blocks = [
            block for rows in (cohort.params, cohort.grads, cohort.buffers) for block in rows.blocks.values()
        ]
        _share(blocks)
        for _ in range(min(self.num_workers or usable_cores(), len(blocks[0])) - 1):
            self._workers.append(_fork(self._own, module, cohort))
        self._made_for = cohort, cohort.round


class _Worker:
    """A copy of this process that fills rows of the cohort.

    Args:
        pid: The process.
        connection: To it.
        round_number: The round that it was made in.
    """

    def __init__(self, pid: int, connection: "Connection[Any, Any]", round_number: int) -> None:
        self.pid, self.connection, self.round = pid, connection, round_number

    def send(self, step: int, rows: list[int], batches: Sequence[Any]) -> None:
        """Let it compute a local step of some rows."""
        own = tree_map_only(
            Tensor, torch.clone, list(batches)
        )  # without the rest of the stack they are parts of
        try:
            self.connection.send_bytes(pickle.dumps((step, rows, own)))
        except OSError:
            self._gone()

    def losses(self) -> list[float]:
        """Wait for the losses of these rows.

        Raises:
            ConfigurationError: It has found a mistake of the user's, is gone, or does not answer.
            RuntimeError: It has failed.
        """
        try:
            if not self.connection.poll(_PATIENCE):
                raise ConfigurationError(
                    f"executor ProcessExecutor: worker process {self.pid} has not answered for {_PATIENCE} s in round "
                    f"{self.round}; if it was stopped, let it go on (kill -CONT), or use SequentialExecutor"
                )
            losses, error = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._gone()
        if error is not None:
            kind, said, notes, trace = error
            failure: Exception = kind(said)
            for note in notes:
                failure.add_note(note)
            raise failure from RuntimeError(f"in a worker process of ProcessExecutor:\n{trace}")
        return list(losses)

    def _gone(self) -> NoReturn:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        memory = ": killed, perhaps for want of memory" if code == -signal.SIGKILL else ""
        raise ConfigurationError(
            f"executor ProcessExecutor: a worker process ended in round {self.round} (exit code {code}{memory}); use fewer "
            "num_workers, or SequentialExecutor"
        )


def usable_cores() -> int:
    """Cores that this process may use: those it may run on, at most what a container's quota of processor time amounts to."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(allowed, ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or no quota, which is "max"
        return allowed


def cores_of_a_run() -> int:
    """What ``OMP_NUM_THREADS`` says, at most :func:`usable_cores`."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(usable_cores(), int(told)) if told.isdecimal() and int(told) else usable_cores()


def cannot_fork() -> str | None:
    """Why a process cannot be copied here; None where it can."""
    if sys.platform != "linux":
        return f"processes cannot be copied on {sys.platform}"
    return "a process cannot be copied where it sees a GPU" if torch.cuda.is_available() else None


def shared_memory_left() -> float:
    """Bytes of shared memory that a run may take."""
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else float("inf")


def _share(blocks: Sequence[Tensor]) -> None:
    """Move blocks, in place and with all their views, into memory that copies of this process have in common."""
    blocks = [block for block in blocks if not block.is_shared()]  # type: ignore[no-untyped-call]  # torch gives it no types
    needed, left = sum(block.numel() * block.element_size() for block in blocks), shared_memory_left()
    if needed > left:
        raise ConfigurationError(
            f"executor ProcessExecutor: the cohort needs {needed / 1e6:,.0f} MB of shared memory, and {_SHARED_MEMORY} has "
            f"{left / 1e6:,.0f} MB left; enlarge it (docker run --shm-size), or use SequentialExecutor"
        )
    for block in blocks:
        block.share_memory_()  # type: ignore[no-untyped-call]  # torch gives it no types


def _fork(executor: SequentialExecutor, module: ClientTask, cohort: RoundCohort) -> _Worker:
    """Copy this process; the copy never returns."""
    ours, theirs = Pipe()
    # signals wait: a copy that starts now ignores them for good
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        with warnings.catch_warnings():
            # Python 3.12 on forks beside threads: a worker computes on one thread and takes nobody else's locks
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with this process
                _serve(theirs, executor, module, cohort)
            finally:
                os._exit(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return _Worker(pid, ours, cohort.round)


def _serve(
    connection: "Connection[Any, Any]", executor: SequentialExecutor, module: ClientTask, cohort: RoundCohort
) -> None:
    """Compute what is asked for until it is killed: whoever stops a run lets it finish its round."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        cohort.step, rows, batches = pickle.loads(connection.recv_bytes())
        losses: list[float] = []
        error: tuple[type[Exception], str, list[str], str] | None = None
        try:
            losses = executor.backward(module, cohort, CohortBatch(batches=batches), rows).tolist()
        except ConfigurationError as mistake:
            error = ConfigurationError, str(mistake), getattr(mistake, "__notes__", []), ""
        except BaseException as failure:  # noqa: BLE001  # the other process raises it again
            said = traceback.format_exception_only(failure)[0].strip()  # also of one that cannot be printed
            error = RuntimeError, said, getattr(failure, "__notes__", []), traceback.format_exc()
        connection.send_bytes(pickle.dumps((losses, error)))


def _kill(workers: list[_Worker]) -> None:
    ended = [workers.pop() for _ in range(len(workers))]
    living = [worker.pid for worker in ended if worker.pid]
    for pid in living:
        with suppress(ProcessLookupError):  # somebody else may have waited for it
            os.kill(pid, signal.SIGKILL)
    for pid in living:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    for worker in ended:
        worker.connection.close()
