"""Collection of a study's results from the run directories of its cells."""

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from pathlib import Path

from fl_lightning.clients.tasks import best_is
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.run_directory.result import Result, has_named_clients, metric_values
from fl_lightning.experiments.studies.cells import Cell, CellState
from fl_lightning.experiments.studies.columns import (
    CELL_COLUMNS,
    COSTS,
    FROM_RESULT,
    IN_WORDS,
    VALUE_COLUMNS,
)
from fl_lightning.experiments.studies.definition import FOLD, Study
from fl_lightning.experiments.studies.report_rule import LAST, MEAN
from fl_lightning.experiments.studies.study_frame import Chosen, StudyFrame, labelled
from fl_lightning.experiments.studies.table_columns import (
    SERVER_PREFIX,
    local_metrics,
    models_of,
    of_same_models,
)
from fl_lightning.experiments.studies.verdicts import with_verdicts
from fl_lightning.methods import formatted


def collect(
    study: Study,
    cells: Sequence[Cell],
    choices: list[Chosen],
    failed: Mapping[Path, str],
) -> StudyFrame:
    """Return the results of a study, from which tables, figures and the report are made.

    Args:
        study: The study.
        cells: Cells of the table.
        choices: Labels chosen on validation data.
        failed: Error of each failed cell, keyed by the cell's key.

    Raises:
        ConfigurationError: No run has the metric of a column, or a run lacks the metric that a
            label sets.
    """
    definition, rows, values = study.definition, [], []
    states = {cell: cell.state() for cell in cells}
    results = {cell: state.result for cell, state in states.items() if state.phase == "done" and state.result}
    known = dict.fromkeys(name for result in results.values() for name in metric_values(result))
    local = {name: words for name, words in local_metrics(definition.metrics).items() if name in known}
    server = SERVER_PREFIX + next(iter(definition.metrics))
    own = {cell: _own_metric(study, cell, state) for cell, state in states.items()}
    if any(models_of(metric or "") for metric in own.values()):
        local[server] = local_metrics(definition.metrics)[server]
    # the runs of all folds are one row, whichever label was chosen in each fold
    merged = [FOLD, *(choice.axis for choice in definition.choose)] if study.folds else []
    axes = {axis: [*labels] for axis, labels in study.axes.items() if axis not in merged}
    for cell, state in states.items():
        of_cell: dict[str, object] = {
            "labels": {axis: x for axis, x in cell.labels.items() if axis not in merged}
        }
        of_cell["fold"] = int(cell.labels[FOLD]) if study.folds else None
        published: Mapping[str, object] = study.published(cell.labels) or {}
        rows.append(
            {
                **of_cell,
                "metric": own[cell],
                "published": published.get("value"),
                "published_deviation": published.get("deviation"),
                **run_row(cell.config, state, cell.key, failed.get(cell.key, "")),
            }
        )
        if (result := results.get(cell)) is not None and state.attempt is not None:
            log = read_metrics(state.attempt.metrics)
            for name, read in _read(study, cell, own[cell], [*local], metric_values(result)).items():
                value = reported(definition.report, read, result, log)
                values.append({**of_cell, "seed": cell.seed, "metric": name, "value": value})
    for name in definition.metrics if results else ():
        if name not in (value["metric"] for value in values):
            raise ConfigurationError(f"metrics: no evaluation has {name}; there are {', '.join(known)}")
    frame = StudyFrame(
        name=study.name,
        title=definition.title,
        paper=definition.paper,
        scale=study.scale_name,
        axes=axes,
        choose=[choice.axis for choice in definition.choose if choice.axis in axes],
        spread=definition.spread,
        difference=definition.difference,
        metrics={**definition.metrics, **local},
        best={name: best for result in results.values() for name, best in result.get("best", {}).items()},
        cells=labelled(rows, axes, CELL_COLUMNS),
        values=labelled(values, axes, VALUE_COLUMNS),
        choices=choices,
        known=study.known_labels(),
        report=definition.report,
        folds=study.folds,
    )
    return with_verdicts(frame, [*definition.headline, *definition.claims], definition.headline)


def _own_metric(study: Study, cell: Cell, state: CellState) -> str | None:
    """Return the metric that replaces the table's first metric in a cell, or None.

    This is the metric that a label sets. Otherwise, for clients with names, such as hospitals, it
    is the metric of the model that each client uses, if the run has it.
    """
    own, first = study.metric(cell.labels), next(iter(study.definition.metrics))
    if own or models_of(first) or state.phase != "done" or not state.result or not state.attempt:
        return own
    own = formatted("own_{}", first)
    known = own in metric_values(state.result) and has_named_clients(state.attempt.partition)
    return own if known else None


def _read(
    study: Study, cell: Cell, own: str | None, local: Sequence[str], metrics: Collection[str]
) -> dict[str, str]:
    """Return the metric of the run that each column shows, keyed by the column's metric."""
    first, *others = study.definition.metrics
    if own is not None and own not in metrics and metrics:
        raise ConfigurationError(
            f"metric: the runs of {cell.name} have no {own}; there are {', '.join(metrics)}"
        )
    read = {first: own or first} | {name: of_same_models(name, own or "", first, metrics) for name in others}
    if any(map(models_of, metrics)):
        read |= {name: name.removeprefix(SERVER_PREFIX) for name in local}
    return {name: of_run for name, of_run in read.items() if of_run in metrics}


def reported(rule: str, name: str, result: Result, rows: Sequence[Mapping[str, float]]) -> float:
    """Return a metric of a finished run, computed by a report rule.

    Args:
        rule: Report rule: ``"last"``, ``"best"``, or for example ``"mean of the last 5"``.
        name: Name of a metric in the result.
        result: Result of the run.
        rows: Rows of ``metrics.jsonl``.

    Raises:
        ConfigurationError: Training has evaluated the metric too rarely, or the rule is ``"best"``
            and the metric's direction is unknown.
    """
    last = metric_values(result)[name]
    if rule == LAST:
        return last
    by_round = {row["round"]: row[name] for row in rows if name in row and row["round"] > 0}
    # the value of the last evaluation is in the result
    values = [*{**by_round, result["rounds"]: last}.values()]
    mean = re.fullmatch(MEAN, rule)
    wanted = int(mean[1]) if mean else 2
    if len(values) < wanted:
        raise ConfigurationError(
            f"report: {rule!r} needs {wanted} evaluations of {name} in a run, but a run has only {len(values)}; reduce "
            "trainer.check_val_every_n_epoch and set data.val_fraction to 0, or write 'last'"
        )
    if mean:
        return statistics.mean(values[-wanted:])
    direction = best_is(name, known=result.get("best", {}))
    if direction is None:
        raise ConfigurationError(
            f"report: {name} has no best value, as it is not known whether large values are good; write 'last' or 'mean of the last 5'"
        )
    finite = [value for value in values if isfinite(value)]
    return (min if direction == "min" else max)(finite or values)


def run_row(config: Config, state: CellState, place: Path, error: str = "") -> dict[str, object]:
    """Return the columns of ``StudyFrame.cells`` that describe a run: its state and costs.

    Args:
        config: Resolved configuration of the run.
        state: State of the cell.
        place: Folder of the first attempt. It is named if no attempt exists.
        error: Error that ended the run in this study.
    """
    optimizer = config["model"].get("client_optimizer") or {}
    row = {
        "seed": config["seed_everything"],
        "learning_rate": (optimizer.get("init_args") or {}).get("lr"),
        "directory": str(state.attempt.path if state.attempt else place),
        "phase": "failed" if error else state.phase,
        "why": error or state.why,
    }
    if state.phase != "done" or state.result is None or state.attempt is None:
        return row | ({"diverged": True, "diverged_round": state.round + 1} if state.diverged else {})
    loaded = state.result.get("loaded")
    exchanges = sum(line.get("comm/exchanges", 0) for line in read_metrics(state.attempt.metrics))
    of_result = {
        f"run_{name}" if name in IN_WORDS else name: x
        for name, x in state.result.items()
        if name in (*COSTS, *FROM_RESULT)
    }
    return of_result | {"exchanges": exchanges, "loaded": {"images": loaded} if loaded else {}} | row
