"""The cells of a study: ordinary runs in ordinary run directories, and what is known of each."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from typing_extensions import TypedDict

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.checkpoint_io import load_run
from fl_lightning.experiments.run_directory.description import directory_of
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.finished import Result, read_result
from fl_lightning.experiments.run_directory.source import provenance
from fl_lightning.experiments.studies.first_stages import other_origin
from fl_lightning.experiments.studies.stale import differences
from fl_lightning.round.record import Origin

Phase = Literal["done", "stale", "running", "stopped", "failed", "missing"]
"""``done``: a result by this source. ``stale``: one by another source. ``running``: a process trains it. ``stopped``: it has a checkpoint
to go on from. ``failed``: its newest attempt ended with an error. ``missing``: none of these; an attempt that went on from another run is
not the cell's."""

RUNS = "cells"
"""The folder of all runs of all studies, one below it for each number of rounds: two that need the same cell find it in one place."""

_TAIL = 1 << 16  # bytes of metrics.jsonl that hold its last row


class State(NamedTuple):
    """What is known of a cell.

    Attributes:
        phase: Where it stands.
        attempt: The attempt that says so.
        result: Its ``result.json``.
        why: Of a stale cell, what is otherwise than now; of a failed one, its error; of a missing one, from which other run what is there
            went on.
        round: The last round that is logged.
    """

    phase: Phase
    attempt: Attempt | None = None
    result: Result | None = None
    why: str = ""
    round: int = 0


@dataclass(eq=False)
class Cell:
    """One run of a study.

    Attributes:
        labels: Its label of each axis.
        seed: Its seed.
        config: Its resolved configuration.
        parent: The cell in which the rounds up to ``shared_rounds`` are trained.
        shared_rounds: How many rounds it has in common with its parent.
        keep_rounds: The rounds whose checkpoints others go on from.
        data: The digests of the data that it must have been trained on, None where nobody knows.
    """

    labels: dict[str, str]
    seed: int
    config: Config
    parent: "Cell | None" = None
    shared_rounds: int = 0
    keep_rounds: set[int] = field(default_factory=set)
    data: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.directory = directory_of(self.config)
        self.now = provenance(self.config)

    @property
    def name(self) -> str:
        """Its labels and seed, such as ``"method=GN E=100 seed=0"``."""
        return " ".join(
            f"{axis.rpartition('.')[2]}={label}" for axis, label in {**self.labels, "seed": self.seed}.items()
        )

    @property
    def key(self) -> Path:
        """Where its runs are: cells of equal configuration, rounds and seed are one run."""
        return self.directory.root / self.directory.stem

    @property
    def family(self) -> str:
        """What the data of cells follow from: those of one family must be trained on the same."""
        return json.dumps([self.config["data"], self.seed], sort_keys=True)

    @property
    def job(self) -> str:
        """What it is called where a folder has no room for a path."""
        return f"{self.key.parent.name}-{self.key.name}"

    @property
    def rounds(self) -> int:
        """The planned rounds, 0 where a budget decides them."""
        return max(int(self.config["trainer"]["max_epochs"]), 0)

    def state(self, accept_stale: bool = False) -> State:
        """What the run directories say now.

        Args:
            accept_stale: Whether a result by other source or versions counts as done.
        """
        stale: State | None = None
        attempts, origin = self._attempts()
        for attempt in attempts:
            result = _finished(attempt, self.rounds)
            if result is None:
                continue
            why = differences(result.get("provenance", []), self.now) or self._other_data(result)
            if not why or accept_stale:
                return State("done", attempt, result, why, int(result["rounds"]))
            stale = stale or State("stale", attempt, result, why)
        if not attempts:
            return State("missing", why=origin)
        newest, last = attempts[0], _last_round(attempts[0])
        if newest.is_locked():
            return State("running", newest, round=last)
        if stale is not None and stale.attempt is newest:
            return stale
        if newest.error.exists():
            return State("failed", newest, why=_last_line(newest.error), round=last)
        if self._resumable(newest, accept_stale):
            return State("stopped", newest, round=last)
        return State("missing", newest, why=_damaged(newest), round=last)

    def checkpoint(self, accept_stale: bool = False) -> Path | None:
        """The checkpoint that its newest attempt goes on from; None where it has none, is finished or is by other source."""
        newest = next(iter(self._attempts()[0]), None)
        if newest is None or not self._resumable(newest, accept_stale):
            return None
        return newest.checkpoints / "last.ckpt"

    def _attempts(self) -> tuple[list[Attempt], str]:
        """Its attempts, the newest first, without those that went on from another run; and in words from which the newest of these did."""
        every = self.directory.attempts()
        origins = [other_origin(_origins(one), self.config, self.directory.root) for one in every]
        own = [attempt for attempt, origin in zip(every, origins, strict=True) if not origin]
        return own, next(filter(None, origins), "")

    def branch(self, accept_stale: bool = False) -> Path | None:
        """The checkpoint of its parent that it goes on from where it has none of its own.

        None where there is none; one that is damaged is named, and the cell trains the shared rounds itself.
        """
        if self.parent is None or (found := self.parent.state(accept_stale)).attempt is None:
            return None
        path = found.attempt.checkpoints / f"round_{self.shared_rounds}.ckpt"
        if found.phase != "done" or not path.is_file():
            return None
        try:
            load_run(path)
        except ConfigurationError:
            print(
                f"damaged: {path}; {self.name} trains the rounds until {self.shared_rounds} itself",
                flush=True,
            )
            return None
        return path

    def _other_data(self, result: Result) -> str:
        """What of a result's data is not as newer cells of equal settings have it, in words."""
        found = result.get("data", {})
        names = [name for name in self.data or {} if found.get(name) != (self.data or {})[name]]
        return f"other data than newer cells: {', '.join(names)}" if names else ""

    def _resumable(self, attempt: Attempt, accept_stale: bool) -> bool:
        path = attempt.checkpoints / "last.ckpt"
        if not path.is_file() or attempt.result.exists():
            return False
        record = _record(path, path.stat().st_mtime_ns)
        return record is not None and (accept_stale or not differences(record["provenance"], self.now))


def _origins(attempt: Attempt) -> list[Origin]:
    """The checkpoints from which an attempt went on otherwise; empty while a process trains it."""
    with suppress(ConfigurationError):
        return list(read_result(attempt.result).get("continued_from", []))
    path = attempt.checkpoints / "last.ckpt"
    record = _record(path, path.stat().st_mtime_ns) if path.is_file() and not attempt.is_locked() else None
    return record["continued_from"] if record is not None else []


class _Source(TypedDict):
    """What has computed a checkpoint, and from which others."""

    provenance: list[dict[str, str]]
    continued_from: list[Origin]


@cache
def _record(checkpoint: Path, written: int) -> _Source | None:
    """What has computed a checkpoint, and what from, None where it cannot be read; read once, however often a study looks."""
    try:
        record = load_run(checkpoint)["fl_lightning"]["record"]
    except ConfigurationError:
        return None
    return {
        "provenance": record.get("provenance", []),
        "continued_from": record.get("continued_from", []),
    }


def expect_newest_data(states: Sequence[State], cells: Sequence[Cell]) -> list[Cell]:
    """Let finished cells of equal settings of data and seed expect the data of the newest; those that are not done then."""
    newest: dict[str, tuple[float, dict[str, str]]] = {}
    for own, state in zip((cell.family for cell in cells), states, strict=True):
        if state.attempt is not None and state.result is not None and state.result.get("data"):
            found = state.attempt.result.stat().st_mtime, dict(state.result["data"])
            newest[own] = max(newest.get(own, found), found, key=lambda entry: entry[0])
    for cell in cells:
        cell.data = newest[cell.family][1] if cell.family in newest else None
    return [cell for cell in cells if cell.state().phase != "done"]


def _finished(attempt: Attempt, rounds: int) -> Result | None:
    try:
        result = read_result(attempt.result)
    except ConfigurationError:
        return None
    return result if result["rounds"] == result["planned_rounds"] == (rounds or result["rounds"]) else None


def _damaged(attempt: Attempt) -> str:
    """What is wrong with the result of an attempt; empty where there is none, or it is one."""
    try:
        if attempt.result.exists():
            read_result(attempt.result)
    except ConfigurationError as error:
        return str(error)
    return ""


def _last_round(attempt: Attempt) -> int:
    """The last round of whole rows in ``metrics.jsonl``, of which only the end is read, again and again."""
    try:
        with attempt.metrics.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
            *rows, _ = file.read().split(b"\n")
        return int(json.loads(rows[-1])["round"])
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
