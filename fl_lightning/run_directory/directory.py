"""Where a run lives on disk: ``runs/<name>/<config hash>-s<seed>``, one folder per attempt.

The folder is fixed before any logger exists and is the same for the same configuration, so that a resumed run
finds its checkpoints. A fresh ``fit`` takes ``...-s0.2``, then ``...-s0.3``, ...; it never touches an existing folder.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import folder_below, remove_empty, unwritable, user_path

OUTSIDE_THE_HASH = frozenset(
    {
        "checkpoint",
        "ckpt_path",
        "config",
        "name",
        "run_root",
        "seed_everything",
        "threads",
        "trainer.accelerator",
        "trainer.callbacks.RoundCheckpoint",
        "trainer.callbacks.RoundProgress",
        "trainer.check_val_every_n_epoch",
        "trainer.default_root_dir",
        "trainer.devices",
        "trainer.enable_checkpointing",
        "trainer.enable_model_summary",
        "trainer.enable_progress_bar",
        "trainer.log_every_n_steps",
        "trainer.logger",
        "trainer.max_epochs",
        "trainer.max_time",
        "trainer.num_nodes",
        "trainer.profiler",
        "trainer.strategy",
        "wandb",
        "weights_only",
    }
)
"""Settings that change no result or only name the attempt; a callback in a list goes by its class name."""


def config_hash(config: Mapping[str, Any]) -> str:
    """Name a configuration: 8 hex digits of SHA-256 over its canonical JSON without :data:`OUTSIDE_THE_HASH`.

    Args:
        config: The resolved configuration, every default filled in; the order of its keys does not matter.
    """
    canonical = json.dumps(inside_the_hash(config, ""), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def inside_the_hash(node: Any, prefix: str = "") -> Any:
    """A configuration, or the part of it at a dotted prefix with its dot, without :data:`OUTSIDE_THE_HASH`."""
    if isinstance(node, Mapping):
        kept = {key: value for key, value in node.items() if f"{prefix}{key}" not in OUTSIDE_THE_HASH}
        return {key: inside_the_hash(value, f"{prefix}{key}.") for key, value in kept.items()}
    if isinstance(node, list | tuple):
        return [inside_the_hash(x, prefix) for x in node if prefix + class_name(x) not in OUTSIDE_THE_HASH]
    return node


def class_name(entry: Any) -> str:
    """The bare name of an entry's class, empty where it names none."""
    path = entry.get("class_path", "") if isinstance(entry, Mapping) else ""
    return str(path).rpartition(".")[2]


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
    metrics = _File("metrics.jsonl")  # one line per logged round: the source of truth
    result = _File("result.json")  # what the finished run found
    partition = _File("partition.json")  # how the data were spread over the clients
    policy = _File("policy.json")  # what happens to each kind of state in a round
    partition_picture = _File("partition.png")  # the samples of each class at each client
    learning_curve = _File("learning_curve.png")  # accuracy and loss over communication rounds
    class_accuracy = _File("class_accuracy.png")  # of the final server model
    wandb_id = _File("wandb_id")  # the id of the run at W&B, which a resumed run keeps
    error = _File("error.txt")  # the traceback of what ended the run

    @property
    def checkpoints(self) -> Path:
        """The folder of ``last.ckpt`` and ``best.ckpt``, which ``checkpoint.dirpath`` may have put elsewhere."""
        config = yaml.safe_load(self.config.read_text()) if self.config.is_file() else None
        elsewhere = ((config or {}).get("checkpoint") or {}).get("dirpath")
        return Path(elsewhere).expanduser() if elsewhere else self.path / "checkpoints"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other process from training in this folder; the system frees it when the process dies.

        Raises:
            ConfigurationError: Another process has it.
        """
        folder = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigurationError(
                    f"ckpt_path: another process is training in {self.path}; wait for its end or stop it"
                ) from error
            except OSError:
                pass  # a file system that cannot lock
            yield
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Remove the folder with all it holds, and ``runs/<name>`` and ``runs`` where they are empty then."""
        shutil.rmtree(self.path)
        remove_empty(self.path.parents[:2])


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
        newest = self.newest_attempt()
        number = 1 if newest is None else int(newest.path.name[len(self.stem) + 1 :] or 1) + 1
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

    def newest_attempt(self) -> Attempt | None:
        """The attempt with the highest number, None where there is none yet."""
        return next(iter(self.attempts()), None)

    def newest_checkpoint(self, name: str = "last.ckpt") -> Path | None:
        """The checkpoint of a name of the newest attempt that has one: what ``--ckpt_path auto`` means."""
        paths = (attempt.checkpoints / name for attempt in self.attempts())
        return next((path for path in paths if path.is_file()), None)

    def attempt_of(self, checkpoint: Path) -> Attempt | None:
        """The attempt that a checkpoint belongs to, of this run or another one; None where it lies in no run directory."""
        folder = checkpoint.resolve().parent
        around = Attempt(folder.parent)
        known = [*self.attempts(), around] if around.config.is_file() else self.attempts()
        return next((attempt for attempt in known if attempt.checkpoints.resolve() == folder), None)

    def resolve_checkpoint(self, ckpt_path: str) -> Path:
        """Find the file that ``--ckpt_path`` means.

        Args:
            ckpt_path: ``"last"`` or ``"best"`` of the newest attempt that has one, or the path of an existing file.

        Raises:
            ConfigurationError: There is no such checkpoint.
        """
        if ckpt_path not in ("last", "best"):
            path = user_path("ckpt_path", ckpt_path)
            if not path.is_file():
                raise ConfigurationError(
                    f"ckpt_path {path} is not a file; give an existing one, 'last', 'best' or 'auto'"
                )
            return path
        name = f"{ckpt_path}.ckpt"
        found = self.newest_checkpoint(name)
        if found is None:
            others = self.root.glob(f"*/checkpoints/{name}")
            other = max(others, key=lambda path: path.stat().st_mtime, default=None)
            raise ConfigurationError(
                f"ckpt_path {ckpt_path!r} found no {name} in {self.root / self.stem}; give "
                + (f"{other}, of other settings or an older version" if other else "the path of a checkpoint")
                + ", or start without ckpt_path"
            )
        return found


def directory_of(config: Mapping[str, Any]) -> RunDirectory:
    """The directory of all attempts at a resolved configuration.

    Args:
        config: The resolved configuration, every default filled in, its name too; ``~`` is the user's home.
    """
    hashed = config_hash({key: config[key] for key in ("model", "data", "trainer")})
    stem = f"{hashed}-s{config['seed_everything']}"
    return RunDirectory(folder_below(config["run_root"], config["name"]), stem)
