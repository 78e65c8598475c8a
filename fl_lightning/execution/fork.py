"""Launcher that starts the ranks (processes) of a run as forks."""

import ctypes
import gc
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from fl_lightning.errors import ConfigurationError
from fl_lightning.launched import silence
from fl_lightning.ranks import LostRank, described, failure_of, is_shared

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MISSES_ANOTHER = 3  # exit code of a rank that lost the connection to another rank
_PIPE_BYTES = 65536  # capacity of a pipe in bytes


class OneMachine(LightningEnvironment):
    """Lightning environment for forked ranks on one machine, without a scheduler.

    Attributes:
        own_rank: Rank of this process.
    """

    own_rank = 0
    creates_processes_externally = False

    def local_rank(self) -> int:
        """Return this process's rank among the ranks on this machine."""
        return self.own_rank

    def node_rank(self) -> int:
        """Return 0, because there is only one machine."""
        return 0


class ForkLauncher(_Launcher):
    """Launcher that starts the ranks on this machine as forks.

    This process becomes rank 0 of the machine. Only rank 0 writes to loggers and the terminal, and
    only rank 0 handles signals. The other ranks end when rank 0 ends. On CPUs, every rank uses one
    thread.

    Args:
        strategy: The run's ``CohortStrategy``.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._others: dict[int, tuple[int, int]] = {}

    @property
    def is_interactive_compatible(self) -> bool:
        """Return True, because notebooks can use this launcher."""
        return True

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Run a function on all ranks, and return the result of this process.

        Raises:
            ConfigurationError: Another rank has failed, or this process cannot fork.
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
        with TemporaryDirectory(prefix="fl_lightning-ranks-") as folder:
            try:
                strategy.meeting_place = f"{folder}/ranks" if strategy.num_nodes == 1 else None
                for rank in range(1, strategy.num_processes):
                    self._others[rank] = self._fork(rank, lambda: function(*args, **kwargs), trainer)
                return function(*args, **kwargs)
            except LostRank:
                if ended := self.why_one_ended():
                    raise ended  # noqa: B904  # its cause is the other rank's traceback
                raise
            finally:
                self.kill(signal.SIGKILL)
                strategy.part()
                torch.set_num_threads(threads)

    def kill(self, signum: Any) -> None:
        """Send a signal to all other ranks, and wait until these ranks have ended."""
        for pid, pipe in self._others.values():
            with suppress(ProcessLookupError):  # the process may already have ended
                os.kill(pid, signum)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            os.close(pipe)
        self._others = {}

    def _fork(self, rank: int, run: Callable[[], Any], trainer: L.Trainer | None) -> tuple[int, int]:
        """Fork this process. Return the fork's process id and a pipe for its error report."""
        ours, theirs = os.pipe()
        # block the signals in the fork, because only rank 0 decides when a run stops
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        collects = gc.isenabled()
        gc.disable()  # until the fork has frozen what it must not free
        try:
            with warnings.catch_warnings():
                # ignore Python 3.12's warning: a rank uses none of this process's threads
                warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                try:
                    if sys.platform == "linux":  # die with the parent: 1 is PR_SET_PDEATHSIG
                        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                    self._strategy.cluster_environment.own_rank = rank
                    # keep an earlier process group: freeing the group would wait for threads that a fork lacks
                    gc.freeze()
                    if collects:
                        gc.enable()
                    _serve(rank, run, trainer, theirs)
                finally:
                    os._exit(1)
        finally:
            if collects:
                gc.enable()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(theirs)
        return pid, ours

    def why_one_ended(self) -> Exception | None:
        """Return the error of a rank that has ended on this machine; None if all ranks are running.

        Ranks that lost the connection to another rank are ignored.
        """
        for rank, (pid, pipe) in self._others.items():
            ended = status = 0
            with suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status)
            if not ended or code == _MISSES_ANOTHER:
                continue
            if select.select([pipe], [], [], 0)[0] and (report := os.read(pipe, _PIPE_BYTES)):
                return failure_of(rank, *pickle.loads(report))
            message = f"rank {rank} (process {pid}) has ended, exit code {code}"
            if code == -signal.SIGKILL:
                message += ": killed, perhaps because memory was short; use fewer trainer.devices"
            return ConfigurationError(message)
        return None


def _serve(rank: int, run: Callable[[], Any], trainer: L.Trainer | None, pipe: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    silence()
    if trainer is not None:
        trainer.loggers = []
    try:
        run()
    except LostRank:
        os._exit(_MISSES_ANOTHER)
    except Exception as error:
        if not is_shared(error):  # rank 0 reports errors that all ranks share
            report = pickle.dumps(described(error))
            # a longer report would block: the pipe is read only after this process has ended
            if len(report) > _PIPE_BYTES:
                report = pickle.dumps((False, traceback.format_exception_only(error)[0][:1000], [], ""))
            os.write(pipe, report)
        raise
    os._exit(0)


def cannot_fork() -> str | None:
    """Return the reason why this process cannot fork; None if it can fork."""
    if sys.platform != "linux":
        return f"processes cannot be copied on {sys.platform}"
    return "a process that uses a GPU cannot be copied" if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch gives it no types
