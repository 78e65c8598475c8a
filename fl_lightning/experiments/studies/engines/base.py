"""What an engine is: it runs command lines, elsewhere or here, and says how they ended."""

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
    """A cell's command line. It may run again after it was killed: it goes on from its checkpoint then.

    Attributes:
        name: What it is called where jobs have names.
        command: The command.
        log: Where its output goes.
        threads: CPU threads that it uses.
        gpus: Share of a GPU that it uses, 0 for none.
    """

    name: str
    command: Sequence[str]
    log: Path
    threads: int = 1
    gpus: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its environment beside those of the study."""
        return {"OMP_NUM_THREADS": str(self.threads)}


class Engine(ABC):
    """Runs command lines; all that a study knows of a cell beside its exit status lies in the cell's run directory.

    Attributes:
        cores: CPU cores that it has.
        gpus: GPUs that it has.
    """

    cores: int
    gpus: int

    @abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Start jobs, or have them started as soon as there is room."""

    @abstractmethod
    def ended(self) -> dict[str, int]:
        """The exit status of each job that has ended since the last call, by its name."""

    @abstractmethod
    def stop(self) -> None:
        """Let all jobs finish their round, write a checkpoint and end; return when they have."""


def run_command(command: Sequence[str], log: str, folder: str, environment: Mapping[str, str]) -> int:
    """Run a command line on the machine of a worker, which needs nothing but Python for it.

    Args:
        command: The command. SIGINT, or what a scheduler has in its place, terminates it.
        log: The file that its output is added to.
        folder: Its working directory.
        environment: Variables of its environment beside those of the worker.

    Returns:
        Its exit status; it has ended also where this function has not returned.
    """
    asked: list[int] = []
    # an exception could come before there is a process to terminate; and where SIGINT is ignored there is none
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    # not fl_lightning.files.no_link, which a worker need not find
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
            if asked:
                asked.clear()
                process.terminate()
            time.sleep(0.1)
    finally:
        process.wait()
    return process.returncode
