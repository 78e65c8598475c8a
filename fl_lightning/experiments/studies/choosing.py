"""Choice of a setting, such as a learning rate, by its metric on validation data."""

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from typing import Literal

from fl_lightning.clients.tasks import best_is
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.result import Result, metric_values
from fl_lightning.experiments.studies.axis_labels import is_number
from fl_lightning.experiments.studies.cells import Cell
from fl_lightning.experiments.studies.definition import Choice, Labels, Study, matches
from fl_lightning.experiments.studies.study_frame import Chosen


def trials(study: Study, choice: Choice) -> dict[tuple[str, ...], list[Labels]]:
    """Return the combinations of labels to try for a choice.

    The combinations are grouped by the labels of the axes ``choice.by``. Each group has one
    combination for each label of the axis ``choice.axis``.
    """
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
    """Return the cells that train the trials of each choice.

    Raises:
        ConfigurationError: A cell has no validation data, or the seed of the trials is a seed of
            the table. The error is also raised if a combination has no trial, or if two labels give
            the same run.
    """
    cells_of_choices = []
    for choice in study.choices:
        tried = trials(study, choice)
        for labels in study.combinations():
            if choice.seed in study.seeds(labels):
                free = 1 + max(seed for row in study.combinations() for seed in study.seeds(row))
                raise ConfigurationError(
                    f"choose: seed {choice.seed} of the trials is a seed of the table too, so "
                    f"{choice.axis} would be chosen on the tested runs; name another seed, such as {free}"
                )
            if tuple(labels[axis] for axis in choice.by) not in tried:
                raise ConfigurationError(
                    f"choose: no trial chooses {choice.axis} for {labels}; "
                    "name labels of other axes that have trials under 'at'"
                )
        cells: list[Cell] = []
        for combinations in tried.values():
            grid = [make(labels, choice.seed) for labels in combinations]
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


def chosen(study: Study, cells: Sequence[Sequence[Cell]]) -> list[Chosen]:
    """Return each choice with the chosen label: the label with the best validation metric.

    The best loss is the smallest loss. The best accuracy is the largest accuracy. Among equal
    values, the first label is chosen. A diverged trial ranks last. No label is chosen until all
    trials have ended.

    If a label sets the metric ``test/accuracy_silobn``, the choice uses ``val/accuracy_silobn``.

    Args:
        study: The study.
        cells: Trial cells of each choice.

    Raises:
        ConfigurationError: It is not known whether large or small values of the metric are best.
    """
    choices: list[Chosen] = []
    for choice, own_cells in zip(study.choices, cells, strict=True):
        for key, combinations in trials(study, choice).items():
            by = dict(zip(choice.by, key, strict=True))
            metric = metric_of(study, choice, combinations)
            states = {cell: cell.state() for cell in own_cells if matches(cell.labels, by)}
            known_best = next((x.result.get("best", {}) for x in states.values() if x.result), {})
            direction = best_is(metric, known=known_best)
            worst = inf if direction == "min" else -inf
            values: dict[str, float | None] = {}
            for cell, state in states.items():
                value = _value(state.result if state.phase == "done" else None, metric, worst)
                values[cell.labels[choice.axis]] = worst if state.diverged else value
            known = {label: value for label, value in values.items() if value is not None}
            if known and direction is None:
                raise ConfigurationError(
                    f"choose: {metric} does not say whether large or small values are best; choose by val/loss or "
                    "by the main metric of the task"
                )
            best = None
            if values and len(known) == len(values):
                best = (min if worst > 0 else max)(known, key=lambda label: known[label])
            tried = next(iter(combinations))
            at = {a: x for a, x in tried.items() if a not in (choice.axis, *by) and len(study.axes[a]) > 1}
            settings = sorted({name for label in study.axes[choice.axis].values() for name in label})
            added = [label for label in values if by in study.added.get((choice.axis, label), ())]
            if added:
                values = {label: values[label] for label in sorted(values, key=float)}
            choices.append(
                Chosen(choice.axis, by, at, metric, best, values, choice.seed, settings, extended=added)
            )
    return choices


def with_wider_grids(study: Study, choices: Sequence[Chosen]) -> Study:
    """Add one learning rate to each grid whose chosen value is at an edge.

    The new value lies beyond the edge. For the edge value ``a`` and its neighbour ``b``, the new
    value is ``a * a / b``. If all trials diverged, the new value lies below the smallest value.
    Repeated calls add at most ``extend`` values to a grid.

    Args:
        study: The study.
        choices: Choices of the study, with the values of all trials.

    Returns:
        The study with the extended grids; ``study`` itself if no grid is extended.
    """
    limits = {choice.axis: choice.extend for choice in study.choices}
    for choice in choices:
        axis, by, edge = choice.axis, choice.by, edge_of(choice)
        if edge is None or not axis.endswith(".lr") or len(choice.extended) >= limits[axis]:
            continue
        grid = sorted(map(float, choice.values))
        outer, inner = (grid[0], grid[1]) if edge == "smallest" else (grid[-1], grid[-2])
        of_values = all([*settings] == [axis] for settings in study.axes[axis].values())
        value = float(f"{outer * outer / inner:.2g}")
        known = study.axes[axis].keys() - {label for name, label in study.added if name == axis}
        if of_values and grid[0] > 0 and f"{value:g}" not in known and value not in map(float, known):
            wider = study.extended(axis, value, by)
            study = wider if any(wider.combinations({**by, axis: f"{value:g}"})) else study
    return study


def edge_of(choice: Chosen) -> Literal["smallest", "largest"] | None:
    """Return whether the chosen value is the smallest or the largest; None if neither.

    If all trials diverged, the result is ``"smallest"``, because even the smallest value is too
    large.
    """
    tried = [*choice.values]
    if choice.chosen is None or len(tried) < 2 or not all(map(is_number, tried)):
        return None
    if not any(value is None or isfinite(value) for value in choice.values.values()):
        return "smallest"
    if choice.chosen == min(tried, key=float):
        return "smallest"
    return "largest" if choice.chosen == max(tried, key=float) else None


def metric_of(study: Study, choice: Choice, combinations: Sequence[Labels]) -> str:
    """Return the metric of a choice.

    If a label sets the metric ``test/accuracy_silobn``, the result is ``val/accuracy_silobn``. If
    no label sets a metric, it is ``choice.metric``.
    """
    metric = next((x for labels in combinations if (x := study.metric(labels))), None)
    if metric and "/" not in metric:  # the full name of a LightningModule's metric
        return metric.replace("test", "val", 1)
    return f"val/{metric.partition('/')[2]}" if metric else choice.metric


def is_chosen(labels: Mapping[str, str], choices: Sequence[Chosen]) -> bool:
    """Return whether a combination has all labels that were chosen for it."""
    return all(labels[choice.axis] == choice.chosen for choice in choices if matches(labels, choice.by))


def _value(result: Result | None, metric: str, worst: float) -> float | None:
    """Return a run's metric; ``worst`` if the run has diverged, None if it has no result."""
    if result is None:
        return None
    metrics = metric_values(result)
    if metric not in metrics:
        raise ConfigurationError(f"choose: the runs have no metric {metric}; there are {', '.join(metrics)}")
    value = metrics[metric]
    return worst if not isfinite(value) or result["diverged"] else value
