"""Ranks that are copies of this process."""

import ctypes
import fcntl
import gc
import os
import pickle
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from fl_lightning.errors import ConfigurationError
from fl_lightning.launched import silence
from fl_lightning.ranks import LostRank, described, failure_of, is_shared

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MISSES_ANOTHER = 3
_FOLDER = "fl_lightning-ranks-"  # and what makes its name its own
_FRESH = 60.0  # seconds after which a folder that lives is locked
_MOST = 65536  # bytes that a pipe holds


class OneMachine(LightningEnvironment):
    """Ranks of this machine that a run starts itself, whatever number a scheduler has given to the run.

    Attributes:
        own_rank: That of this process.
    """

    own_rank = 0
    creates_processes_externally = False

    def local_rank(self) -> int:
        """The rank on this machine."""
        return self.own_rank

    def node_rank(self) -> int:
        """There is one machine."""
        return 0


class ForkLauncher(_Launcher):
    """Starts the other ranks of this machine as copies of this process (``fork``), which have all that it has.

    This process stays rank 0 of its machine: loggers, terminal and signals are its own. The others end with it, or with what
    was launched. On CPUs every rank computes on one thread.

    Args:
        strategy: Whose ranks they are, a ``CohortStrategy``.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._others: dict[int, tuple[int, int]] = {}

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks work."""
        return True

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Run a function on all ranks; returns what it returns here.

        Raises:
            ConfigurationError: A rank has ended, or processes cannot be copied here.
        """
        strategy, threads = self._strategy, torch.get_num_threads()
        if strategy.world_size == 1:
            return function(*args, **kwargs)
        if reason := cannot_fork():
            raise ConfigurationError(
                f"trainer.devices: {strategy.num_processes}: {reason}; start the ranks by torchrun"
            )
        if strategy.num_nodes > 1 and "MASTER_ADDR" not in os.environ:
            raise ConfigurationError(
                f"trainer.num_nodes: {strategy.num_nodes} needs MASTER_ADDR, MASTER_PORT and NODE_RANK in each node's environment; "
                "torchrun sets them"
            )
        if strategy.root_device.type == "cpu":
            torch.set_num_threads(1)
        with _meeting_folder() as folder:
            try:
                strategy.meeting_place = f"{folder}/ranks" if strategy.num_nodes == 1 else None
                for rank in range(1, strategy.num_processes):
                    self._others[rank] = self._fork(rank, lambda: function(*args, **kwargs), trainer)
                return function(*args, **kwargs)
            except LostRank:
                if ended := self.why_one_ended():
                    raise ended  # noqa: B904  # its cause is that of the other rank
                raise
            finally:
                self.kill(signal.SIGKILL)
                strategy.part()
                torch.set_num_threads(threads)

    def kill(self, signum: Any) -> None:
        """End the other ranks."""
        for pid, pipe in self._others.values():
            with suppress(ProcessLookupError):  # somebody else may have waited for it
                os.kill(pid, signum)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            os.close(pipe)
        self._others = {}

    def _fork(self, rank: int, run: Callable[[], Any], trainer: L.Trainer | None) -> tuple[int, int]:
        """Copy this process; the copy never returns. Gives its number and a pipe that tells why it has failed."""
        ours, theirs = os.pipe()
        # the copy never hears them, whoever sets a handler: who stops a run lets it finish its round, which rank 0 decides
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 on forks beside threads: a rank takes nobody else's locks
                warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                try:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with this process
                    self._strategy.cluster_environment.own_rank = rank
                    _serve(rank, run, trainer, theirs)
                finally:
                    os._exit(1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(theirs)
        return pid, ours

    def why_one_ended(self) -> Exception | None:
        """Why a rank of this machine has ended; None where none has, but of those that miss another one."""
        for rank, (pid, pipe) in self._others.items():
            found = status = 0
            with suppress(ChildProcessError):
                found, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status)
            if not found or code == _MISSES_ANOTHER:
                continue
            if select.select([pipe], [], [], 0)[0] and (said := os.read(pipe, _MOST)):
                return failure_of(rank, *pickle.loads(said))
            memory = (
                ": killed, perhaps for want of memory; use fewer trainer.devices"
                if code == -signal.SIGKILL
                else ""
            )
            return ConfigurationError(f"rank {rank} (process {pid}) has ended, exit code {code}{memory}")
        return None


@contextmanager
def _meeting_folder() -> Iterator[str]:
    """Make a folder in which ranks find each other, after removing those that killed runs have left.

    A lock on the folder tells that its run lives: the system frees it when the last rank has ended.
    """
    for left in Path(gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError), _locked(left) as file:
            state = os.fstat(file)
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > _FRESH:
                shutil.rmtree(left)
    with TemporaryDirectory(prefix=_FOLDER) as folder, ExitStack() as held:
        with suppress(OSError):  # a file system that cannot lock, on which none is removed either
            held.enter_context(_locked(Path(folder)))
        yield folder


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    finally:
        os.close(file)


def _serve(rank: int, run: Callable[[], Any], trainer: L.Trainer | None, pipe: int) -> None:
    """Be another rank: nothing is logged or printed here."""
    gc.freeze()  # a process group of an earlier run would wait for threads that only the first rank has
    os.environ["LOCAL_RANK"] = str(rank)
    silence()
    if trainer is not None:
        trainer.loggers = []
    try:
        run()
    except LostRank:
        os._exit(_MISSES_ANOTHER)
    except Exception as error:
        if not is_shared(error):  # the first rank says so
            told = pickle.dumps(described(error))
            if len(told) > _MOST:  # nobody empties the pipe before this process has ended
                told = pickle.dumps((False, traceback.format_exception_only(error)[0][:1000], [], ""))
            os.write(pipe, told)
        raise
    os._exit(0)


def cannot_fork() -> str | None:
    """Why a process cannot be copied here; None where it can."""
    if sys.platform != "linux":
        return f"processes cannot be copied on {sys.platform}"
    return "a process that uses a GPU cannot be copied" if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch gives it no types
