"""What an engine is: it runs command lines, elsewhere or here, and says how they ended."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """A cell's command line.

    Attributes:
        name: What it is called where jobs have names.
        command: The command.
        log: Where its output goes.
        environment: Variables of its environment beside those of the study.
        threads: CPU threads that it uses.
        gpus: Share of a GPU that it uses, 0 for none.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    gpus: float = 0.0


class Engine(ABC):
    """Runs command lines; all that a study knows of a cell beside its exit status lies in the cell's run directory."""

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Start a job, or have it started as soon as there is room."""

    @abstractmethod
    def ended(self) -> dict[str, int]:
        """The exit status of each job that has ended since the last call, by its name."""

    @abstractmethod
    def stop(self) -> None:
        """Let all jobs finish their round, write a checkpoint and end; return when they have."""
