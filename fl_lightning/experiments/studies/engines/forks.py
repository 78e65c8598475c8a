"""Server for Linux that forks a process for each run of a module.

``python -m fl_lightning.experiments.studies.engines.forks SOCKET MODULE`` starts the server. It
imports the module once for all forks, and calls the module's function ``preload`` if this function
exists.

The server runs no computation, because a computation could start threads. A fork of a process with
threads can hang. If ``OMP_NUM_THREADS`` is above 1, OpenBLAS starts threads, but it ends them
before a fork.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned descendants of this process become its children
_MESSAGE = 1 << 16  # largest size of a request in bytes
# padding of the server's command line; each fork writes its arguments there, so that ps shows them
_ROOM = " " * 4000


def adopt_orphans() -> bool:
    """Make orphaned descendants children of this process; return whether this succeeded."""
    return not ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


class Forked:
    """A forked child process with the main methods of ``subprocess.Popen``.

    Attributes:
        pid: Process id.
        returncode: Exit status, or minus the number of the signal that killed the process. None
            until :meth:`poll` or :meth:`wait` has seen that the process has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait until the process ends; return the exit status."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """A server process that forks a process for each run of a module.

    Forked processes outlive the server. Call :func:`adopt_orphans` first, so that this process is
    the parent of all forked processes and receives their exit statuses.

    Args:
        module: Module to run.
        environment: Environment variables of the server and its forks.
        log: File for the server's output.

    Attributes:
        has_served: Whether the server has forked a process.
    """

    def __init__(self, module: str, environment: Mapping[str, str], log: BinaryIO) -> None:
        self.has_served = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), module, _ROOM],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                process_group=0,
                pass_fds=[theirs.fileno()],
            )
        self.close = weakref.finalize(self, _close, self._socket, process)

    @contextmanager
    def start(
        self, arguments: Sequence[str], log: BinaryIO, environment: Mapping[str, str]
    ) -> Iterator[Forked]:
        """Fork a process that runs the module after the ``with`` block.

        If the present process ends within the block, the forked process exits.

        Args:
            arguments: Arguments of the module.
            log: File for the output.
            environment: Environment variables to add to the server's environment.

        Yields:
            The process.

        Raises:
            ConnectionError: The server has ended.
        """
        request = json.dumps({"arguments": arguments, "environment": environment}).encode()
        receiving, sending = os.pipe()
        with open(receiving, "rb") as go, open(sending, "wb", buffering=0) as say_go:
            socket.send_fds(self._socket, [request], [log.fileno(), go.fileno()])
            pid = self._socket.recv(_MESSAGE)
            if not pid:
                raise ConnectionError("the server has ended")
            self.has_served = True
            yield Forked(int(pid))
            with suppress(BrokenPipeError):  # the process was killed, and poll returns its status
                say_go.write(b"\n")


def _close(connection: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    connection.close()
    process.kill()
    process.wait()


def _serve(connection: socket.socket) -> list[str]:
    """Fork a process for each request.

    Only the forked processes return from this function. The result holds the arguments of the
    request.
    """
    # freeze: garbage collection writes to shared memory, and each write copies a page
    gc.freeze()
    files = _files()
    while True:
        request, descriptors, *_ = socket.recv_fds(connection, _MESSAGE, 2)
        # exit if a source file has changed or threads run: a fork would run old code or hang
        if not request or threading.active_count() > 1 or files != _files():
            sys.exit()
        log, go = descriptors
        pid = _fork()
        if not pid:
            break
        os.close(log)
        os.close(go)
        connection.send(str(pid).encode())
    connection.close()
    _show(json.loads(request)["arguments"])
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    if not os.read(go, 1):
        os._exit(128 + signal.SIGTERM)
    os.close(go)
    os.environ.update(json.loads(request)["environment"])
    importlib.invalidate_caches()  # the user may have added modules since the server started
    return list(json.loads(request)["arguments"])


def _files() -> dict[str, tuple[int, int] | None]:
    """Return the modification time and the size of each imported module's file."""
    states: dict[str, tuple[int, int] | None] = {}
    for name, module in [*sys.modules.items()]:
        try:
            state = os.stat(str(getattr(module, "__file__", None)))
        except OSError:
            states[name] = None
        else:
            states[name] = state.st_mtime_ns, state.st_size
    return states


def _fork() -> int:
    """Fork twice, so that the second fork is an orphan.

    Returns:
        The process id of the second fork; 0 in the second fork itself.
    """
    sys.stdout.flush()
    receiving, sending = os.pipe()
    if first := os.fork():
        os.close(sending)
        os.waitpid(first, 0)
        with open(receiving, "rb") as answer:
            return int(answer.read())
    try:
        if second := os.fork():
            os.setpgid(second, second)
            os.write(sending, str(second).encode())
            os._exit(0)
    except OSError:
        os._exit(1)
    os.close(receiving)
    os.close(sending)
    return 0


def _show(arguments: Sequence[str]) -> None:
    """Overwrite the arguments of this process, so that ``ps`` shows the module's command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # start and end address of the arguments; without permission to read them, both are 0
    start, end = int(fields[45]), int(fields[46])
    line = "\0".join([sys.executable, "-m", sys.argv[2], *arguments]).encode()[: max(end - start - 1, 0)]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def main() -> None:
    """Run the server. Each request makes a fork that runs the module."""
    name = sys.argv[2]
    module = importlib.import_module(name)
    getattr(module, "preload", lambda: None)()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        sys.argv[1:] = _serve(connection)
    del sys.modules[name]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
