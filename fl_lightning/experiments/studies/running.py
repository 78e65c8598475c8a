"""Running the cells of a study: what there is to do, by which engine, in which order, until nothing is left."""

import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import Literal

import yaml

from fl_lightning.errors import Diverged
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.studies.cells import Cell, State, expect_newest_data
from fl_lightning.experiments.studies.engines.base import Engine, Job
from fl_lightning.experiments.studies.sharing import share_first_stages
from fl_lightning.files import write_text

_PAUSE = 0.5  # seconds between two looks
_PATIENCE = 60.0  # seconds after which a shared file system shows what another machine has written


@dataclass
class _Life:
    """The turn of a cell in this process; cells with a result have none.

    Attributes:
        phase: ``"waiting"``, ``"submitted"`` to the engine, or ``"ended"`` while its result is looked for.
        before: Its attempt when it was submitted.
        status: The exit status of its job.
        ended: When its job ended, in seconds of the monotonic clock.
    """

    phase: Literal["waiting", "submitted", "ended"] = "waiting"
    before: Attempt | None = None
    status: int = 0
    ended: float = 0.0


class Runner:
    """Runs cells, each at most once, and those that others go on from first.

    A cell that another process trains is waited for. One that fails is kept out of the way: the others go on.

    Args:
        folder: The study's folder, for the configurations and the output of the cells.
        engine: Who runs them.
        jobs: How many run at a time, those of other processes included.
        accept_stale: Whether results of other source count as done.
        show: Called with all cells and their states, again and again, before others are started; an error of it ends all.
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        jobs: int,
        accept_stale: bool = False,
        show: Callable[[Sequence[tuple[Cell, State]]], None] = lambda cells: None,
    ) -> None:
        self.folder, self.engine, self.jobs, self.accept_stale, self.show = (
            folder,
            engine,
            jobs,
            accept_stale,
            show,
        )
        self.failed: dict[Path, str] = {}
        self.diverged: set[Path] = set()
        self._done: dict[Cell, State] = {}

    def run(self, cells: Sequence[Cell]) -> None:
        """Run all cells that have no result yet, and those whose data are not those of newer cells: one of a family at first, which shows the data of now.

        Afterwards ``failed`` has the errors of cells that ended with one, by their keys, and ``diverged`` the keys of those that left
        the finite numbers.
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
        """Those to run again: all of a family of which one was, else one of it, which goes on from no other where there is such."""
        found = expect_newest_data([self._state(cell) for cell in unique], unique)
        stale = [] if self.accept_stale else [x for x in found if x not in tried and x.key not in self.failed]
        shown = {cell.family for cell in tried if cell.key not in self.failed}
        first = {cell.family: cell for cell in sorted(stale, key=lambda cell: cell.parent is None)}
        return [cell for cell in stale if cell.family in shown or cell is first[cell.family]]

    def _run(self, unique: Sequence[Cell]) -> None:
        left = {cell: _Life() for cell in unique if cell.key not in self.failed}
        try:
            while left:
                for name, status in self.engine.ended().items():
                    life = next(
                        life for cell, life in left.items() if cell.job == name and life.phase == "submitted"
                    )
                    life.phase, life.status, life.ended = "ended", status, time.monotonic()
                states = {cell: self._state(cell) for cell in unique}
                for cell in [cell for cell, life in left.items() if life.phase == "ended"]:
                    self._settle(cell, left, states)
                self.show([*states.items()])
                self._submit(left, states)
                if left:
                    time.sleep(_PAUSE)
        except BaseException:
            self.engine.stop()
            raise

    def _settle(self, cell: Cell, left: dict[Cell, "_Life"], states: dict[Cell, State]) -> None:
        """Find out what became of a cell whose job has ended, as soon as the file system shows it."""
        life = left[cell]
        another = states[cell].attempt != life.before
        if states[cell].phase == "stale" and another and not life.status:
            cell.data = None  # its data are those of now
            states[cell] = self._state(cell)
        there = states[cell].phase == "done" or (states[cell].phase == "stale" and another)
        if not (life.status or there or time.monotonic() - life.ended > _PATIENCE):
            return
        del left[cell]
        if states[cell].phase == "running":  # another study's
            left[cell] = _Life()
        elif life.status or states[cell].phase != "done":
            self.failed[cell.key] = self._error(cell, life.status, states[cell])
            if life.status == Diverged.exit_status:
                self.diverged.add(cell.key)

    def _submit(self, left: dict[Cell, "_Life"], states: Mapping[Cell, State]) -> None:
        """Submit as many cells as may run now; a cell waits for its parent, and for another process that trains the cell."""
        waiting = [cell for cell, life in left.items() if life.phase == "waiting"]
        for cell in [cell for cell in waiting if states[cell].phase == "done"]:
            waiting.remove(cell)
            del left[cell]
        running = sum(life.phase == "submitted" for life in left.values())
        running += sum(states[cell].phase == "running" for cell in waiting)
        ready = [cell for cell in waiting if states[cell].phase != "running" and cell.parent not in left]
        jobs = []
        for cell in ready[: max(self.jobs - running, 0)]:
            left[cell] = _Life("submitted", before=states[cell].attempt)
            jobs.append(self._job(cell))
        self.engine.submit(jobs)

    def _state(self, cell: Cell) -> State:
        """A cell's state; one that is done stays so."""
        state = self._done.get(cell) or cell.state(self.accept_stale)
        if state.phase == "done":
            self._done[cell] = state
        return state

    def log(self, cell: Cell) -> Path:
        """The file of a cell's output."""
        return self.folder / "logs" / f"{cell.job}.log"

    def _job(self, cell: Cell) -> Job:
        file, log = self.folder / "cells" / f"{cell.job}.yaml", self.log(cell)
        checkpoint = cell.config["checkpoint"]
        keep_rounds = sorted(cell.keep_rounds.union(checkpoint["keep_rounds"] or ())) or None
        config = {**cell.config, "checkpoint": {**checkpoint, "keep_rounds": keep_rounds}}
        write_text(file, f"# {cell.name}\n{yaml.safe_dump(config, sort_keys=False)}")
        log.parent.mkdir(parents=True, exist_ok=True)
        # not fit itself: engines run a command again that was killed, and only then it is known where to go on
        command = [sys.executable, "-m", "fl_lightning.cli.study_cell", str(file.resolve())]
        branch = cell.branch(self.accept_stale)
        command += [f"--branch={branch.resolve()}"] if branch is not None else []
        command += ["--accept-stale"] if self.accept_stale else []
        command += [f"--data={json.dumps(cell.data)}"] if cell.data is not None else []
        gpus = self.engine.gpus if config["trainer"]["accelerator"] != "cpu" else 0
        share = 1 / ceil(self.jobs / gpus) if gpus else 0.0
        return Job(cell.job, command, log, threads=config["threads"] or 1, gpus=share)

    def _error(self, cell: Cell, status: int, state: State) -> str:
        """Why a cell has no result, in a line."""
        if state.phase == "stale" and not status:
            return f"it was not trained as the study was started ({state.why}); the same command goes on with what is there now"
        if not status:
            return f"it ended after round {state.round} of {cell.rounds}; early stopping or trainer.max_time leaves no cell that can be compared"
        log = self.log(cell)
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        of_last_try = takewhile(lambda line: not line.startswith("python -m"), reversed(lines))
        said = next((line for line in of_last_try if line.startswith("error: ")), "")
        killed = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{said.removeprefix('error: ') or killed}; its output: {log}"
