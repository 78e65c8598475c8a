"""Table of a study's values, with one row for each run."""

from dataclasses import dataclass
from pathlib import Path

from fl_lightning.experiments.studies.found import Found, Group, Labels, RunFound

_COSTS = (
    "rounds", "samples", "upload_bytes", "download_bytes", "exchanges", "train_seconds", "diverged",
)  # fmt: skip


@dataclass(frozen=True)
class StudyCell:
    """A cell of a study: one run, with one label of each axis and one seed.

    Attributes:
        labels: Label of each axis.
        seed: Seed of the run.
        phase: Phase of the run, such as ``"done"``, ``"failed"`` or ``"missing"``.
        values: Value of each metric, such as ``test/accuracy``; empty without a result. The value
            of ``metric`` is stored under the name of the study's first metric.
        metric: Metric that replaces the study's first metric for this cell, or None.
        published: Published value of the combination, or None.
        learning_rate: Learning rate of the client optimizer; None if unknown.
        directory: Run directory. ``load_run`` can read it.
        run: All findings of the run.
    """

    labels: Labels
    seed: int
    phase: str
    values: dict[str, float]
    metric: str | None
    published: float | None
    learning_rate: float | None
    directory: Path
    run: RunFound

    def row(self) -> dict[str, object]:
        """Return labels, seed, phase, metrics and costs, keyed by column.

        A missing value is None. If an axis has the name of a later column, such as ``samples``, the
        later column is ``run_samples``.
        """
        found: dict[str, object] = {**self.run}
        further = {
            "seed": self.seed,
            "phase": self.phase,
            **self.values,
            "metric": self.metric,
            "published": self.published,
            "learning_rate": self.learning_rate,
            **{name: found.get(name) for name in _COSTS},
            "directory": str(self.directory),
        }
        return {
            **self.labels,
            **{f"run_{name}" if name in self.labels else name: x for name, x in further.items()},
        }


def study_cells(found: Found) -> list[StudyCell]:
    """Return the cells of a study, in the order of the table's rows."""
    return [_cell(group, run) for group in found["groups"] for run in group["runs"]]


def _cell(group: Group, run: RunFound) -> StudyCell:
    seed = str(run["seed"])
    return StudyCell(
        group["labels"],
        run["seed"],
        run["phase"],
        {name: values[seed] for name, values in group["values"].items() if seed in values},
        group.get("metric"),
        group["published"],
        group["learning_rate"],
        Path(run["directory"]),
        run,
    )


def cell_rows(found: Found) -> list[dict[str, object]]:
    """Return one row for each cell. All rows have the same columns. A missing value is None."""
    missing = dict.fromkeys(found["metrics"])
    rows = []
    for cell in study_cells(found):
        row = cell.row()
        before = [*row][: len(cell.labels) + 2]  # labels, seed and phase
        rows.append({**{name: row[name] for name in before}, **missing, **row})
    return rows


def cells_table(found: Found) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of ``cells.csv``.

    Numbers have full precision; a missing value is ``""``.
    """
    rows = cell_rows(found)
    header = [*dict.fromkeys(name for row in rows for name in row)]
    return header, [["" if row[name] is None else str(row[name]) for name in header] for row in rows]
