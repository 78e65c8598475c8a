"""``metrics.jsonl``: the metrics of a run, one JSON object per logged round.

Floats are written with all digits, so that reading them returns the same bits. JSON has no NaN and
no infinity: these values are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
:func:`read_metrics`, Python's ``float(...)`` and JavaScript's ``Number(...)`` convert the strings.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import plain, restored, unwritable


def joined(write: Callable[..., None]) -> Callable[..., None]:
    """Return a method ``log_metrics`` that writes all metrics of a round as one row.

    Metrics without the key ``"round"``, such as the learning rates of Lightning's
    ``LearningRateMonitor``, are added to the next row. If such a metric is logged several times, the
    row gets the newest value.

    Args:
        write: A logger's method ``log_metrics``.
    """

    @wraps(write)
    def log_metrics(logger: Any, metrics: Mapping[str, Any], step: int | None = None) -> None:
        waiting = logger.__dict__.setdefault("_waiting", {})
        waiting.update((name, value) for name, value in metrics.items() if name != "epoch")
        if "round" in metrics:
            write(logger, logger.__dict__.pop("_waiting"), step)

    return log_metrics


class JSONLinesLogger(Logger):
    """Logger that appends the metrics of each round to ``<save_dir>/metrics.jsonl``.

    The first row creates the file. Each row is a single write: if the run is killed, at most the
    last line is incomplete.

    Args:
        save_dir: The run's folder.
    """

    name = version = ""  # with an empty name, Lightning makes no subfolders

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(save_dir) / "metrics.jsonl"

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.path.parent)

    @rank_zero_only
    @joined
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row to the file, see :func:`joined`.

        Args:
            metrics: Scalars, tensors or lists by name.
            step: Ignored, because the metrics include the round.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        # "round" becomes the first key of the row
        row = {"round": 0} | plain(metrics)
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                file.write(line)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters: ``config.yaml`` has the run's settings."""

    @rank_zero_only
    def save(self) -> None:
        """Sync the file to the disk."""
        if self.path.exists():
            with open(self.path, "ab") as file:
                os.fsync(file.fileno())


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Return all rows of a ``metrics.jsonl`` in order; ignore an incomplete last line.

    Raises:
        ConfigurationError: The file is missing, or a line before the last is not a row of metrics.
    """
    return [row for row, _ in _parse(Path(path))]


def lines_until(path: str | os.PathLike[str], round: int) -> list[bytes]:
    """Return the lines up to a round as bytes, unchanged.

    Args:
        path: A ``metrics.jsonl``. The first row may have any round number: a run from a checkpoint
            outside a run directory has no rows of earlier rounds.
        round: Round of the last line to return.

    Raises:
        ConfigurationError: The file is missing, a line before the last is not a row of metrics, or
            a round between the first row and ``round`` has no row.
    """
    lines = [(int(row["round"]), line + b"\n") for row, line in _parse(Path(path)) if row["round"] <= round]
    present = {number for number, _ in lines}
    missing = next((r for r in range(min(present, default=round), round + 1) if r not in present), None)
    if missing is not None:
        raise ConfigurationError(
            f"{path} has no row of round {missing}, but the checkpoint is of round {round}; "
            "restore the file, or start without ckpt_path"
        )
    return [line for _, line in lines]


def _parse(path: Path) -> list[tuple[dict[str, float], bytes]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"metrics file {path} does not exist; give a run directory that has one"
        ) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = restored(json.loads(line))
            row["round"] = int(row["round"])
            rows.append((row, line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number < len(lines):
                raise ConfigurationError(
                    f"{path} line {number} is not a row of metrics; restore the file or start anew"
                ) from error
    return rows
