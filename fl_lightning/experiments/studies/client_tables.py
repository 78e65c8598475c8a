"""Tables of a study with a row for each client, such as a hospital, and a column for each method.

A cell has a metric of the model that the client uses, on the client's own test samples. Accuracy,
AUROC, sensitivity and specificity are computed from ``test_predictions.csv`` of the runs, with the
predictions of all folds together. Other metrics, and all metrics of a LightningModule, are means
over folds of the values in ``clients.csv``.

Below the clients, a table has these rows:

- ``all samples``: the metric of the predictions of all clients together.
- ``pairs within clients``: the AUROC over pairs of samples of the same client.
- ``mean over clients``: the mean in which each client has the same weight. With folds, it may differ
  from ``test/own_accuracy`` in ``table.md``, which is a mean over folds.
- ``worst client``: the worst value of a client.

Differences are between the sides of each claim. Without claims, each column is compared with the
first.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_lightning.clients.tasks import best_is
from fl_lightning.experiments.run_directory.result import has_named_clients
from fl_lightning.experiments.studies.axis_labels import labels_in_words
from fl_lightning.experiments.studies.claims import read_claim, read_difference
from fl_lightning.experiments.studies.client_scores import (
    SCORES,
    Array,
    Predictions,
    resamples,
    score,
    score_within,
)
from fl_lightning.experiments.studies.study_frame import Row, StudyFrame
from fl_lightning.experiments.studies.table_columns import of_any_model
from fl_lightning.experiments.studies.tables import as_text, mean_and_deviation, shown_axes
from fl_lightning.experiments.studies.verdicts import paired
from fl_lightning.files import write_text

MOST_CLIENTS = 50
"""Largest number of clients of a table."""

RESAMPLES = 2000
"""Number of resamples of a bootstrap interval with a coverage of 95 %."""

ALL, WITHIN, MEAN, WORST = "all samples", "pairs within clients", "mean over clients", "worst client"

_Frames = dict[Any, pd.DataFrame]
"""Predictions of a row's runs, of all folds together, by seed."""


@dataclass
class ClientTable:
    """Values of a metric by client and method.

    Attributes:
        metric: Name of the metric.
        samples: Number of test samples of each client, by name; 0 if unknown.
        subjects: Number of subjects of these samples, by name; empty if no subjects are named.
        values: Value of each run, by column and then by row. Rows are clients and means.
        intervals: Ends of the interval of the mean value, by column and then by row.
        differences: Mean difference with the ends of its interval, by column and then by row.
        units: What a bootstrap draws: ``"samples"`` or ``"subjects"``.
        folds: Whether the runs are folds of a cross-validation.
        logged: Whether the runs have logged the values, which are then means over folds.
        remark: Sentences about missing values, or an empty text.
    """

    metric: str
    samples: dict[str, int]
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    intervals: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    differences: dict[str, dict[str, tuple[float, float, float]]] = field(default_factory=dict)
    subjects: dict[str, int] = field(default_factory=dict)
    units: str = "samples"
    folds: bool = False
    logged: bool = False
    remark: str = ""

    @property
    def rows(self) -> dict[str, str]:
        """Text of each row's head: the client with its number of test samples, or a mean."""
        rows = dict.fromkeys(row for values in self.values.values() for row in values)
        of = {row: f" of {count} subjects" for row, count in self.subjects.items()}
        counts = {row: f" ({count}{of.get(row, '')})" for row, count in self.samples.items() if count}
        return {row: f"{row}{counts.get(row, '')}" for row in rows}

    def frame(self, narrow: bool = False) -> pd.DataFrame:
        """Return the table as text. A value that the client's samples do not define is empty.

        Args:
            narrow: Whether, beside differences, values have no intervals, so that a terminal shows
                the table.
        """
        rows, shown = self.rows, {} if narrow and self.differences else self.intervals
        table = pd.DataFrame({"client (test samples)": [*rows.values()]})
        for name, values in self.values.items():
            known = ([x for x in values.get(row, ()) if not isnan(x)] for row in rows)
            ends = shown.get(name, {})
            intervals = [" ({:.3f} to {:.3f})".format(*ends[row]) if row in ends else "" for row in rows]
            table[name] = [mean_and_deviation(x) + words for x, words in zip(known, intervals, strict=True)]
        for name, found in self.differences.items():
            words = {row: "{:+.3f} ({:+.3f} to {:+.3f})".format(*x) for row, x in found.items()}
            table[name] = [words.get(row, "") for row in rows]
        return table

    @property
    def caption(self) -> str:
        """Sentences that say what the rows and columns are."""
        auroc, several = (
            self.metric == "auroc" and not self.logged,
            any(len(values) > 1 for rows in self.values.values() for values in rows.values()),
        )
        folds = "mean over folds" if self.logged else "all folds together, so that each sample counts once"
        levels = "clients and of different folds" if self.folds else "clients"
        sentences = [
            f"{self.metric} of the model that each client uses, on its own test samples",
            folds[0].upper() + folds[1:] if self.folds else "",
            "± is the standard deviation over seeds" if several else "",
            f"An AUROC over several models also measures differences in level between models of different {levels}"
            if auroc
            else "",
            f"In parentheses: 95 % bootstrap intervals ({RESAMPLES:,} resamples of {self.units} within each client), which are about "
            "these trained models and other test samples, not about other seeds"
            if self.intervals
            else "",
            self.remark,
        ]
        return " ".join(f"{sentence}." for sentence in sentences if sentence)


@lru_cache(maxsize=4)
def client_tables(results: StudyFrame) -> list[ClientTable]:
    """Return a table for each metric of a study whose clients have names; [] for other studies.

    Clients that ``min_examples`` leaves out have no row. More than :data:`MOST_CLIENTS` clients have
    no table.

    Args:
        results: Results of a study. Predictions are read from its run directories.
    """
    rows = {labels_in_words(row.labels, shown_axes(results)) or "all runs": row for row in results.rows}
    metrics = dict.fromkeys(of_any_model(name).rpartition("/")[2] for name in results.metrics)
    frames = {name: _predictions(row) for name, row in rows.items()}
    tables: list[ClientTable] = []
    if all("prediction" in frame for known in frames.values() for frame in known.values()) and any(
        frames.values()
    ):
        tables = [_scored(metric, frames, results) for metric in metrics if metric in SCORES]
    tables += [
        _logged(metric, rows, results) for metric in metrics if metric not in [x.metric for x in tables]
    ]
    unfinished = [name for name, row in rows.items() if (row.cells["phase"] != "done").any()]
    for table in tables:
        table.folds = results.folds is not None
        if unfinished:
            more = f"Some runs are not finished: {', '.join(unfinished)}"
            table.remark = ". ".join(filter(None, [table.remark, more]))
    return [table for table in tables if 0 < len(table.samples) <= MOST_CLIENTS]


def _read(row: Row, name: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    for run in row.runs:
        path = Path(run["directory"]) / name
        if run["phase"] == "done" and path.is_file() and has_named_clients(path.with_name("partition.json")):
            frame = pd.read_csv(path, dtype=str, keep_default_na=False)
            column = "client" if "target" in frame else "name"
            # a client's name must differ from the names of the means
            names = {name: f'"{name}"' for name in (ALL, WITHIN, MEAN, WORST)}
            yield run["seed"], frame.assign(**{column: frame[column].replace(names)})


def _predictions(row: Row) -> _Frames:
    parts: dict[Any, list[pd.DataFrame]] = {}
    for seed, frame in _read(row, "test_predictions.csv"):
        parts.setdefault(seed, []).append(frame)
    folds = row.cells["fold"].nunique() or 1
    whole = {seed: pd.concat(frames) for seed, frames in parts.items() if len(frames) == folds}
    return {seed: x.sort_values("client", kind="stable", ignore_index=True) for seed, x in whole.items()}


def _scored(metric: str, frames: Mapping[str, _Frames], results: StudyFrame) -> ClientTable:
    """Return the table of a metric that is computed from predictions."""
    every = [frame for known in frames.values() for frame in known.values()]
    first, counts = every[0], pd.concat([frame["client"].value_counts() for frame in every], axis=1)
    table = ClientTable(metric, counts.max(axis=1).astype(int).sort_index().to_dict())
    if "subject" in first:
        subjects = pd.concat([frame.groupby("client")["subject"].nunique() for frame in every], axis=1)
        table.subjects = subjects.max(axis=1).astype(int).to_dict()
    smallest = best_is(metric, results.best) != "min"

    def scores(weights: Mapping[str, Array] | None) -> dict[str, dict[Any, dict[str, Array]]]:
        return {
            name: {seed: _scores(metric, frame, weights, smallest) for seed, frame in known.items()}
            for name, known in frames.items()
        }

    points = scores(None)
    summaries = [ALL, *([WITHIN] if metric == "auroc" else []), MEAN, WORST]
    rows = [*table.samples, *summaries]
    table.values = {
        name: {row: [float(x[row][0]) for x in known.values() if row in x] for row in rows}
        for name, known in points.items()
    }
    # columns before the prediction: which sample it is, and its target
    same = [*first.columns[: first.columns.get_loc("prediction")]]
    if any(not frame[same].equals(first[same]) for frame in every):
        table.remark = "No intervals and differences, because the runs have different test samples"
        return table
    table.units = "subjects" if "subject" in first else "samples"
    draws, units = np.random.default_rng(0), first.get("subject", pd.Series(range(len(first))))
    of_client = {client: units[first["client"] == client].to_numpy() for client in table.samples}
    drawn = scores({client: resamples(x, RESAMPLES, draws) for client, x in of_client.items()})
    rows.remove(WORST)  # the worst of resampled clients is biased
    for name, of_seeds in drawn.items():
        means = {row: np.mean([x[row] for x in of_seeds.values()], axis=0) for row in rows if of_seeds}
        table.intervals[name] = {row: _ends(x) for row, x in means.items() if not np.isnan(x).all()}
    for more, less in _pairs([*frames], results):
        seeds = [seed for seed in frames[more] if seed in frames[less]]
        for row in rows if seeds else ():
            mean, gaps = (
                np.mean([known[more][x][row] - known[less][x][row] for x in seeds], axis=0)
                for known in (points, drawn)
            )
            if not isnan(mean[0]):
                name = f"{more} \N{MINUS SIGN} {less}"
                table.differences.setdefault(name, {})[row] = (float(mean[0]), *_ends(gaps))
    return table


def _ends(resampled: Array) -> tuple[float, float]:
    """Return the ends of the 95 % percentile interval."""
    low, high = np.nanquantile(resampled, [0.025, 0.975])
    return float(low), float(high)


def _scores(
    metric: str, frame: pd.DataFrame, weights: Mapping[str, Array] | None, smallest: bool
) -> dict[str, Array]:
    """Return the metric ``[B]`` of each row: clients, all samples, and the mean and worst of the clients.

    Without weights, each sample counts once.
    """
    parts = {
        str(name): (Predictions.of(x), weights[str(name)] if weights else np.ones((1, len(x))))
        for name, x in frame.groupby("client")
    }
    found = {name: score(metric, [part]) for name, part in parts.items()}
    clients = np.stack([*found.values()])
    found[ALL] = score(metric, [*parts.values()])
    if metric == "auroc":
        found[WITHIN] = score_within(metric, [*parts.values()])
    defined = clients[:, ~np.isnan(clients).all(0)]
    for name, reduce in ((MEAN, np.nanmean), (WORST, np.nanmin if smallest else np.nanmax)):
        found[name] = np.full(clients.shape[1], np.nan)
        found[name][~np.isnan(clients).all(0)] = reduce(defined, axis=0)
    return found


def _pairs(rows: list[str], results: StudyFrame) -> list[tuple[str, str]]:
    """Return the pairs of columns in claims and ``difference``. Default: each column with the first."""
    read = [read_claim(claim.claim, results.known) for claim in results.claims]
    read += [read_difference(results.difference, results.known)] if results.difference else []
    axes = shown_axes(results)
    pairs = [
        (labels_in_words(row.labels, axes), labels_in_words(other.labels, axes))
        for claim in read
        for more, less in zip(claim.constraints, claim.constraints[1:], strict=False)
        for row, other in paired({**claim.fixed, **more}, less, results)
    ]
    return [*dict.fromkeys(pairs)] or [(row, rows[0]) for row in rows[1:]]


def _logged(metric: str, rows: Mapping[str, Row], results: StudyFrame) -> ClientTable:
    """Return the table of a metric that the runs have logged, the mean over folds."""
    table = ClientTable(metric, {}, logged=True)
    smallest = best_is(metric, results.best) != "min"
    for name, row in rows.items():
        folds, of_seed = (
            row.cells["fold"].nunique() or 1,
            Counter(seed for seed, _ in _read(row, "clients.csv")),
        )
        values: dict[Any, dict[str, list[float]]] = {}
        for seed, frame in _read(row, "clients.csv"):
            own = (x for x in frame if x.startswith("own_"))  # such as own_auc or own_test/auc
            column = next((x for x in own if x[4:].rpartition("/")[2] == metric), None)
            if column is None or of_seed[seed] < folds:
                continue
            for client, words in zip(frame["name"], frame[column], strict=True):
                values.setdefault(seed, {}).setdefault(client, []).append(float(words or "nan"))
        for clients in values.values():
            means = pd.Series({client: pd.Series(x).mean() for client, x in clients.items()})
            mean, worst = means.mean(), means.min() if smallest else means.max()
            table.samples |= dict.fromkeys(clients, 0)
            for client, value in [*means.items(), (MEAN, mean), (WORST, worst)]:
                table.values.setdefault(name, {}).setdefault(str(client), []).append(float(value))
    return table


def write_client_tables(folder: Path, results: StudyFrame) -> None:
    """Write the tables to ``clients.md``, and each to ``clients_<metric>.csv``.

    Files of earlier results without such a table are removed.
    """
    for path in [folder / "clients.md", *folder.glob("clients_*.csv")]:
        path.unlink(missing_ok=True)
    tables = client_tables(results)
    for table in tables:
        content = table.frame().to_csv(index=False, lineterminator="\n")
        write_text(folder / f"clients_{table.metric}.csv", content)
    if tables:
        parts = [f"{table.caption}\n\n{as_text(table.frame(), 'github')}" for table in tables]
        write_text(folder / "clients.md", "\n\n".join(parts) + "\n")
