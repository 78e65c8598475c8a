"""Run directory: one folder for each attempt at a run.

The first attempt at a run from YAML is in the folder ``runs/<name>/<config hash>-s<seed>``. The
first attempt at a run from Python is in ``runs/<name>/s<seed>``. For later attempts, ``.2``, ``.3``
and so on are appended to the name of this folder. A new ``fit`` never changes a folder that has a
trained round.
"""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import broken_link, locked, unwritable

Config = dict[str, Any]
"""Settings of a run as in its YAML file, including defaults."""

_SECTIONS = {"name", "seed_everything", "model", "data", "trainer"}

LOCK = ".lock"
"""Name of the lock file in a run's folder. A process that trains in the folder locks the file."""

_GLANCE = 0.1  # seconds; a process that only checks the lock releases it within this time


class _File:
    """Descriptor that returns the path of a file in the folder of an attempt."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, attempt: "Attempt", owner: type) -> Path:
        return attempt.path / self.name


@dataclass(frozen=True)
class Attempt:
    """Folder of an attempt, with the names of its files.

    Attributes:
        path: The folder, such as ``runs/quickstart/1f0c9a7e-s0.2``.
    """

    path: Path

    config = _File("config.yaml")  # all settings of the run, including defaults
    identity = _File("run.json")  # the run's name and tags, and facts that config.yaml lacks
    metrics = _File("metrics.jsonl")  # the metrics of the run, one line per logged round
    result = _File("result.json")  # the final metrics of a finished run
    partition = _File("partition.json")  # the number of samples of each class at each client
    policy = _File("policy.json")  # treatment of each kind of state over the run
    # numbers of samples, rounds and local steps of each client
    participation = _File("participation.csv")
    partition_picture = _File("partition.png")  # picture of partition.json
    test_predictions = _File("test_predictions.csv")  # of the clients' own test samples
    learning_curve = _File("learning_curve.png")  # picture of accuracy and loss over the rounds
    wandb_id = _File("wandb_id")  # the run's id at Weights & Biases; a resumed run has the same id
    error = _File("error.txt")  # traceback of the error that ended the run, if any

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.path / "checkpoints"

    def read_config(self) -> Config:
        """Return all settings of the run, as in ``config.yaml``.

        Raises:
            ConfigurationError: The file cannot be read.
        """
        try:
            config = yaml.safe_load(self.config.read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            config = None
        if not isinstance(config, dict) or not _SECTIONS.issubset(config):
            raise ConfigurationError(
                f"{self.config} is no resolved configuration of a run; restore the file or leave its folder out"
            )
        return config

    def last_error(self) -> str:
        """Return the last line of the traceback in ``error.txt``."""
        lines = self.error.read_text(errors="replace").strip().splitlines()
        return (lines or ["no message"])[-1]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock this folder against other training processes until the block or the process ends.

        Raises:
            ConfigurationError: Another process holds the lock.
        """
        # lock a file instead of the folder: other nodes do not see the lock of a folder
        file = self.path / LOCK
        with ExitStack() as held:
            try:
                try:
                    held.enter_context(locked(file, wait=False))
                except BlockingIOError:
                    time.sleep(_GLANCE)
                    held.enter_context(locked(file, wait=False))
            except BlockingIOError as error:
                raise ConfigurationError(
                    f"ckpt_path: another process is training in {self.path}; wait for its end or stop it"
                ) from error
            yield

    def is_locked(self) -> bool:
        """Return whether a process trains in this folder.

        The check itself locks the folder for a moment; :meth:`lock` waits until the check has
        ended.
        """
        file = self.path / LOCK
        if not file.is_file() or file.is_symlink():
            return False
        try:
            with locked(file, wait=False):
                return False
        except BlockingIOError:
            return True
        except OSError:
            # the folder was removed in the meantime, or the file belongs to a different user
            return False


@dataclass(frozen=True)
class RunDirectory:
    """All attempts at a run.

    A run from YAML is one configuration with one seed. A run from Python is one name and one seed.

    Args:
        root: The folder ``runs/<name>``.
        stem: Name of the first attempt's folder, ``<config hash>-s<seed>`` or ``s<seed>``. Later
            attempts append ``.2``, ``.3`` and so on.
    """

    root: Path
    stem: str

    def attempts(self) -> list[Attempt]:
        """Return the attempts whose folders exist, newest first."""
        pattern = re.compile(re.escape(self.stem) + r"(?:\.([1-9][0-9]*))?")
        matches = ((pattern.fullmatch(path.name), path) for path in self.root.glob(f"{self.stem}*/"))
        numbers = {int(match[1] or 1): Attempt(path) for match, path in matches if match}
        return [numbers[number] for number in sorted(numbers, reverse=True)]

    def new_attempt(self) -> Attempt:
        """Create the folder of the next attempt.

        Processes that call this method at the same time get different folders.

        Raises:
            ConfigurationError: The folder cannot be created.
        """
        number = 1 + max((int(x.path.name[len(self.stem) + 1 :] or 1) for x in self.attempts()), default=0)
        while True:
            path = self.root / (self.stem if number == 1 else f"{self.stem}.{number}")
            try:
                path.mkdir(parents=True)
            except OSError as error:
                if not isinstance(error, FileExistsError) or broken_link(path):
                    raise unwritable(path, error) from error
                number += 1
            else:
                return Attempt(path)

    def next_attempt(self, held: ExitStack) -> Attempt:
        """Create the folder of the next attempt, and lock the folder.

        Args:
            held: Exit stack that holds the lock.
        """
        attempt = self.new_attempt()
        held.enter_context(attempt.lock())
        return attempt

    def newest_checkpoint(self, name: str = "last.ckpt") -> Path | None:
        """Return the checkpoint from the newest attempt that has a checkpoint of this name."""
        paths = (attempt.checkpoints / name for attempt in self.attempts())
        return next((path for path in paths if path.is_file()), None)

    def attempt_of(self, checkpoint: Path) -> Attempt | None:
        """Return the attempt that owns a checkpoint; None if the file is in no run directory.

        The attempt may belong to a different run.
        """
        folder = checkpoint.resolve().parent
        around = Attempt(folder.parent)
        known = [*self.attempts(), around] if around.config.is_file() else self.attempts()
        return next((attempt for attempt in known if attempt.checkpoints.resolve() == folder), None)
