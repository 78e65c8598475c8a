"""Where a run lives on disk: ``runs/<name>/<config hash>-s<seed>``, one folder per attempt.

The folder is fixed before any logger exists and is the same for the same configuration, so that a resumed run
finds its checkpoints. A fresh ``fit`` takes ``...-s0.2``, then ``...-s0.3``, ...; it never touches a folder that holds a trained round.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import no_link, unwritable, user_path

Config = dict[str, Any]
"""Settings of a run as YAML holds them, every default filled in."""

LOCK = ".lock"
"""The file that a process holds while it trains in a run's folder."""

_GLANCE = 0.1  # seconds in which who only looks whether a folder is locked has let go of it


class _File:
    """The path of a file or folder of an attempt, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, attempt: "Attempt", owner: type) -> Path:
        return attempt.path / self.name


@dataclass(frozen=True)
class Attempt:
    """One attempt's folder and the names of what it holds.

    Attributes:
        path: The folder, such as ``runs/quickstart/1f0c9a7e-s0.2``.
    """

    path: Path

    config = _File("config.yaml")  # the resolved configuration
    identity = _File("run.json")  # what it is called, and what the configuration leaves to be computed
    metrics = _File("metrics.jsonl")  # one line per logged round: the source of truth
    result = _File("result.json")  # what the finished run found
    partition = _File("partition.json")  # how the data were spread over the clients
    policy = _File("policy.json")  # what happens to each kind of state in a round
    participation = _File("participation.csv")  # what each client holds and did
    histograms = _File("histograms.json")  # of its reports, by name
    partition_picture = _File("partition.png")  # the samples of each class at each client
    learning_curve = _File("learning_curve.png")  # accuracy and loss over communication rounds
    wandb_id = _File("wandb_id")  # the id of the run at W&B, which a resumed run keeps
    error = _File("error.txt")  # the traceback of what ended the run

    @property
    def checkpoints(self) -> Path:
        """The folder of ``last.ckpt`` and ``best.ckpt``, which ``checkpoint.dirpath`` may have put elsewhere."""
        config = self.read_config() if self.config.is_file() else {}
        elsewhere = (config.get("checkpoint") or {}).get("dirpath")
        return self.below(Path(elsewhere).expanduser()) if elsewhere else self.path / "checkpoints"

    def read_config(self) -> Config:
        """Return the resolved configuration.

        Raises:
            ConfigurationError: It cannot be read.
        """
        try:
            config = yaml.safe_load(self.config.read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            config = None
        if not isinstance(config, dict):
            raise ConfigurationError(
                f"{self.config} is no resolved configuration of a run; restore the file or leave its folder out"
            )
        return config

    def below(self, folder: Path) -> Path:
        """Return this attempt's own folder in one that several runs share."""
        return folder / self.path.parent.name / self.path.name

    @contextmanager
    def lock(self, certain: bool = False) -> Iterator[None]:
        """Keep every other process from training in this folder; the system frees it when the process dies.

        Args:
            certain: Whether a file system that cannot lock (some of networks) counts as another process.

        Raises:
            ConfigurationError: Another process has it.
        """
        # a file, since locks of folders do not reach other nodes
        file = no_link(str(self.path / LOCK), os.O_RDWR | os.O_CREAT)
        try:
            try:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(_GLANCE)
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if certain or isinstance(error, BlockingIOError):
                    raise ConfigurationError(
                        f"ckpt_path: another process is training in {self.path}; wait for its end or stop it"
                    ) from error
            yield
        finally:
            os.close(file)

    def is_locked(self) -> bool:
        """Whether a process trains in this folder. To look takes the lock for a moment, which :meth:`lock` forgives."""
        try:
            file = os.open(self.path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # there is none, the run has just ended without a round, or it is somebody else's
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system that cannot lock
            return False
        finally:
            os.close(file)
        return False

    def kept_nothing(self) -> bool:
        """Whether there is neither a checkpoint to go on from nor a trained round in its metrics."""
        rows = self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0
        return rows <= 1 and not any([*self.checkpoints.glob("*.ckpt"), *self.path.rglob("*.ckpt")])


@dataclass(frozen=True)
class RunDirectory:
    """All attempts at one configuration and seed.

    Args:
        root: ``runs/<name>``.
        stem: ``<config hash>-s<seed>``: the first attempt's folder; later ones add ``.2``, ``.3``, ...
    """

    root: Path
    stem: str

    def attempts(self) -> list[Attempt]:
        """The attempts that there are, the newest first."""
        pattern = re.compile(re.escape(self.stem) + r"(?:\.([1-9][0-9]*))?")
        found = ((pattern.fullmatch(path.name), path) for path in self.root.glob(f"{self.stem}*/"))
        numbers = {int(match[1] or 1): Attempt(path) for match, path in found if match}
        return [numbers[number] for number in sorted(numbers, reverse=True)]

    def new_attempt(self) -> Attempt:
        """Create the folder of the next attempt; two processes that start together get two folders.

        Raises:
            ConfigurationError: The folder cannot be created.
        """
        number = 1 + max((int(x.path.name[len(self.stem) + 1 :] or 1) for x in self.attempts()), default=0)
        while True:
            path = self.root / (self.stem if number == 1 else f"{self.stem}.{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise unwritable(path, error) from error
            else:
                return Attempt(path)

    def next_attempt(self, held: ExitStack) -> Attempt:
        """The folder of a run from its start, locked: that of a killed attempt that kept nothing, emptied, else a new one.

        Args:
            held: Keeps the lock.

        Raises:
            ConfigurationError: The folder cannot be created.
        """
        for newest in self.attempts()[:1]:
            with ExitStack() as tried, suppress(ConfigurationError, FileNotFoundError):
                tried.enter_context(newest.lock(certain=True))
                if newest.kept_nothing():
                    for path in (path for path in newest.path.iterdir() if path.name != LOCK):
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                    held.push(tried.pop_all())
                    return newest
        while True:
            new = self.new_attempt()
            with suppress(ConfigurationError, FileNotFoundError):  # another start has just found it empty
                held.enter_context(new.lock())
                return new

    def newest_checkpoint(self, name: str = "last.ckpt") -> Path | None:
        """The checkpoint of a name of the newest attempt that has one."""
        paths = (attempt.checkpoints / name for attempt in self.attempts())
        return next((path for path in paths if path.is_file()), None)

    def attempt_of(self, checkpoint: Path) -> Attempt | None:
        """The attempt that a checkpoint belongs to, of this run or another one; None where it lies in no run directory."""
        folder = checkpoint.resolve().parent
        around = Attempt(folder.parent)
        known = [*self.attempts(), around] if around.config.is_file() else self.attempts()
        return next((attempt for attempt in known if attempt.checkpoints.resolve() == folder), None)

    def other_checkpoint(self, name: str) -> Path | None:
        """Return the newest checkpoint of a name among runs of other settings, or of older versions, with this run's name."""
        others = self.root.glob(f"*/checkpoints/{name}")
        return max(others, key=lambda path: path.stat().st_mtime, default=None)

    def resolve_checkpoint(self, ckpt_path: str) -> Path:
        """Find the file that ``--ckpt_path`` means.

        Args:
            ckpt_path: ``"last"`` or ``"best"`` of the newest attempt that has one, or the path of a file.

        Raises:
            ConfigurationError: There is no such checkpoint.
        """
        if ckpt_path not in ("last", "best"):
            return user_path("ckpt_path", ckpt_path)
        name = f"{ckpt_path}.ckpt"
        found = self.newest_checkpoint(name)
        if found is None:
            other = self.other_checkpoint(name)
            raise ConfigurationError(
                f"ckpt_path {ckpt_path!r} found no {name} in {self.root / self.stem}; give "
                + (f"{other}, of other settings or an older version" if other else "the path of a checkpoint")
                + ", or start without ckpt_path"
            )
        return found
