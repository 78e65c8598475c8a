"""Base class of engines, which run command lines here or elsewhere and return exit statuses."""

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Command line of a cell; if it is killed and rerun, it resumes from the cell's checkpoint.

    Attributes:
        name: Name of the job.
        command: Command line.
        log: File of the output.
        threads: Number of CPU threads (default 1).
        gpus: Share of a GPU (default 0).
    """

    name: str
    command: Sequence[str]
    log: Path
    threads: int = 1
    gpus: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables to add to the study's."""
        return {"OMP_NUM_THREADS": str(self.threads)}


class Engine(ABC):
    """Base class of engines. Apart from its exit status, a cell's results are in its run directory.

    Attributes:
        cores: Number of CPU cores.
        gpus: Number of GPUs.
    """

    cores: int
    gpus: int

    @abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Start or queue jobs."""

    @abstractmethod
    def ended(self) -> dict[str, int]:
        """Return the exit statuses, by job name, of jobs that have ended since the last call."""

    @abstractmethod
    def stop(self) -> None:
        """Let all jobs finish their rounds and write checkpoints; wait until all have ended."""


def run_command(command: Sequence[str], log: str, folder: str, environment: Mapping[str, str]) -> int:
    """Run a command line on a worker; this function needs only the standard library.

    Args:
        command: Command line; SIGINT terminates it.
        log: File to which the command's output is appended.
        folder: Working directory.
        environment: Environment variables to add to the worker's.

    Returns:
        The exit status. If this function raises an exception, the command has ended as well.
    """
    signals: list[int] = []
    # a KeyboardInterrupt could come before the process exists, or never if SIGINT is ignored
    signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    # the opener repeats fl_lightning.files.no_link, as the worker may lack this package
    with open(log, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666)) as output:
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
