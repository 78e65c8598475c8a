"""``metrics.jsonl``: one JSON object per logged round, the run's source of truth.

Floats are written with all their digits and read back bit for bit. JSON has no NaN or infinity: they are the
strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which any JSON reader accepts, Python's ``float(...)``
and JavaScript's ``Number(...)`` convert, and :func:`read_metrics` turns back into floats.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import no_link, plain, restored, unwritable


class JSONLinesLogger(Logger):
    """Appends each round's metrics to ``<save_dir>/metrics.jsonl``; nothing is created before the first row.

    Only rows with the key ``"round"`` are written: Lightning's own, which count steps and epochs, are not
    rounds. Each row is one write to the file, so a killed run leaves at most one half-written line, the last.

    Args:
        save_dir: The run's folder.
    """

    name = version = ""  # the folder is the run: nothing is nested in it by name

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(save_dir) / "metrics.jsonl"

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.path.parent)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append one row.

        Args:
            metrics: Scalars, tensors, or lists of them by name; without ``"round"`` nothing is written.
            step: Not written: the round is in the metrics.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        if "round" not in metrics:
            return
        row = {"round": 0} | plain(dict(metrics))  # it comes first
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", opener=no_link) as file:
                file.write(line)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run's settings are in ``config.yaml``."""

    @rank_zero_only
    def save(self) -> None:
        """Bring the rows written so far safely onto the disk."""
        if self.path.exists():
            with open(self.path, "ab", opener=no_link) as file:
                os.fsync(file.fileno())


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """All rows of a ``metrics.jsonl``, in order; a half-written last line is left out.

    Raises:
        ConfigurationError: There is no such file, or a line other than the last is not a row.
    """
    return [row for row, _ in _parse(Path(path))]


def lines_until(path: str | os.PathLike[str], round: int) -> list[bytes]:
    """The lines of all rows up to a round, byte for byte; none of the rounds between may be missing.

    Args:
        path: A ``metrics.jsonl``. Its first row may be of any round: a run that started from a checkpoint
            without a run directory knows none before.
        round: The round of the last row.

    Raises:
        ConfigurationError: There is no such file, a line other than the last is not a row, or the row of a
            round is missing.
    """
    kept = [(int(row["round"]), line + b"\n") for row, line in _parse(Path(path)) if row["round"] <= round]
    present = {number for number, _ in kept}
    missing = next((r for r in range(min(present, default=round), round + 1) if r not in present), None)
    if missing is not None:
        raise ConfigurationError(
            f"{path} has no row of round {missing}, but the checkpoint is of round {round}; "
            "restore the file, or start without ckpt_path"
        )
    return [line for _, line in kept]


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
