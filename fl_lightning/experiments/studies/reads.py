"""The metrics that a study reads: refused as soon as it is known that no run logs them."""

import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.experiments.run_directory.description import class_path
from fl_lightning.experiments.run_directory.finished import metric_values
from fl_lightning.experiments.studies.cells import Cell, State
from fl_lightning.experiments.studies.choosing import metric_of, trials
from fl_lightning.experiments.studies.definition import Labels, Study

_SHIPPED = ("fl_lightning.", "lightning.")
"""The packages whose callbacks log at the end what they log of an evaluation during training."""

_HEAD = 1 << 18
"""Bytes of a ``metrics.jsonl`` that hold its first evaluation, unless there are hundreds of rounds before it."""


class Reads:
    """The metrics that a study reads, held against what its cells log.

    A cell shows that by its result. One without callbacks shows it before it trains, by the evaluation of the initial model (row 0), one
    with callbacks of this package by its first evaluation after a round. Where callbacks are one's own only the result tells.

    Args:
        study: The study.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        self._kinds = {self._kind(labels) for labels in study.combinations()}
        self._logged: dict[tuple[str, ...], set[str]] = {}
        self._checked: set[Cell] = set()
        self._of_run: dict[Path, dict[Cell, None]] = {}
        self._trials = [
            (labels, metric_of(study, choice, tried))
            for choice in study.choices
            for tried in trials(study, choice).values()
            for labels in tried
        ]

    def soon(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells with one of each kind first, which show the soonest what is logged; it is called with all cells that are checked."""
        for cell in cells:
            self._of_run.setdefault(cell.key, {})[cell] = None
        first = {*{self._kind(cell.labels): cell for cell in reversed(cells)}.values()}
        return sorted(cells, key=lambda cell: cell not in first)

    def check(self, cells: Sequence[tuple[Cell, State]]) -> None:
        """Check what cells log by now.

        Args:
            cells: The cells, and what is known of each.

        Raises:
            ConfigurationError: A trial does not log the metric by which its label is chosen, or a cell that of its label, or no cell that
                of a column.
        """
        for cell, state in cells:
            names = set() if cell in self._checked else logged(cell, state)
            if not names:
                continue
            self._checked.add(cell)
            for own in self._of_run[cell.key]:
                self._logged.setdefault(self._kind(own.labels), set()).update(names)
                if (metric := self._study.metric(own.labels)) is not None:
                    _expect(f"metric: the runs of {own.name} have no", metric, names)
                for labels, metric in self._trials:
                    if labels == own.labels:
                        _expect("choose: the runs have no metric", metric, names)
        if self._kinds == self._logged.keys():
            for name in self._study.definition.metrics:
                _expect("metrics: no run has", name, {*chain(*self._logged.values())})

    def _kind(self, labels: Labels) -> tuple[str, ...]:
        """What of a combination's settings may decide which metrics there are: all but numbers."""
        arguments = self._study.arguments(labels, 0)
        return tuple(one for one in arguments if not re.fullmatch(r"[^=]+=[-+.\de]+", one))


def logged(cell: Cell, state: State) -> set[str]:
    """The metrics that a cell's result has or will have; none where that is not known yet."""
    if state.phase not in ("done", "running"):  # what another source has logged says nothing
        return set()
    if state.result is not None:
        return {*metric_values(state.result)}
    callbacks = cell.config["trainer"]["callbacks"] or []
    entries = [*(callbacks if isinstance(callbacks, list) else [callbacks]), cell.config["model"]]
    shipped = all(class_path(entry).startswith(_SHIPPED) or not class_path(entry) for entry in entries)
    if state.attempt is None or not shipped:
        return set()
    for row in _first_rows(state.attempt.metrics):
        names = {name for name in row if name.startswith(("val/", "test/"))}
        if names and (not callbacks or row["round"]):
            return names | {f"test/{name.partition('/')[2]}" for name in names}
    return set()


def _first_rows(path: Path) -> list[dict[str, float]]:
    """The first whole rows of a ``metrics.jsonl``: it is read again and again, and may grow long."""
    try:
        with path.open("rb") as file:
            return [json.loads(line) for line in file.read(_HEAD).split(b"\n")[:-1]]
    except (OSError, ValueError):
        return []


def _expect(words: str, metric: str, names: set[str]) -> None:
    if metric not in names:
        raise ConfigurationError(
            f"{words} {metric}{nearest(metric, names)}; there are {', '.join(sorted(names))}"
        )
