"""Findings of a study: the values of all runs. They are stored in ``study.json``."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.finished import metric_values
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.studies.cells import Cell, State
from fl_lightning.experiments.studies.columns import SERVER, local_metrics, models_of, of_same_models
from fl_lightning.experiments.studies.definition import Study
from fl_lightning.experiments.studies.found import ChoiceFound, Found, Group, RunFound
from fl_lightning.experiments.studies.reported import reported
from fl_lightning.experiments.studies.verdicts import judge

_COPIED = (
    "method", "model", "partition", "rounds", "planned_rounds", "samples", "upload_bytes", "download_bytes",
    "train_seconds", "diverged", "diverged_round",
)  # fmt: skip
"""Keys that are copied from ``result.json`` to the findings of a run."""


def findings(
    study: Study,
    cells: Sequence[Cell],
    choices: list[ChoiceFound],
    failed: Mapping[Path, str],
    accept_stale: bool = False,
    diverged: Collection[Path] = (),
) -> Found:
    """Return the findings of a study, from which tables, figures and the report are made.

    Args:
        study: The study.
        cells: Cells of the table.
        choices: Labels chosen on validation data.
        failed: Error of each failed cell, keyed by the cell's key.
        accept_stale: Whether stale results count (default False).
        diverged: Keys of the cells that ended with a non-finite update.
    """
    definition = study.definition
    states = {cell: cell.state(accept_stale) for cell in cells}
    results = [state.result for state in states.values() if state.phase == "done" and state.result]
    known = dict.fromkeys(metric for result in results for metric in metric_values(result))
    local = {name: words for name, words in local_metrics(definition.metrics).items() if name in known}
    server = SERVER + next(iter(definition.metrics))
    if any(models_of(study.metric(cell.labels) or "") for cell in cells):
        local[server] = local_metrics(definition.metrics)[server]
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell.labels.values()), []).append(cell)
    found: Found = {
        "name": study.name,
        "title": definition.title,
        "paper": definition.paper,
        "scale": study.scale_name,
        "axes": {axis: [*labels] for axis, labels in study.axes.items()},
        "choose": [choice.axis for choice in definition.choose],
        "spread": definition.spread,
        "difference": definition.difference,
        "metrics": {**definition.metrics, **local},
        "best": {name: best for result in results for name, best in result.get("best", {}).items()},
        "groups": [_group(study, members, states, failed, diverged, local) for members in groups.values()],
        "choices": choices,
        "known": study.known_labels(),
        "claims": [],
        "report": definition.report,
    }
    for name in definition.metrics if results else ():
        if not any(group["values"][name] for group in found["groups"]):
            raise ConfigurationError(f"metrics: no run has {name}; there are {', '.join(known)}")
    for index, group in enumerate(found["groups"]):
        earlier = (g["labels"] for g in found["groups"][:index] if _reads(g) == _reads(group))
        group["same_as"] = next(earlier, None)
        trained = (
            g["labels"] for g in found["groups"] if not g["metric"] and _reads(g)[1:] == _reads(group)[1:]
        )
        group["costs_of"] = next(trained, None) if group["metric"] else None
    found["claims"] = judge([*definition.headline, *definition.claims], found, definition.headline)
    return found


def _group(
    study: Study,
    cells: Sequence[Cell],
    states: Mapping[Cell, State],
    failed: Mapping[Path, str],
    diverged: Collection[Path],
    local: Collection[str],
) -> Group:
    """Return the findings of one combination of labels, from one cell for each seed.

    ``local`` lists the metrics of the clients' models.
    """
    labels, first = cells[0].labels, cells[0].config["model"]
    names, published = [*study.definition.metrics], study.published(labels)
    own_metric = study.metric(labels)
    values: dict[str, dict[str, float]] = {name: {} for name in (*names, *local)}
    for cell in cells:
        state = states[cell]
        result = state.result if state.phase == "done" else None
        metrics = metric_values(result) if result is not None else {}
        rows = read_metrics(state.attempt.metrics) if result is not None and state.attempt else []
        others = [of_same_models(name, own_metric or "", names[0], metrics) for name in names[1:]]
        for name, read in zip(names, [own_metric or names[0], *others], strict=True):
            if result is not None and read in metrics:
                values[name][str(cell.seed)] = reported(study.definition.report, read, result, rows)
            elif metrics and own_metric is not None and name == names[0]:
                raise ConfigurationError(
                    f"metric: the runs of {cell.name} have no {own_metric}; there are {', '.join(metrics)}"
                )
        for name in local if any(map(models_of, metrics)) else ():
            if result is not None and (read := name.removeprefix(SERVER)) in metrics:
                values[name][str(cell.seed)] = reported(study.definition.report, read, result, rows)
    return {
        "labels": labels,
        "metric": own_metric,
        "published": published["value"] if published else None,
        "published_deviation": published.get("deviation") if published else None,
        "learning_rate": ((first.get("client_optimizer") or {}).get("init_args") or {}).get("lr"),
        "values": values,
        "runs": [
            run_found(cell.seed, states[cell], cell.key, failed.get(cell.key, ""), cell.key in diverged)
            for cell in cells
        ],
    }


def _reads(group: Group) -> list[str | None]:
    return [group["metric"], *(run["directory"] for run in group["runs"])]


def run_found(seed: int, state: State, place: Path, error: str = "", diverged: bool = False) -> RunFound:
    """Return the findings of a run: its directory, phase and costs.

    Args:
        seed: Seed of the run.
        state: State of the cell.
        place: Folder of the first attempt. The findings name this folder if no attempt exists.
        error: Error that ended the run in this study.
        diverged: Whether a non-finite update ended the run.
    """
    run: RunFound = {
        "seed": seed,
        "directory": str(state.attempt.path if state.attempt else place),
        "phase": "failed" if error else state.phase,
        "why": error or state.why,
    }
    result = state.result if state.phase == "done" else None
    if result is None or state.attempt is None:
        return run | {"diverged": True, "diverged_round": state.round + 1} if diverged else run
    rows = read_metrics(state.attempt.metrics)
    of_result: Any = {
        name: value for name, value in result.items() if name in _COPIED
    }  # Any is safe here: read_result has checked the types
    done: RunFound = {
        **run,
        **of_result,
        "exchanges": sum(row.get("comm/exchanges", 0) for row in rows),
        "provenance": result.get("provenance", []),
        "data": result.get("data", {}),
        "loaded": {"images": result["loaded"]} if "loaded" in result else {},
        "computed_by": result.get("computed_by", {}),
        "environment": result["environment"],
    }
    return done
