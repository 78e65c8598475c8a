"""Base class of engines. An engine trains cells on this machine or on other machines."""

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Training of a cell.

    Attributes:
        name: Name of the job.
        module: Module whose function ``main`` trains the cell. If it is called again, the cell resumes.
        arguments: Arguments of the module.
        log: File to which the output is appended.
        threads: Number of CPU threads (default 1).
        gpus: Number of GPUs (default 0). A fraction is a share of one GPU.
    """

    name: str
    module: str
    arguments: Sequence[str]
    log: Path
    threads: int = 1
    gpus: float = 0.0

    @property
    def command(self) -> list[str]:
        """Command line of the job."""
        return [sys.executable, "-m", self.module, *self.arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that are added for the job."""
        return {"OMP_NUM_THREADS": str(self.threads)}


class Engine(ABC):
    """Base class of engines.

    An engine returns exit statuses only. The result of a cell is in the cell's run directory.

    Args:
        module: Module of all jobs.

    Attributes:
        module: Module of all jobs.
        cores: Number of CPU cores.
        gpus: Number of GPUs.
    """

    cores: int
    gpus: int

    def __init__(self, module: str) -> None:
        self.module = module

    @abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Start or queue jobs."""

    @abstractmethod
    def ended(self) -> dict[str, int]:
        """Return the exit status of each job that has ended since the last call.

        The keys are the names of the jobs.
        """

    @abstractmethod
    def stop(self) -> None:
        """Tell all jobs to finish their rounds and write checkpoints. Wait until all jobs end."""


def run_command(command: Sequence[str], log: str, folder: str, environment: Mapping[str, str]) -> int:
    """Run a command line on a worker. This function needs only the standard library.

    Args:
        command: Command line. If the worker receives SIGINT, the command is terminated.
        log: File to which the command's output is appended.
        folder: Working directory.
        environment: Environment variables to add to the worker's environment.

    Returns:
        The exit status. Even if this function raises an exception, the command has ended.
    """
    signals: list[int] = []
    # without this handler, SIGINT could raise KeyboardInterrupt before the process exists
    signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**os.environ, **environment},
        )
    try:
        while process.poll() is None:
            if signals:
                signals.clear()
                process.terminate()
            time.sleep(0.1)
    finally:
        process.wait()
    return process.returncode
