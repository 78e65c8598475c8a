"""The checkpoint that the setting ``--ckpt_path`` means: a path, ``last``, ``best`` or ``auto``."""

import os
from pathlib import Path

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.checkpoint_io import load_checkpoint
from fl_lightning.experiments.run_directory.directory import RunDirectory
from fl_lightning.files import user_path


def find_checkpoint(
    directory: RunDirectory, ckpt_path: str | os.PathLike[str] | None, rounds: int | None = None
) -> Path | None:
    """Return the checkpoint file for the setting ``--ckpt_path``; None for a new run.

    Args:
        directory: All attempts at the run.
        ckpt_path: The setting. ``"last"`` and ``"best"`` refer to the newest attempt that has such a
            checkpoint. ``"auto"`` is the last checkpoint of the newest attempt with the same number
            of planned rounds. Without such an attempt, ``"auto"`` starts a new run.
        rounds: Number of planned rounds; None accepts all attempts.

    Raises:
        ConfigurationError: The checkpoint is missing.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "auto":
        return _newest_of_plan(directory, rounds)
    if ckpt_path not in ("last", "best"):
        return user_path("ckpt_path", ckpt_path)
    name = f"{ckpt_path}.ckpt"
    path = directory.newest_checkpoint(name)
    if path is None:
        other = _other_checkpoint(directory, name)
        raise ConfigurationError(
            f"ckpt_path {ckpt_path!r} found no {name} in {directory.root / directory.stem}; give "
            + (f"{other}, of another seed or other settings" if other else "the path of a checkpoint")
            + ", or start without ckpt_path"
        )
    return path


def _newest_of_plan(directory: RunDirectory, rounds: int | None) -> Path | None:
    paths = [attempt.checkpoints / "last.ckpt" for attempt in directory.attempts()]
    paths = [path for path in paths if path.is_file()]
    if not paths and (other := _other_checkpoint(directory, "last.ckpt")) is not None:
        print(f"--ckpt_path auto starts a new run; {other} has another seed or other settings", flush=True)
    for path in paths:
        # milestones and the decay of learning rates depend on the number of planned rounds
        planned = load_checkpoint(path)["fl_lightning"]["total_rounds"]
        if rounds in (None, planned):
            return path
        print(
            f"{path} is of a run planned for {planned} rounds, not {rounds}: --ckpt_path auto ignores it; "
            "--ckpt_path last would extend that run",
            flush=True,
        )
    return None


def _other_checkpoint(directory: RunDirectory, name: str) -> Path | None:
    """Return the newest checkpoint with this file name among all runs in the folder."""
    others = directory.root.glob(f"*/checkpoints/{name}")
    return max(others, key=lambda path: path.stat().st_mtime, default=None)
