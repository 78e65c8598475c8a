"""The cells of a study and their states. Each cell is an ordinary run with a run directory."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.checkpoint_io import load_checkpoint
from fl_lightning.experiments.run_directory.config_digest import directory_of
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.result import Result, read_result
from fl_lightning.experiments.run_directory.source import provenance
from fl_lightning.experiments.studies.first_stages import other_origin
from fl_lightning.round.record import Origin

Phase = Literal["done", "stale", "running", "stopped", "failed", "missing"]
"""Phase of a cell.

- ``done``: The cell has a result, maybe of other code.
- ``stale``: The result was computed on other data than newer cells, or by other code, if such
  cells are computed anew.
- ``running``: A process trains the cell.
- ``stopped``: The cell is not running, but can resume from a checkpoint.
- ``failed``: The newest attempt ended with an error.
- ``missing``: The cell has no usable attempt.

Attempts that continue another run are ignored."""

RUNS = "cells"
"""Name of the folder with the runs of all studies.

A run is shared by all studies that need it. Runs with different numbers of rounds are in different
subfolders."""

_TAIL = 1 << 16  # bytes to read from the end of metrics.jsonl, enough for the last row


class CellState(NamedTuple):
    """State of a cell.

    Attributes:
        phase: Phase of the cell.
        attempt: Attempt that determines the phase, or None.
        result: Content of the attempt's ``result.json``, or None.
        why: Reason for the phase, such as an error message; ``""`` if no reason is known. For a
            result of other code, the versions that differ.
        round: Last logged round (default 0).
    """

    phase: Phase
    attempt: Attempt | None = None
    result: Result | None = None
    why: str = ""
    round: int = 0

    @property
    def diverged(self) -> bool:
        """Whether a non-finite update ended the attempt."""
        return self.phase == "failed" and self.why.startswith("Diverged: ")


@dataclass(eq=False)
class Cell:
    """One run of a study.

    Attributes:
        labels: Label of each axis.
        seed: Seed of the run.
        config: Resolved configuration.
        rerun: Whether a result of other code is ``stale``, so that it is computed anew (default False).
        parent: Cell that trains the first ``shared_rounds`` rounds for this cell, or None.
        shared_rounds: Number of rounds shared with the parent.
        keep_rounds: Rounds whose checkpoints are kept because other cells continue from them.
        data: Expected digests of a result's data; None if any data are accepted.
    """

    labels: dict[str, str]
    seed: int
    config: Config
    rerun: bool = False
    parent: "Cell | None" = None
    shared_rounds: int = 0
    keep_rounds: set[int] = field(default_factory=set)
    data: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.directory = directory_of(self.config)
        self.now = provenance(self.config)

    @property
    def name(self) -> str:
        """Labels and seed as a text, such as ``"method=GN E=100 seed=0"``."""
        return " ".join(
            f"{axis.rpartition('.')[2]}={label}" for axis, label in {**self.labels, "seed": self.seed}.items()
        )

    @property
    def key(self) -> Path:
        """Folder of the cell's first attempt.

        Cells with the same configuration, number of rounds and seed share this folder.
        """
        return self.directory.root / self.directory.stem

    @property
    def family(self) -> str:
        """Data settings and seed as JSON.

        Cells with equal data settings and equal seed form a family. All cells of a family must be
        trained on the same data.
        """
        return json.dumps([self.config["data"], self.seed], sort_keys=True)

    @property
    def job(self) -> str:
        """Name of the cell's job and of the job's log file. The name has no slashes."""
        return f"{self.key.parent.name}-{self.key.name}"

    @property
    def rounds(self) -> int:
        """Planned number of rounds; 0 if a budget of epochs determines the number."""
        return max(int(self.config["trainer"]["max_epochs"]), 0)

    def state(self) -> CellState:
        """Return the cell's state, read from its run directories."""
        attempts, origin = self._attempts()
        trained = self._trained(attempts)
        if trained is not None and trained.phase == "done":
            return trained
        if not attempts:
            return CellState("missing", why=origin)
        newest, last = attempts[0], last_round(attempts[0])
        if newest.is_locked():
            return CellState("running", newest, round=last)
        if trained is not None and trained.attempt is newest:
            return trained
        if newest.error.exists():
            return CellState("failed", newest, why=newest.last_error(), round=last)
        if self._resumable(newest):
            return CellState("stopped", newest, round=last)
        return CellState("missing", newest, why=_damage(newest), round=last)

    def _trained(self, attempts: Sequence[Attempt]) -> CellState | None:
        """Return ``done`` or ``stale`` if an attempt has trained all rounds, else None.

        A result of the present code and data is preferred to a result of other code, and this result
        to a stale one. Among equal attempts, the newest is preferred.
        """
        states = []
        for attempt in attempts:
            result = _result(attempt)
            if result is None or not (
                result["rounds"] == result["planned_rounds"] == (self.rounds or result["rounds"])
            ):
                continue
            other_data = self._other_data(result)
            other_code = changed_code(result.get("provenance", []), self.now)
            phase: Phase = "stale" if other_data or (other_code and self.rerun) else "done"
            rounds = int(result["rounds"]) if phase == "done" else 0
            states.append(CellState(phase, attempt, result, other_data or other_code, rounds))
        return max(states, key=lambda state: (state.phase == "done", not state.why), default=None)

    def checkpoint(self) -> Path | None:
        """Return the newest attempt's checkpoint, from which the cell can be resumed.

        Return None if the checkpoint is missing or of other code, or if the attempt has a result.
        """
        newest = next(iter(self._attempts()[0]), None)
        if newest is None or not self._resumable(newest):
            return None
        return newest.checkpoints / "last.ckpt"

    def _attempts(self) -> tuple[list[Attempt], str]:
        """Return the usable attempts, newest first, and a text.

        An attempt that continues another run is not usable. The text describes this other run. It
        is empty if all attempts are usable.
        """
        every = self.directory.attempts()
        origins = [other_origin(_origins(attempt), self.config, self.directory.root) for attempt in every]
        counted = [attempt for attempt, origin in zip(every, origins, strict=True) if not origin]
        return counted, next(filter(None, origins), "")

    def branch(self) -> Path | None:
        """Return the parent's checkpoint after the shared rounds, or None.

        The parent is the cell that trains the shared rounds. If the checkpoint is of other code, return
        None. If it is damaged, print a message and return None. The cell then trains the shared rounds
        itself.
        """
        if self.parent is None or (state := self.parent.state()).attempt is None:
            return None
        path = state.attempt.checkpoints / f"round_{self.shared_rounds}.ckpt"
        if state.phase != "done" or state.why or not path.is_file():
            return None
        try:
            load_checkpoint(path)
        except ConfigurationError:
            print(
                f"damaged: {path}; {self.name} trains the first {self.shared_rounds} rounds itself",
                flush=True,
            )
            return None
        return path

    def _other_data(self, result: Result) -> str:
        digests = result.get("data", {})
        names = [name for name, digest in (self.data or {}).items() if digests.get(name) != digest]
        return f"other data than newer cells: {', '.join(names)}" if names else ""

    def _resumable(self, attempt: Attempt) -> bool:
        record = None if attempt.result.exists() else _record(attempt)
        return record is not None and not changed_code(record["provenance"], self.now)


def _origins(attempt: Attempt) -> list[Origin]:
    """Return the checkpoints from which an attempt continued; an empty list while it runs."""
    if (result := _result(attempt)) is not None:
        return list(result.get("continued_from", []))
    record = None if attempt.is_locked() else _record(attempt)
    return record["continued_from"] if record is not None else []


def _result(attempt: Attempt) -> Result | None:
    """Return an attempt's result; None if the file is missing or damaged."""
    with suppress(OSError, ConfigurationError):
        return _result_of(attempt.result, attempt.result.stat().st_mtime_ns)
    return None


@cache
def _result_of(path: Path, written: int) -> Result:
    """Read a result. If the file was written at another time, it is read again."""
    return read_result(path)


def _damage(attempt: Attempt) -> str:
    """Return why a result cannot be read; an empty text if there is no result."""
    try:
        if attempt.result.exists():
            read_result(attempt.result)
    except ConfigurationError as error:
        return str(error)
    return ""


def _record(attempt: Attempt) -> Config | None:
    """Return the record in an attempt's ``last.ckpt``; None if the file cannot be read."""
    path = attempt.checkpoints / "last.ckpt"
    return _record_of(path, path.stat().st_mtime_ns) if path.is_file() else None


@cache
def _record_of(checkpoint: Path, written: int) -> Config | None:
    """Read a record. If the checkpoint was written at another time, it is read again."""
    try:
        record = load_checkpoint(checkpoint)["fl_lightning"]["record"]
    except ConfigurationError:
        return None
    return {key: record.get(key, []) for key in ("provenance", "continued_from")}


def changed_code(computed_by: list[dict[str, str]], now: Mapping[str, str]) -> str:
    """Describe which code has changed since a run.

    The text is empty if nothing has changed. A name that is not in a record is ignored. For
    example, the record of a shared first stage does not contain methods that are used later.

    Args:
        computed_by: Versions of the code, one record for each part of the run.
        now: The present versions.
    """
    if not computed_by:
        return "the result does not name its code"
    changed = {
        f"{name} {before[name]}, now {now[name]}"
        for before in computed_by
        for name in now
        if before.get(name, now[name]) != now[name]
    }
    return "; ".join(sorted(changed))


def expect_newest_data(states: Sequence[CellState], cells: Sequence[Cell]) -> list[Cell]:
    """Require that all cells of a family use the same data as the family's newest result.

    A family consists of all cells with equal data settings and equal seed.

    Returns:
        The cells that are not ``done``. This includes cells with a result on older data.
    """
    newest: dict[str, tuple[float, dict[str, str]]] = {}
    for family, state in zip((cell.family for cell in cells), states, strict=True):
        if state.attempt is not None and state.result is not None and state.result.get("data"):
            entry = state.attempt.result.stat().st_mtime, dict(state.result["data"])
            newest[family] = max(newest.get(family, entry), entry, key=lambda entry: entry[0])
    for cell in cells:
        cell.data = newest[cell.family][1] if cell.family in newest else None
    return [cell for cell in cells if cell.state().phase != "done"]


def last_round(attempt: Attempt) -> int:
    """Return the last logged round of an attempt; 0 if no round is logged."""
    try:
        with attempt.metrics.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
            *rows, _ = file.read().split(b"\n")
        return int(json.loads(rows[-1])["round"])
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0
