"""Runner of a study's cells.

A cell can continue a checkpoint of another cell, the parent. The parent then runs first.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from pathlib import Path

import yaml

from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.studies.cells import Cell, CellState, expect_newest_data
from fl_lightning.experiments.studies.engines.base import Engine, Job
from fl_lightning.experiments.studies.first_stages import family_of, smallest_freeze_round
from fl_lightning.files import write_text

_PAUSE = 0.5  # seconds between two checks of all cells
# time in seconds after which another machine's files are visible on a shared file system
_PATIENCE = 60.0


@dataclass
class _Running:
    """A cell that this process runs.

    Attributes:
        before: Newest attempt when the job was submitted, or None.
        status: Exit status of the job; None until the job has ended.
        ended: Time at which the job ended, in seconds of the monotonic clock.
    """

    before: Attempt | None
    status: int | None = None
    ended: float = 0.0


class Runner:
    """Runner of cells. A cell runs at most once, and after its parent.

    The parent of a cell is another cell that trains the first rounds for both. The runner waits for
    cells that other processes train. It continues if a cell fails.

    Args:
        folder: Folder of the study. The runner writes the cells' configurations and output to it.
        engine: Engine that runs the cells.
        jobs: Largest number of cells that run at a time, including cells that other processes run.
        show: Function that is called repeatedly with all cells and their states. An error in this
            function ends the runner.
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        jobs: int,
        show: Callable[[Sequence[tuple[Cell, CellState]]], None] = lambda cells: None,
    ) -> None:
        self.folder, self.engine, self.jobs, self.show = folder, engine, jobs, show
        self.failed: dict[Path, str] = {}
        self._done: dict[Cell, CellState] = {}

    def run(self, cells: Sequence[Cell]) -> None:
        """Run all cells without a result. Then rerun cells whose data have changed.

        Cells with equal data settings and seed are a family. One cell of each family is rerun
        first, because its result records the present data. Afterwards, ``failed`` maps the keys of
        failed cells to errors.
        """
        unique = [*{cell.key: cell for cell in reversed(cells)}.values()][::-1]
        share_first_stages(unique)
        self._run(unique)
        tried: set[Cell] = set()
        while again := self._on_other_data(unique, tried):
            tried.update(again)
            for cell in again:
                self._done.pop(cell, None)
            self._run(unique)

    def _on_other_data(self, unique: Sequence[Cell], tried: Collection[Cell]) -> list[Cell]:
        """Return the cells to rerun because their data have changed.

        Cells with equal data settings and seed are a family. The first call returns one cell of
        each family, preferably without a parent. After this cell has been rerun, the next call
        returns the other cells.
        """
        outdated = expect_newest_data([self._state(cell) for cell in unique], unique)
        stale = [cell for cell in outdated if cell not in tried and cell.key not in self.failed]
        shown = {cell.family for cell in tried if cell.key not in self.failed}
        first = {cell.family: cell for cell in sorted(stale, key=lambda cell: cell.parent is None)}
        return [cell for cell in stale if cell.family in shown or cell is first[cell.family]]

    def _run(self, unique: Sequence[Cell]) -> None:
        waiting = [cell for cell in unique if cell.key not in self.failed]
        running: dict[Cell, _Running] = {}
        by_job = {cell.job: cell for cell in unique}
        try:
            while waiting or running:
                for name, status in self.engine.ended().items():
                    run = running[by_job[name]]
                    run.status, run.ended = status, time.monotonic()
                states = {cell: self._state(cell) for cell in unique}
                for cell, run in [*running.items()]:
                    if run.status is not None and self._is_settled(cell, run, run.status, states):
                        del running[cell]
                        # another study may train this cell now
                        waiting += [cell] * (states[cell].phase == "running")
                self.show([*states.items()])
                waiting = [cell for cell in waiting if states[cell].phase != "done"]
                left = {*waiting, *running}
                elsewhere = sum(states[cell].phase == "running" for cell in waiting)
                ready = [x for x in waiting if states[x].phase != "running" and x.parent not in left]
                busy = elsewhere + sum(run.status is None for run in running.values())
                started = ready[: max(self.jobs - busy, 0)]
                running |= {cell: _Running(states[cell].attempt) for cell in started}
                waiting = [cell for cell in waiting if cell not in running]
                self.engine.submit([self._job(cell) for cell in started])
                if waiting or running:
                    time.sleep(_PAUSE)
        except BaseException:
            self.engine.stop()
            raise

    def _is_settled(self, cell: Cell, run: _Running, status: int, states: dict[Cell, CellState]) -> bool:
        """Return whether the files of an ended job are visible. If so, record a failure."""
        another = states[cell].attempt != run.before
        if states[cell].phase == "stale" and another and not status:
            cell.data = None  # the new result was computed on the present data
            states[cell] = self._state(cell)
        there = states[cell].phase == "done" or (states[cell].phase == "stale" and another)
        if not (status or there or time.monotonic() - run.ended > _PATIENCE):
            return False
        if states[cell].phase != "running" and (status or states[cell].phase != "done"):
            self.failed[cell.key] = self._error(cell, status, states[cell])
        return True

    def _state(self, cell: Cell) -> CellState:
        state = self._done.get(cell) or cell.state()
        if state.phase == "done":
            self._done[cell] = state
        return state

    def log(self, cell: Cell) -> Path:
        """Return the file to which a cell's output is written."""
        return self.folder / "logs" / f"{cell.job}.log"

    def _job(self, cell: Cell) -> Job:
        file, log = self.folder / "cells" / f"{cell.job}.yaml", self.log(cell)
        checkpoint = cell.config["checkpoint"]
        keep_rounds = sorted(cell.keep_rounds.union(checkpoint["keep_rounds"] or ())) or None
        config = {**cell.config, "checkpoint": {**checkpoint, "keep_rounds": keep_rounds}}
        write_text(file, f"# {cell.name}\n{yaml.safe_dump(config, sort_keys=False)}")
        log.parent.mkdir(parents=True, exist_ok=True)
        branch = cell.branch()
        options = {
            "branch": branch and str(branch.resolve()),
            "data": cell.data,
            "rerun": cell.rerun,
        }
        arguments = [str(file.resolve()), json.dumps(options)]
        gpus = self.engine.gpus if config["trainer"]["accelerator"] != "cpu" else 0
        share = 1 / ceil(self.jobs / gpus) if gpus else 0.0
        return Job(cell.job, self.engine.module, arguments, log, threads=config["threads"] or 1, gpus=share)

    def _error(self, cell: Cell, status: int, state: CellState) -> str:
        """Return the reason why a cell has no result, in one line."""
        if state.phase == "stale" and not status:
            return f"code or data have changed since the study was started ({state.why}); run the same command again"
        if not status:
            return f"it ended after round {state.round} of {cell.rounds}; leave out early stopping and trainer.max_time"
        log = self.log(cell)
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        of_last_try = takewhile(lambda line: not line.startswith("python -m"), reversed(lines))
        message = next((line for line in of_last_try if line.startswith("error: ")), "")
        killed = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{message.removeprefix('error: ') or killed}; its output: {log}"


def share_first_stages(cells: Iterable[Cell]) -> None:
    """Choose a parent for each cell whose first rounds another cell also trains.

    Among cells that differ only in T*, the parent is the cell with the latest T*, or a cell without
    T*. Each other cell then trains only the rounds after T*, from a checkpoint of the parent.

    A cell with a budget of epochs has no parent, because the number of rounds is unknown.
    """
    families: dict[str, list[tuple[float, Cell]]] = {}
    for cell in cells:
        if cell.rounds:
            family = family_of(cell.config)
            families.setdefault(family, []).append((smallest_freeze_round(cell.config), cell))
    for members in families.values():
        latest, parent = max(members, key=lambda entry: entry[0])
        for until, cell in members:
            if 0 < until < latest:
                cell.parent, cell.shared_rounds = parent, int(until)
                parent.keep_rounds.add(int(until))
