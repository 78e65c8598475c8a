"""Results of a study as two tables of pandas: its cells, and their values."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.studies.cells import RUNS
from fl_lightning.experiments.studies.columns import CELL_COLUMNS, VALUE_COLUMNS
from fl_lightning.experiments.studies.definition import Labels
from fl_lightning.experiments.studies.report_rule import LAST
from fl_lightning.files import restored, user_path, write_json


@dataclass(frozen=True)
class Chosen:
    """A choice of a label, made on validation data.

    Attributes:
        axis: Axis whose label is chosen.
        by: Labels of the axes ``by`` for this choice.
        at: Labels of the other axes in the trials.
        metric: Metric of the choice.
        chosen: The chosen label; None until all trials have ended.
        values: Metric of each label's trial; None without a result.
        seed: Seed of the trials.
        settings: Settings that differ between the labels.
        extended: Values that were added to the grid.
    """

    axis: str
    by: Labels
    at: Labels
    metric: str
    chosen: str | None
    values: dict[str, float | None]
    seed: int
    settings: list[str]
    extended: list[str]


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim. A verdict from fewer than two pairs of runs has no p-values.

    Attributes:
        claim: Text of the claim.
        verdict: ``holds``, ``does not hold``, ``undecided``, ``one pair agrees`` or
            ``one pair contradicts``.
        words: Reason for the verdict in words.
        p: Two-sided p-value, or None.
        adjusted: P-value after Holm's correction for multiple claims, or None.
        family: Number of claims that are corrected together, or None.
        headline: Whether the claim is corrected together with the headline claims.
        decides: Smallest difference or margin that the present number of seeds can decide. Only
            undecided claims have this number.
    """

    claim: str
    verdict: str
    words: str
    p: float | None = None
    adjusted: float | None = None
    family: int | None = None
    headline: bool = False
    decides: float | None = None


class Row(NamedTuple):
    """A combination of labels with its cells, one for each seed and fold, and their values."""

    labels: Labels
    cells: pd.DataFrame
    values: pd.DataFrame

    def of(self, metric: str) -> pd.Series:
        """Return the values of a metric, indexed by seed, or by seed and fold if there are folds."""
        keys = ["seed", "fold"] if self.cells["fold"].notna().any() else ["seed"]
        return self.values[self.values["metric"] == metric].set_index(keys)["value"]

    @property
    def metric(self) -> str | None:
        """Metric that replaces the study's first metric, or None."""
        return self.runs[0].get("metric")

    @property
    def done(self) -> pd.DataFrame:
        """The cells that have a result."""
        return self.cells[self.cells["phase"] == "done"]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The cells as dictionaries, without missing values."""
        return _known(self.cells)


@dataclass(frozen=True, eq=False)
class StudyFrame:
    """Results of a study.

    Attributes:
        name: Name of the study.
        title: Title of the study.
        axes: Labels of each axis.
        metrics: Names of the table's columns, keyed by metric. Claims are about the first metric.
        cells: One row for each cell: a combination of labels with one seed, and one fold if the
            study has folds. The labels are the index, with a level for each axis. ``phase`` is a phase such as ``"done"``, ``"failed"``
            or ``"missing"``, and ``why`` its reason. ``metric`` is the metric that replaces the
            study's first metric. ``directory`` is the run directory. ``load_run`` can read it. A
            value that is not known is missing.
        values: One row for each cell and metric, with the columns ``seed``, ``fold``, ``metric`` and
            ``value``, and the same index. A cell that has not measured a metric has no row. A
            measured value may be NaN. The value of ``metric`` has the name of the first metric.
        paper: Paper and table or figure; empty if the study does not follow a paper.
        scale: Name of the scale, such as ``quick``.
        choose: Axes whose label is chosen on validation data.
        spread: Axis whose labels are columns, or None.
        difference: Difference shown as a heat map, or None.
        best: Direction of each metric: ``"max"`` if large values are good, else ``"min"``.
        known: All labels of each axis, including labels that only other scales have.
        report: Rule that says which evaluations give a run's value.
        command: Command line of the study; empty for runs.
        folds: Number of folds of the cross-validation, ``data.folds``; None without one.
        choices: Labels that were chosen on validation data, with their trials.
        claims: Verdicts on the claims.
    """

    name: str
    title: str
    axes: dict[str, list[str]]
    metrics: dict[str, str]
    cells: pd.DataFrame
    values: pd.DataFrame
    paper: str = ""
    scale: str = ""
    choose: list[str] = field(default_factory=list)
    spread: str | None = None
    difference: str | None = None
    best: dict[str, str] = field(default_factory=dict)
    known: dict[str, list[str]] = field(default_factory=dict)
    report: str = LAST
    command: str = ""
    folds: int | None = None
    choices: list[Chosen] = field(default_factory=list)
    claims: list[Verdict] = field(default_factory=list)

    @property
    def first(self) -> str:
        """The first metric."""
        return next(iter(self.metrics))

    @property
    def repeats(self) -> str:
        """Differences between the runs of a row: ``"seeds"``, or ``"folds and seeds"``."""
        return "folds and seeds" if self.folds else "seeds"

    @cached_property
    def rows(self) -> list[Row]:
        """The combinations of labels, in the order of the table's rows."""
        levels = [*range(self.cells.index.nlevels)]
        values = dict([*self.values.groupby(level=levels, sort=False)])
        return [
            Row(_labels(self.cells, labels), cells, values.get(labels, self.values.iloc[:0]))
            for labels, cells in self.cells.groupby(level=levels, sort=False)
        ]

    def save(self, folder: Path) -> None:
        """Write the results to ``study.json``."""
        content = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        content |= {name: [*map(asdict, content[name])] for name in ("choices", "claims")}
        write_json(
            folder / "study.json", content | {name: _rows(content[name]) for name in ("cells", "values")}
        )


def labelled(rows: Iterable[Mapping[str, Any]], axes: Iterable[str], columns: Iterable[str]) -> pd.DataFrame:
    """Return rows as a frame whose index is their ``labels``, with a level for each axis."""
    rows, axes = [*rows], [*axes]
    # a study without axes has an index with a single level without a name
    labels = [tuple(row["labels"][axis] for axis in axes) or ("",) for row in rows]
    names: list[str | None] = [*axes] or [None]
    index = pd.MultiIndex.from_tuples(labels, names=names)
    every = {name: pd.Series([row.get(name) for row in rows], index, dtype=object) for name in columns}
    return pd.DataFrame({name: _typed(column) for name, column in every.items()}, index)


def _typed(column: pd.Series) -> pd.Series:
    # pandas would convert integers beside missing values to floats
    mixed = column.isna().any() and any(isinstance(value, int) for value in column)
    return column if mixed else column.infer_objects()


def _known(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = frame.to_dict("records")
    return [{name: x for name, x in row.items() if name == "value" or not _missing(x)} for row in rows]


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and isnan(value))


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = zip(frame.index, _known(frame), strict=True)
    return [{"labels": _labels(frame, labels), **row} for labels, row in rows]


def _labels(frame: pd.DataFrame, labels: tuple[str, ...]) -> Labels:
    return {axis: label for axis, label in zip(frame.index.names, labels, strict=True) if axis is not None}


def load_study(path: str | os.PathLike[str]) -> StudyFrame:
    """Load the results of a study.

    ::

        study = load_study("runs/studies/methods-quick")
        accuracy = study.values[study.values["metric"] == "test/accuracy"]
        print(accuracy.groupby("method")["value"].agg(["mean", "std"]))

    If folders have moved, the paths of run directories are corrected.

    Args:
        path: Folder of the study, such as ``runs/studies/NAME-quick``. The runs are then in
            ``runs/cells``.

    Raises:
        ConfigurationError: The folder holds no study, or ``study.json`` cannot be read.
    """
    folder = user_path("load_study", path)
    file = folder / "study.json"
    if not file.is_file():
        raise ConfigurationError(
            f"load_study: {folder} is no study's folder (it has no study.json); give a folder such as runs/studies/NAME-quick"
        )
    try:
        content = restored(json.loads(file.read_text()))
        roots = folder.resolve().parents[1:]  # the name of a study may have slashes
        for cell in content["cells"]:
            places = [root.joinpath(RUNS, *Path(cell["directory"]).parts[-2:]) for root in roots]
            cell["directory"] = str(next((place for place in places if place.is_dir()), places[0]))
        columns = {"cells": CELL_COLUMNS, "values": VALUE_COLUMNS}
        content |= {name: labelled(content[name], content["axes"], columns[name]) for name in columns}
        content["choices"] = [Chosen(**choice) for choice in content["choices"]]
        content["claims"] = [Verdict(**claim) for claim in content["claims"]]
        return StudyFrame(**content)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{file} cannot be read as the result of a study; run the study again"
        raise ConfigurationError(message) from error
