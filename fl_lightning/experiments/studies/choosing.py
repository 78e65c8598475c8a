"""Choice of labels on validation data, such as a learning rate or T*."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.finished import Result, metric_values
from fl_lightning.experiments.studies.cells import Cell
from fl_lightning.experiments.studies.definition import Choice, Labels, Study, matches
from fl_lightning.experiments.studies.found import ChoiceFound
from fl_lightning.round.directions import best_is


def trials(study: Study, choice: Choice) -> dict[tuple[str, ...], list[Labels]]:
    """Return the trials by labels of ``choice.by``: a combination for each label of the axis."""
    first = {axis: next(iter(labels)) for axis, labels in study.axes.items()}
    fixed = {
        axis: label
        for axis, label in {**first, **choice.at}.items()
        if axis != choice.axis and axis not in choice.by
    }
    tried: dict[tuple[str, ...], list[Labels]] = {}
    for labels in study.combinations(fixed):
        tried.setdefault(tuple(labels[axis] for axis in choice.by), []).append(labels)
    return tried


def trial_cells(study: Study, make: Callable[[Labels, int], Cell]) -> list[list[Cell]]:
    """Return the cells of each choice.

    Raises:
        ConfigurationError: A cell has no validation data, a combination has no trial, or two labels
            of the chosen axis give the same run.
    """
    cells_of_choices = []
    for choice in study.choices:
        seed = study.scale.seeds[0] if choice.seed is None else choice.seed
        tried = trials(study, choice)
        for labels in study.combinations():
            if tuple(labels[axis] for axis in choice.by) not in tried:
                raise ConfigurationError(
                    f"choose: no trial chooses {choice.axis} for {labels}; "
                    "name labels of other axes that have trials under 'at'"
                )
        cells: list[Cell] = []
        for combinations in tried.values():
            grid = [make(labels, seed) for labels in combinations]
            if len({cell.key for cell in grid}) < len(grid):
                raise ConfigurationError(
                    f"choose: the labels of {choice.axis} give equal runs such as {grid[0].name}: "
                    "the command line or a later axis overrides them; leave that setting out"
                )
            cells += grid
        for cell in cells:
            settings = cell.config["data"].get("init_args") or {}
            if "val_fraction" in settings and not settings["val_fraction"]:
                raise ConfigurationError(
                    f"data.val_fraction: {settings['val_fraction'] or 0} leaves {cell.name} no validation data "
                    f"to choose {choice.axis} on; set it to 0.1, for example"
                )
        cells_of_choices.append(cells)
    return cells_of_choices


def chosen(
    study: Study, cells: Sequence[Sequence[Cell]], accept_stale: bool = False, diverged: Collection[Path] = ()
) -> list[ChoiceFound]:
    """Return the best label of each choice: the first with the largest metric or smallest loss.

    A diverged trial is the worst; any other trial without a result leaves the choice open. If a label
    has its own metric, such as ``test/accuracy_silobn``, that metric on validation data decides.

    Args:
        study: The study.
        cells: Cells of each choice.
        accept_stale: Whether stale results count (default False).
        diverged: Keys of the cells that ended with a non-finite update.
    """
    choices: list[ChoiceFound] = []
    for choice, own_cells in zip(study.choices, cells, strict=True):
        for key, combinations in trials(study, choice).items():
            by = dict(zip(choice.by, key, strict=True))
            metric = metric_of(study, choice, combinations)
            states = {cell: cell.state(accept_stale) for cell in own_cells if matches(cell.labels, by)}
            known_best = next((x.result.get("best", {}) for x in states.values() if x.result), {})
            worst = inf if best_is(metric, known=known_best) == "min" else -inf
            values: dict[str, float | None] = {}
            for cell, state in states.items():
                value = _value(state.result if state.phase == "done" else None, metric, worst)
                values[cell.labels[choice.axis]] = worst if value is None and cell.key in diverged else value
            known = {label: value for label, value in values.items() if value is not None}
            best = None
            if values and len(known) == len(values):
                best = (min if worst > 0 else max)(known, key=lambda label: known[label])
            tried = next(iter(combinations))
            at = {a: x for a, x in tried.items() if a not in (choice.axis, *by) and len(study.axes[a]) > 1}
            settings = sorted({name for label in study.axes[choice.axis].values() for name in label})
            choices.append(
                {
                    "axis": choice.axis,
                    "sets": settings,
                    "for": by,
                    "at": at,
                    "metric": metric,
                    "chosen": best,
                    "values": values,
                }
            )
    return choices


def metric_of(study: Study, choice: Choice, combinations: Sequence[Labels]) -> str:
    """Return the metric of a choice: a label's own metric on validation data, else ``choice.metric``."""
    metric = next((x for labels in combinations if (x := study.metric(labels))), None)
    return f"val/{metric.partition('/')[2]}" if metric else choice.metric


def is_chosen(labels: Mapping[str, str], choices: Sequence[ChoiceFound]) -> bool:
    """Return whether a combination has the labels that were chosen for it."""
    return all(
        labels[choice["axis"]] == choice["chosen"] for choice in choices if matches(labels, choice["for"])
    )


def _value(result: Result | None, metric: str, worst: float) -> float | None:
    """Return the metric of a finished run, ``worst`` for a diverged run, None without a result."""
    if result is None:
        return None
    metrics = metric_values(result)
    if metric not in metrics:
        raise ConfigurationError(f"choose: the runs have no metric {metric}; there are {', '.join(metrics)}")
    value = metrics[metric]
    return worst if not isfinite(value) or result["diverged"] else value
