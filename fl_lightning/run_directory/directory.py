"""Where a run lives on disk: ``runs/<name>/<config hash>-s<seed>``, one folder per attempt.

The folder is fixed before any logger exists and is the same for the same configuration, so that a resumed run
finds its checkpoints. A fresh ``fit`` takes ``...-s0.2``, then ``...-s0.3``, ...; it touches an existing folder only
where a killed attempt has left no checkpoint in it.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import folder_below, remove_empty, user_path

_NUMBER = r"(?:\.([1-9][0-9]*))?"

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
    def lock(self, certain: bool = False) -> Iterator[None]:
        """Keep every other process from training in this folder; the system frees it when the process dies.

        Args:
            certain: Whether a file system that cannot lock (some of networks) counts as another process.

        Raises:
            ConfigurationError: Another process has it.
        """
        folder = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if certain or isinstance(error, BlockingIOError):
                    raise ConfigurationError(
                        f"ckpt_path: another process is training in {self.path}; wait for its end or stop it"
                    ) from error
            yield
        finally:
            os.close(folder)

    def kept_nothing(self) -> bool:
        """Whether there is neither a result nor a checkpoint to go on from, nor a trained round in its metrics."""
        kept = [*self.checkpoints.glob("*.ckpt"), *self.path.rglob("*.ckpt")] or self.result.exists()
        return not kept and (not self.metrics.exists() or self.metrics.read_bytes().count(b"\n") <= 1)

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

    def new_attempt(self) -> Attempt:
        """Create the folder of the next attempt; two processes that start together get two folders.

        Raises:
            ConfigurationError: The folder cannot be created.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            number = max(self._attempts(), default=0)
            while True:
                number += 1
                path = self.root / (self.stem if number == 1 else f"{self.stem}.{number}")
                try:
                    path.mkdir(parents=True)  # a failed first attempt may just have removed the root
                except FileExistsError:
                    continue
                return Attempt(path)
        except OSError as error:
            raise ConfigurationError(
                f"run directory {self.root / self.stem} cannot be created: {error.strerror}; use a folder that you can write to"
            ) from error

    def next_attempt(self, held: ExitStack) -> Attempt:
        """The folder of a run from its start, locked: that of a killed attempt that kept nothing, else a new one.

        Args:
            held: Keeps the lock.

        Raises:
            ConfigurationError: The folder cannot be created.
        """
        newest = self.newest_attempt()
        if newest is not None:
            with ExitStack() as tried, suppress(ConfigurationError, FileNotFoundError):
                tried.enter_context(newest.lock(certain=True))
                if newest.kept_nothing():
                    for path in newest.path.iterdir():
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                    held.push(tried.pop_all())
                    return newest
        while True:
            new = self.new_attempt()
            with suppress(ConfigurationError, FileNotFoundError):  # another start has just found it empty
                held.enter_context(new.lock())
                return new

    def newest_attempt(self) -> Attempt | None:
        """The attempt with the highest number, None where there is none yet."""
        return next(iter(self._newest_first()), None)

    def owns(self, attempt: Attempt) -> bool:
        """Whether an attempt, by the name of its folder, has this configuration and seed."""
        return re.fullmatch(re.escape(self.stem) + _NUMBER, attempt.path.name) is not None

    def newest_checkpoint(self) -> Path | None:
        """The ``last.ckpt`` of the newest attempt that has one: what ``--ckpt_path auto`` means."""
        paths = (attempt.checkpoints / "last.ckpt" for attempt in self._newest_first())
        return next((path for path in paths if path.is_file()), None)

    def attempt_of(self, checkpoint: Path) -> Attempt | None:
        """The attempt that a checkpoint belongs to, None where it is one of no run directory."""
        folder = checkpoint.resolve().parent
        elsewhere = (attempt for attempt in self._newest_first() if attempt.checkpoints.resolve() == folder)
        return attempt_of(checkpoint) or next(elsewhere, None)

    def resolve_checkpoint(self, ckpt_path: str) -> Path:
        """Find the file that ``--ckpt_path`` means.

        Args:
            ckpt_path: ``"last"`` or ``"best"`` of the newest attempt, or the path of an existing file.

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
        newest = self.newest_attempt() or Attempt(self.root / self.stem)
        path = newest.checkpoints / f"{ckpt_path}.ckpt"
        if not path.is_file():
            raise ConfigurationError(
                f"ckpt_path {ckpt_path!r} found no {path.name} in {path.parent}; "
                f"give {self._other_checkpoint(path.name)}, or start without ckpt_path"
            )
        return path

    def _other_checkpoint(self, name: str) -> str:
        """The newest checkpoint of the runs of this name: of this configuration, else of this seed, else of any."""
        seed = self.stem.rpartition("-")[2]

        def nearness(path: Path) -> tuple[bool, bool, float]:
            owned = self.owns(Attempt(path.parents[1]))
            return owned, path.parts[-3].partition(".")[0].endswith(f"-{seed}"), path.stat().st_mtime

        near = max(self.root.glob(f"*/checkpoints/{name}"), key=nearness, default=None)
        if near is None:
            return "the path of a checkpoint"
        if self.owns(Attempt(near.parents[1])):
            return str(near)
        return f"{near}, which has other settings or was written by an older version"

    def _newest_first(self) -> list[Attempt]:
        attempts = self._attempts()
        return [attempts[number] for number in sorted(attempts, reverse=True)]

    def _attempts(self) -> dict[int, Attempt]:
        pattern = re.compile(re.escape(self.stem) + _NUMBER)
        folders = [path for path in self.root.iterdir() if path.is_dir()] if self.root.is_dir() else []
        matches = ((pattern.fullmatch(path.name), path) for path in folders)
        return {int(match[1] or 1): Attempt(path) for match, path in matches if match}


def directory_of(config: Mapping[str, Any]) -> RunDirectory:
    """The directory of all attempts at a resolved configuration.

    Args:
        config: The resolved configuration, every default filled in, its name too; ``~`` is the user's home.
    """
    hashed = config_hash({key: config[key] for key in ("model", "data", "trainer")})
    stem = f"{hashed}-s{config['seed_everything']}"
    return RunDirectory(folder_below(config["run_root"], config["name"]), stem)


def attempt_of(checkpoint: Path) -> Attempt | None:
    """The attempt that an explicit checkpoint belongs to, None where it does not lie in a run directory."""
    folder = checkpoint.resolve().parent
    attempt = Attempt(folder.parent)
    return attempt if attempt.config.is_file() and attempt.checkpoints.resolve() == folder else None
