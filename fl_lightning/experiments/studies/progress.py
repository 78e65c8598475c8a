"""Progress of a running study on the terminal. The progress is read from run directories."""

from collections.abc import Callable, Sequence
from typing import Self

import pandas as pd
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from fl_lightning.clients.tasks import QUALITIES
from fl_lightning.console import time_in_words
from fl_lightning.errors import nearest
from fl_lightning.experiments.run_directory.result import metric_values
from fl_lightning.experiments.studies.cells import Cell, CellState


class StudyProgress:
    """A context manager that prints each cell when it ends.

    On a terminal, it also shows a table of running cells.

    Args:
        needed: Function that returns the metrics that the study reads from a cell.
        jobs: Number of cells that run at a time.
        cell_seconds: Expected seconds of a cell, used until a cell is done; None if unknown.
    """

    def __init__(
        self, needed: Callable[[Cell], Sequence[str]], jobs: int, cell_seconds: float | None = None
    ) -> None:
        self.needed, self.jobs, self.cell_seconds = needed, jobs, cell_seconds
        self._known: dict[Cell, str] = {}
        self._known_metrics: set[str] = set()
        self._console = Console(emoji=False, markup=False, highlight=False, soft_wrap=True)
        # without a terminal, only printed lines are shown
        self._live = Live(
            console=self._console,
            auto_refresh=self._console.is_terminal,
            refresh_per_second=2,
            transient=True,
        )

    def show(self, cells: Sequence[tuple[Cell, CellState]]) -> None:
        """Print the cells that have changed since the last call.

        Args:
            cells: All cells with their states.
        """
        done = [cell for cell, state in cells if state.phase == "done"]
        left = time_left(cells, self.jobs, self.cell_seconds)
        words = f"; about {time_in_words(left)} left" if left else ""
        for cell, state in cells:
            before, self._known[cell] = self._known.get(cell), state.phase
            if before in (None, "done") and state.phase in ("stale", "missing") and state.why:
                self._console.print(f"{state.phase}, runs again: {cell.name}: {state.why}")
            if before in (None, state.phase) or state.phase not in ("done", "failed"):
                continue
            metrics = metric_values(state.result) if state.result else {}
            numbers = [
                f"{name} {x:.4f}"
                for name, x in metrics.items()
                if name.partition("/")[0] in ("val", "test") and name.partition("/")[2] in QUALITIES
            ]
            self._console.print(
                f"[{len(done)}/{len(cells)}] {state.phase}: {cell.name}  {', '.join(numbers) or state.why}{words}"
            )
            self._known_metrics.update(metrics)
            for name in self.needed(cell) if metrics else ():
                if name not in self._known_metrics:
                    self._known_metrics.add(name)  # a metric is told once
                    known = ", ".join(metrics)
                    self._console.print(
                        f"metrics: {cell.name} has no {name}{nearest(name, metrics)}; there are {known}"
                    )
        table = Table(box=None)
        table.add_column("running")
        table.add_column("round", justify="right")
        for cell, state in cells:
            if state.phase == "running":
                table.add_row(
                    cell.name,
                    f"{state.round:,} of {cell.rounds:,}" if cell.rounds else f"{state.round:,}",
                )
        self._live.update(Group(f"{len(done)} of {len(cells)} cells{words}", table))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()


def time_left(
    cells: Sequence[tuple[Cell, CellState]], jobs: int, cell_seconds: float | None = None
) -> float | None:
    """Estimate the seconds until all cells are done; None if unknown.

    The expected time of a cell is the median time of finished cells with the same labels. If no
    such cell has finished, the mean of all other medians is used. If no cell at all has finished,
    ``cell_seconds`` is used.

    The time of a cell includes the start and the evaluations, unless the cell was resumed.

    Args:
        cells: All cells with their states.
        jobs: Number of cells that run at a time.
        cell_seconds: Expected seconds of a cell, used until a cell is done; None if unknown.
    """
    results = [(str(cell.labels), state.result) for cell, state in cells if state.phase == "done"]
    took = [(labels, max(x["train_seconds"], x.get("process_seconds", 0.0))) for labels, x in results if x]
    medians = pd.DataFrame(took, columns=["labels", "seconds"]).groupby("labels")["seconds"].median()
    each: float | None = medians.mean() if len(medians) else cell_seconds
    if each is None:
        return None
    unfinished = [(cell, state) for cell, state in cells if state.phase != "done"]
    parts: list[float] = [
        medians.get(str(cell.labels), each) * (1 - (state.round / cell.rounds if cell.rounds else 0))
        for cell, state in unfinished
    ]
    return max(sum(parts) / jobs, max(parts, default=0))
