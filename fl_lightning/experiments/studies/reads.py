"""Early check that the runs of a study log all metrics that the study needs."""

import json
import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from pydoc import locate
from typing import Any

import torch

from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.experiments.run_directory.config_digest import class_path
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.run_directory.finished import metric_values
from fl_lightning.experiments.studies.cells import Cell, State
from fl_lightning.experiments.studies.choosing import metric_of, trials
from fl_lightning.experiments.studies.definition import Labels, Study
from fl_lightning.round.metrics import MetricSetting, make_metrics
from fl_lightning.round.module import FederatedModule

_SHIPPED = ("fl_lightning.", "lightning.")
"""Packages whose callbacks log the same metrics during training and at the end of a run."""

_HEAD = 1 << 18
"""Number of bytes to read from the start of a ``metrics.jsonl``; enough for hundreds of rounds."""


class Reads:
    """Early check that the cells of a study log all metrics that the study needs.

    The callbacks of a cell determine when the names of the metrics are known:

    - Without callbacks, after the evaluation of the initial model.
    - With shipped callbacks only, after the first evaluation that follows a round.
    - With other callbacks, after the run.

    Args:
        study: The study.

    Attributes:
        study: The study, including values that were added to grids.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
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
        """Return the cells in an order in which all metrics are known soon.

        Cells that log the same metrics form a kind. One cell of each kind comes first. Call this
        method with all cells before :meth:`check`.
        """
        for cell in cells:
            self._of_run.setdefault(cell.key, {})[cell] = None
        first = {*{self._kind(cell.labels): cell for cell in reversed(cells)}.values()}
        return sorted(cells, key=lambda cell: cell not in first)

    def check(self, cells: Sequence[tuple[Cell, State]]) -> None:
        """Check all cells whose metrics are already known.

        Args:
            cells: Cells with their states.

        Raises:
            ConfigurationError: A trial lacks the metric of the choice, or a cell lacks the metric
                that a label sets. The error is also raised if no cell has the metric of a column.
        """
        for cell, state in cells:
            names = set() if cell in self._checked else logged(cell, state)
            if not names:
                continue
            self._checked.add(cell)
            for same_run in self._of_run[cell.key]:
                self._logged.setdefault(self._kind(same_run.labels), set()).update(names)
                if (metric := self.study.metric(same_run.labels)) is not None:
                    _expect(f"metric: the runs of {same_run.name} have no", metric, names)
                for labels, metric in self._trials:
                    if labels == same_run.labels:
                        _expect("choose: the runs have no metric", metric, names)
        if self._kinds == self._logged.keys():
            for name in self.study.definition.metrics:
                _expect("metrics: no run has", name, {*chain(*self._logged.values())})

    def _kind(self, labels: Labels) -> tuple[str, ...]:
        """Return the settings that may affect which metrics are logged. Numbers are left out."""
        arguments = self.study.arguments(labels, 0)
        return tuple(argument for argument in arguments if not re.fullmatch(r"[^=]+=[-+.\de]+", argument))


def logged(cell: Cell, state: State) -> set[str]:
    """Return the metrics that a cell's result has or will have. If unknown, the set is empty."""
    if state.phase not in ("done", "running"):  # in a new run, a stale cell may log other metrics
        return set()
    if state.result is not None:
        return {*metric_values(state.result)}
    callbacks = cell.config["trainer"]["callbacks"]
    if state.attempt is None or not _is_shipped(cell.config):
        return set()
    for row in _first_rows(state.attempt.metrics):
        names = {name for name in row if name.startswith(("val/", "test/"))}
        if names and (not callbacks or row["round"]):
            return names | {f"test/{name.partition('/')[2]}" for name in names}
    return set()


def texts(module: FederatedModule, config: Config, num_classes: int | None) -> set[str]:
    """Return parts of metric names, such as ``accuracy``.

    The name of each evaluation metric of a cell contains one of these parts. For example,
    ``test/personal_accuracy`` contains ``accuracy``. If a run uses the user's own classes, its
    metrics can have any name. The only part is then the empty text, which every name contains.
    """
    if not _is_shipped(config) or not type(module.task).__module__.startswith(_SHIPPED):
        return {""}
    logs = chain(*(getattr(locate(class_path(entry)), "logs", ()) for entry in _callbacks(config)))
    evaluated = {name for name in logs if name.startswith(("val/", "test/"))}
    numbers = [name for name, made in module.task_metrics.items() if not _is_array(made, num_classes)]
    return {*module.task.best, *numbers, *evaluated}


def _is_array(setting: MetricSetting, num_classes: int | None) -> bool:
    """Return whether a metric has several values even without samples, as a confusion matrix."""
    with warnings.catch_warnings(), suppress(Exception):  # other metrics may need samples
        warnings.simplefilter("ignore")
        (metric,) = make_metrics({"": setting}, num_classes).values()
        return torch.as_tensor(metric.compute()).numel() > 1
    return False


def check_columns_exist(metrics: Iterable[str], known: Collection[str]) -> None:
    """Check, before the first run, that the runs can log the metrics of a study's table.

    Args:
        metrics: Metrics of the study's table.
        known: Results of :func:`texts` for all cells.

    Raises:
        ConfigurationError: The name of an evaluation metric contains none of the texts.
    """
    for metric in metrics:
        split = metric.partition("/")[0]
        if split in ("val", "test") and not any(text in metric for text in known):
            near = nearest(metric, [text if "/" in text else f"{split}/{text}" for text in known])
            raise ConfigurationError(
                f"metrics: no run can have {metric}{near}; every number has one of {', '.join(sorted(known))} in its name"
            )


def _callbacks(config: Config) -> list[Any]:
    callbacks = config["trainer"]["callbacks"] or []
    return callbacks if isinstance(callbacks, list) else [callbacks]


def _is_shipped(config: Config) -> bool:
    entries = [*_callbacks(config), config["model"]]
    return all(class_path(entry).startswith(_SHIPPED) or not class_path(entry) for entry in entries)


def _first_rows(path: Path) -> list[dict[str, float]]:
    """Return the complete rows within the first ``_HEAD`` bytes of a ``metrics.jsonl``."""
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
