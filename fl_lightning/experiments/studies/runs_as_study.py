"""Run directories as the results of a study. Runs that differ only in seed are a row of its table."""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd

from fl_lightning.clients.tasks import best_is
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.config_digest import hash_of_run
from fl_lightning.experiments.run_directory.describe import origin_in_words
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.finished import metric_values, read_result
from fl_lightning.experiments.studies.cells import State, last_round
from fl_lightning.experiments.studies.collecting import run_row
from fl_lightning.experiments.studies.columns import CELL_COLUMNS, VALUE_COLUMNS
from fl_lightning.experiments.studies.study_frame import (
    StudyFrame,
    labelled,
)

_SETTINGS = ["name", "hash", "rounds"]
"""Columns that are equal for runs that differ only in the seed."""


def runs_as_study(directories: Sequence[Path]) -> StudyFrame:
    """Return run directories as the results of a study. Its only axis has a label for each row.

    Runs that differ only in their seed are a row. If a run has several attempts, the newest
    finished attempt is used. If no attempt is finished, the newest attempt is used. If two runs of
    a row have the same seed, each folder has a row.

    Args:
        directories: Run directories.

    Raises:
        ConfigurationError: A configuration cannot be read.
    """
    runs = _with_labels(_in_rows(pd.DataFrame([*map(_described, map(Attempt, directories))])))
    results = [state.result for state in runs["state"] if state.result is not None]
    metrics, cells, values = _metrics(map(metric_values, results)), [], []
    for run in runs.itertuples():
        row = {"labels": {"run": run.label}, "origin": run.origin}
        cells.append(row | run_row(run.config, run.state, run.attempt.path))
        values += [
            {"labels": {"run": run.label}, "seed": run.seed, "metric": metric, "value": value}
            for metric, value in (metric_values(run.state.result) if run.state.result else {}).items()
            if metric in metrics
        ]
    labels = [*runs["label"].unique()]
    methods = dict.fromkeys(str(result["method"]) for result in results)
    parts = [*labels, *methods] if len(labels) == 1 else labels
    return StudyFrame(
        name="runs",
        title=textwrap.shorten(", ".join(dict.fromkeys(parts)), 90, placeholder=" …"),
        axes={"run": labels},
        known={"run": labels},
        metrics=metrics,
        best={name: best for result in results for name, best in result.get("best", {}).items()},
        cells=labelled(cells, ["run"], CELL_COLUMNS),
        values=labelled(values, ["run"], VALUE_COLUMNS),
    )


def _described(attempt: Attempt) -> dict[str, object]:
    config, state = attempt.read_config(), state_of(attempt)
    number = attempt.path.suffix[1:]
    run = attempt.path.with_suffix("") if number.isdigit() else attempt.path
    return {
        "name": config["name"],
        "hash": hash_of_run(attempt, config),
        "rounds": f"{config['trainer']['max_epochs']} rounds",
        "seed": config["seed_everything"],
        "method": str(state.result["method"]) if state.result else None,
        "config": config,
        "origin": _origin(state, attempt),
        "folder": str(run.parent),
        "run": str(run),
        "place": str(run.resolve()),
        "age": (attempt.result.is_file(), int(number) if number.isdigit() else 1),
        "attempt": attempt,
        "state": state,
    }


def _in_rows(attempts: pd.DataFrame) -> pd.DataFrame:
    """Return the newest attempt at each run. Runs with equal settings and ``place`` are a row."""
    newest_first = attempts.sort_values("age", ascending=False, kind="stable")
    runs = newest_first.drop_duplicates([*_SETTINGS, "place"]).sort_index().assign(place="")
    for place in ("folder", "run"):
        twice = runs.duplicated([*_SETTINGS, "place", "seed"], keep=False)
        apart = twice.groupby([runs[name] for name in _SETTINGS]).transform("any")
        runs["place"] = runs["place"].mask(apart, runs[place])
    return runs


def _with_labels(runs: pd.DataFrame) -> pd.DataFrame:
    """Add the column ``label``: distinct labels of the rows, as short as possible. Sort the runs.

    A label has the name of the runs or their method, and perhaps the hash, the name, the number of
    rounds and the folder.
    """
    groups = runs.groupby([*_SETTINGS, "place"], sort=False)
    rows = groups["method"].first().reset_index()
    methods, labels = rows["method"].fillna(rows["name"]), rows["name"]
    differing = [name for name in ("hash", "name", "rounds", "place") if rows[name].nunique() > 1]
    for count in range(len(differing) + 1):
        if not labels.is_unique:
            details = [", ".join(filter(None, row)) for row in rows[differing[:count]].to_numpy()]
            labels = methods + [f" ({text})" if text else "" for text in details]
    number = groups.ngroup()
    runs = runs.assign(label=labels.loc[number].to_numpy(), row=number)
    return runs.sort_values(["row", "seed"], kind="stable")


def state_of(attempt: Attempt) -> State:
    """Return the state of an attempt: ``done``, ``failed``, ``running`` or ``stopped``."""
    try:
        return State("done", attempt, read_result(attempt.result))
    except ConfigurationError as error:
        if attempt.result.is_file():
            return State("failed", attempt, why=str(error))
    last = last_round(attempt)
    if attempt.error.is_file():
        return State("failed", attempt, why=attempt.last_error(), round=last)
    why = f"no result.json; the last logged round is {last}" if last else "no round is logged"
    return State("running" if attempt.is_locked() else "stopped", attempt, why=why)


def _origin(state: State, attempt: Attempt) -> list[str]:
    """Return descriptions of the other runs that a run continues."""
    if state.result is not None:
        return origin_in_words(state.result.get("continued_from", []))
    with suppress(OSError, ValueError, AttributeError, TypeError):
        return [*json.loads(attempt.identity.read_text()).get("continued_from", [])]
    return []


def _metrics(results: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Return the names of the test metrics. Without test metrics, use validation metrics.

    Frequent metrics come first, and losses come last.
    """
    counts = Counter(name for result in results for name in result)
    for split, words in {"test": "test ", "val": "validation "}.items():
        # a LightningModule may log test_acc, whose clients' own mean is own_test_acc
        names = [name for name in counts if re.search(f"(^|_){split}[/_]", name)]
        if names:
            names.sort(key=lambda name: (best_is(name) == "min", -counts[name]))
            short = {name: re.sub(f"{split}[/_]", "", name, count=1) for name in names}
            return {name: words + short[name].replace("_", " ") for name in names}
    return {"test/accuracy": "test accuracy"}
