"""Labels that are chosen on validation data: a learning rate, or T*."""

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
    """The combinations that are tried, by the labels of ``by``: one for each label of the axis."""
    first = {axis: next(iter(labels)) for axis, labels in study.axes.items()}
    fixed = {
        axis: label
        for axis, label in {**first, **choice.at}.items()
        if axis != choice.axis and axis not in choice.by
    }
    found: dict[tuple[str, ...], list[Labels]] = {}
    for labels in study.combinations(fixed):
        found.setdefault(tuple(labels[axis] for axis in choice.by), []).append(labels)
    return found


def trial_cells(study: Study, make: Callable[[Labels, int], Cell]) -> list[list[Cell]]:
    """The cells of each choice.

    Raises:
        ConfigurationError: A cell has no validation data, a combination has no trial, or labels to choose from are equal runs.
    """
    found = []
    for choice in study.choices:
        seed = study.scale.seeds[0] if choice.seed is None else choice.seed
        tried = trials(study, choice)
        for labels in study.combinations():
            if tuple(labels[axis] for axis in choice.by) not in tried:
                raise ConfigurationError(
                    f"choose: no trial chooses {choice.axis} for {labels}; name labels of other axes, with which it is there, by at"
                )
        own = []
        for combinations in tried.values():
            grid = [make(labels, seed) for labels in combinations]
            if len({cell.key for cell in grid}) < len(grid):
                raise ConfigurationError(
                    f"choose: the labels of {choice.axis} make equal runs such as {grid[0].name}: a setting of the command line, or of a "
                    "later axis, decides instead; leave it out"
                )
            own += grid
        for cell in own:
            settings = cell.config["data"].get("init_args") or {}
            if "val_fraction" in settings and not settings["val_fraction"]:
                raise ConfigurationError(
                    f"data.val_fraction: {choice.axis} is chosen on validation data, and the cell {cell.name} has none; set it to 0.1, say"
                )
        found.append(own)
    return found


def chosen(
    study: Study, cells: Sequence[Sequence[Cell]], accept_stale: bool = False, diverged: Collection[Path] = ()
) -> list[ChoiceFound]:
    """What the finished trials say: the label with the largest metric, of a loss the smallest; of equal ones the first.

    A trial that has diverged is the worst; one that has failed otherwise leaves the choice open. Labels that are read by a
    metric of their own, such as ``test/accuracy_silobn``, are chosen by that metric on validation data.

    Args:
        study: The study.
        cells: The cells of each choice.
        accept_stale: Whether results of other source count.
        diverged: Keys of the cells that an update ended which was not finite.
    """
    found: list[ChoiceFound] = []
    for choice, own in zip(study.choices, cells, strict=True):
        for key, combinations in trials(study, choice).items():
            by = dict(zip(choice.by, key, strict=True))
            metric = metric_of(study, choice, combinations)
            states = {cell: cell.state(accept_stale) for cell in own if matches(cell.labels, by)}
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
            found.append(
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
    return found


def metric_of(study: Study, choice: Choice, combinations: Sequence[Labels]) -> str:
    """The metric by which one of some combinations is chosen: on validation data that of a label, where one has its own."""
    read = next((x for labels in combinations if (x := study.metric(labels))), None)
    return f"val/{read.partition('/')[2]}" if read else choice.metric


def is_chosen(labels: Mapping[str, str], choices: Sequence[ChoiceFound]) -> bool:
    """Whether a combination has the labels that were chosen for it."""
    return all(labels[one["axis"]] == one["chosen"] for one in choices if matches(labels, one["for"]))


def _value(result: Result | None, metric: str, worst: float) -> float | None:
    """A finished run's metric; that of a diverged run is the worst."""
    if result is None:
        return None
    metrics = metric_values(result)
    if metric not in metrics:
        raise ConfigurationError(f"choose: the runs have no metric {metric}; there are {', '.join(metrics)}")
    value = metrics[metric]
    return worst if not isfinite(value) or result["diverged"] else value
