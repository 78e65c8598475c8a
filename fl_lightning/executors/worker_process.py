"""Worker processes as the process that has them sees them: how they start, answer and end."""

import atexit
import copy
import os
import pickle
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing

from fl_lightning.errors import ConfigurationError
from fl_lightning.executors.base import ClientTask
from fl_lightning.executors.module_state import Attributes
from fl_lightning.executors.staging import Staging
from fl_lightning.executors.worker import END, InitMessage, serve

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
    "_methods",
    "communication",
    "_hparams",
    "_hparams_initial",
    "tracking_layers",
    "_modes",
)
"""What a client's loss has no use for, some of it impossible to pickle."""

_open: "set[Connection[Any, Any]]" = set()
"""This process's ends of the connections to living workers."""


class CannotFork(Exception):
    """A copy of this process cannot compute gradients."""


class WorkerHandle:
    """A worker process.

    Args:
        start: ``"fork"`` or ``"spawn"``.
        load: What a forked worker starts with; a spawned one gets it by :meth:`send`.

    Attributes:
        staging: Through which it gets its batches.
        attributes: What it knows of the module beside tensors.
    """

    def __init__(self, start: str, load: InitMessage | None) -> None:
        if start == "spawn":
            resource_tracker.ensure_running()  # its own start, once a process, lets the signals through again
        context: Any = torch.multiprocessing.get_context(start)
        self.reusable = start == "spawn"
        self.staging = Staging()
        self.attributes: list[Attributes] | None = None
        self.connection, other = context.Pipe()
        _open.add(self.connection)
        self.process = context.Process(
            target=_forked if load is not None else serve, args=(other, load), daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 on forks beside threads: a worker computes on one thread and takes nobody else's locks
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            with _no_signals():
                self.process.start()
        other.close()

    def send(self, request: Any) -> None:
        """Send a request."""
        try:
            self.connection.send(request)
        except ConnectionError as error:
            raise self._gone(0) from error
        except (
            OSError
        ) as error:  # the worker lives: its sockets have paths below the folder for temporary files
            raise ConfigurationError(
                f"executor ProcessExecutor: a worker process cannot be sent its work ({error}); set TMPDIR to a folder with a "
                "short path, or use SequentialExecutor"
            ) from error

    def answer(self, round_number: int) -> None:
        """Wait until the newest request is done.

        Raises:
            ConfigurationError: The worker has found a mistake of the user's, or is gone.
            RuntimeError: It has failed.
            CannotFork: It is a copy of a process that cannot be copied.
        """
        wait([self.connection, self.process.sentinel])
        try:
            kind, text = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone(round_number) from error
        if kind == "refused":
            raise ConfigurationError(text)
        if kind == "cannot fork":
            raise CannotFork(text)
        if kind == "failed":
            said, notes, trace = text
            failure = RuntimeError(said)
            for note in notes:
                failure.add_note(note)
            raise failure from RuntimeError(f"in a worker process of ProcessExecutor:\n{trace}")

    def release(self) -> None:
        """Make it free for another cohort, or end it."""
        if not self.reusable:
            self.close()
            self._wait(5)
            if self.process.is_alive():
                self.process.kill()
            return
        self.staging, self.attributes = Staging(), None
        try:
            self.connection.send(None)
            self.answer(0)
        except (OSError, ConfigurationError):
            return
        _idle.append(self)

    def close(self) -> None:
        """Close the connection: the worker ends."""
        _open.discard(self.connection)
        _end(self.connection)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join(5)
        self.close()

    def _wait(self, seconds: float) -> None:
        """Wait for its end; a join could not do it with a limit, since a forked copy keeps no pipe that tells of its end."""
        deadline = time.monotonic() + seconds
        while self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _gone(self, round_number: int) -> ConfigurationError:
        self._wait(1)
        code = self.process.exitcode
        when = f"round {round_number}" if round_number else "its start"
        memory = ": killed, perhaps for want of memory" if code == -9 else ""
        script = ""
        if self.reusable and not round_number:
            script = '; a script of your own needs if __name__ == "__main__": before what it runs'
        return ConfigurationError(
            f"executor ProcessExecutor: a worker process ended in {when} (exit code {code}{memory}); use fewer num_workers, "
            f"or SequentialExecutor{script}"
        )


@contextmanager
def _no_signals() -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP: a process that starts now inherits that, and ignores them for good later on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_idle: list[WorkerHandle] = []
"""Spawned workers that wait for a cohort."""


def forked(load: InitMessage) -> WorkerHandle:
    """A worker that is a copy of this process; its first answer says whether that works."""
    return WorkerHandle("fork", load)


def spawned(load: InitMessage) -> WorkerHandle:
    """A worker in a process of its own, perhaps one that has served before; its next answer is that to ``load``."""
    worker = None
    while _idle and worker is None:
        worker = _idle.pop()
        worker = worker if worker.process.is_alive() else None
    worker = worker or WorkerHandle("spawn", None)
    worker.send(load)
    return worker


def pickled(load: InitMessage) -> InitMessage:
    """The same with its module as bytes, without what only the server needs.

    Raises:
        ConfigurationError: The module cannot be pickled.
    """
    module: ClientTask = load.module
    light = copy.copy(module)
    for name in _SERVER_ONLY:
        light.__dict__.pop(name, None)
    try:
        return replace(load, module=pickle.dumps((light, module.trainer.precision_plugin)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"executor ProcessExecutor: the module cannot be sent to worker processes ({error}); use SequentialExecutor, or "
            "functions and classes of a module instead of lambdas and local ones"
        ) from error


def _forked(connection: "Connection[Any, Any]", load: InitMessage) -> None:
    # A copy must not keep open what this process had: its lock on the run, and the ends of connections, whose closing is
    # the end of a worker. The numbers stay taken, for objects that close theirs when they are collected.
    with open(os.devnull) as nothing:
        for number in map(int, os.listdir("/dev/fd")):
            if number > 2 and number not in (connection.fileno(), nothing.fileno()):
                os.dup2(nothing.fileno(), number)
    serve(connection, load)


@atexit.register
def _close_all() -> None:
    # no signal ends a worker, and Python waits for its children at the end: let go of them before
    for connection in _open:
        _end(connection)


def _end(connection: "Connection[Any, Any]") -> None:
    """Tell a worker to end: the end of the connection alone would not reach it while another child of this process lives."""
    with suppress(OSError):
        connection.send(END)
    connection.close()
