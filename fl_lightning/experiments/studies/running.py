"""Running the cells of a study: what there is to do, by which engine, in which order, until nothing is left."""

import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from math import ceil
from pathlib import Path

import yaml

from fl_lightning.errors import Diverged
from fl_lightning.experiments.studies.cells import Cell, State, expect_newest_data
from fl_lightning.experiments.studies.engines.base import Engine, Job
from fl_lightning.experiments.studies.sharing import share_first_stages
from fl_lightning.files import write_text

_PAUSE = 0.5  # seconds between two looks
_PATIENCE = 60.0  # seconds after which a shared file system shows what another machine has written


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
        waiting = dict.fromkeys(cell for cell in unique if cell.key not in self.failed)
        submitted: dict[str, Cell] = {}
        before: dict[Cell, State] = {}
        ended: dict[Cell, tuple[int, float]] = {}
        try:
            while waiting or submitted or ended:
                for name, status in self.engine.ended().items():
                    ended[submitted.pop(name)] = status, time.monotonic()
                states = {cell: self._state(cell) for cell in unique}
                for cell, (status, since) in [*ended.items()]:
                    another = states[cell].attempt != before[cell].attempt
                    if states[cell].phase == "stale" and another and not status:
                        cell.data = None  # its data are those of now
                        states[cell] = self._state(cell)
                    there = states[cell].phase == "done" or (states[cell].phase == "stale" and another)
                    if status or there or time.monotonic() - since > _PATIENCE:
                        del ended[cell]
                        if states[cell].phase == "running":  # another study's
                            waiting[cell] = None
                        elif status or states[cell].phase != "done":
                            self.failed[cell.key] = self._error(cell, status, states[cell])
                            if status == Diverged.exit_status:
                                self.diverged.add(cell.key)
                self.show([*states.items()])
                elsewhere = 0
                for cell in [*waiting]:
                    if states[cell].phase == "done":
                        del waiting[cell]
                    elsewhere += states[cell].phase == "running"
                jobs = []
                for cell in [*waiting]:
                    held = cell.parent is not None and cell.parent in (*waiting, *submitted.values(), *ended)
                    if (
                        states[cell].phase != "running"
                        and not held
                        and len(submitted) + elsewhere < self.jobs
                    ):
                        del waiting[cell]
                        submitted[cell.job], before[cell] = cell, states[cell]
                        jobs.append(self._job(cell))
                self.engine.submit(jobs)
                if waiting or submitted or ended:
                    time.sleep(_PAUSE)
        except BaseException:
            self.engine.stop()
            raise

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
