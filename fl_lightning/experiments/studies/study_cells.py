"""The cells of a study, made from its file and the settings of the command line."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cached_property
from typing import Any

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.studies.cells import RUNS, Cell
from fl_lightning.experiments.studies.choosing import chosen, is_chosen, trial_cells, with_wider_grids
from fl_lightning.experiments.studies.definition import (
    FOLD,
    HELD_OUT,
    Labels,
    Study,
    as_argument,
    labels_of,
)
from fl_lightning.experiments.studies.reading import all_mistakes
from fl_lightning.experiments.studies.report_rule import LAST, check_rule
from fl_lightning.experiments.studies.study_frame import Chosen

_COMPUTED = {
    "threads": 1, "trainer.accelerator": "cpu", "trainer.devices": 1, "trainer.num_nodes": 1,
    "model.executor": "SequentialExecutor", "model.executor.compile": False,
}  # fmt: skip
"""Default settings of cells.

With these settings, results do not depend on how many cells run at a time."""

_FIXED = {"ckpt_path": None, "accept_data": False, "weights_only": None, "trainer.fast_dev_run": False}
"""Settings that no cell may change: ``fast_dev_run``, for example, writes no result."""


def _folds(config: Config) -> int | None:
    return (config["data"].get("init_args") or {}).get("folds")


class StudyCells:
    """The cells of a study. Settings on the command line apply to all cells.

    Args:
        study: The study.
        fit_options: Settings of all cells as arguments of ``fit``.
        resolve: Function that returns the resolved configuration for arguments of ``fit``.
        build: Function that makes the objects of a run for arguments of ``fit``.
        rerun: Whether results of other code are computed anew (default False).
    """

    def __init__(
        self,
        study: Study,
        fit_options: Sequence[str],
        resolve: Callable[[tuple[str, ...]], Config],
        build: Callable[[Sequence[str]], Any],
        rerun: bool = False,
    ) -> None:
        self._resolve, self._build = resolve, build
        self.study, self._options, self._rerun = study, list(fit_options), rerun
        self._made: dict[tuple[Any, ...], Cell] = {}
        if next(study.combinations(), None) is None:
            raise ConfigurationError(
                f"study: {study.name} omits all of its cells at scale {study.scale_name}; change 'without'"
            )
        self._name_labels()

    def _name_labels(self) -> None:
        """Replace the label ``all`` of the folds, and the label ``each`` of the held-out clients."""
        axes = {axis: {**labels} for axis, labels in self.study.axes.items()}
        words = {
            axis: word for axis, word in ((FOLD, "all"), (HELD_OUT, "each")) if word in axes.get(axis, ())
        }
        blank = axes | {axis: {word: {}} for axis, word in words.items()}
        self.study = replace(self.study, axes=blank)
        settings = self._settings(next(self.study.combinations()))
        if FOLD in axes:
            folds = _folds(self._resolve(tuple(settings)))
            if folds is None:
                raise ConfigurationError(f"axes.{FOLD} needs the number of folds; set data.folds, such as 5")
            axes[FOLD] = labels_of(FOLD, [*range(folds)]) if FOLD in words else axes[FOLD]
            self.study = replace(self.study, folds=folds)
        if HELD_OUT in words:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                data = self._build(settings).datamodule
                data.prepare_data()
                data.setup("fit")
            if not data.client_names:
                raise ConfigurationError(f"axes.{HELD_OUT}: each needs clients with names; set data.groups")
            axes[HELD_OUT] = {name: {HELD_OUT: [name]} for name in data.client_names}
        self.study = replace(self.study, axes=axes)

    def check(self) -> None:
        """Check the settings of some cells by building their data, model and callbacks.

        Each label occurs in at least one of these cells.

        Raises:
            ConfigurationError: A setting is invalid. The message lists the first mistake of each
                cell.
        """
        seen: set[tuple[str, str]] = set()
        mistakes: dict[str, str] = {}
        for labels in self.study.combinations():
            if not seen.issuperset(labels.items()):
                try:
                    settings = self._settings(labels)
                    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                        self._build(settings)
                    config = self._resolve(tuple(settings))
                    check_rule(self.study.definition.report, self.study.definition.metrics, config)
                except ConfigurationError as error:
                    names = " ".join(f"{axis}={label}" for axis, label in labels.items())
                    mistakes.setdefault(f"{error}", names)
                seen.update(labels.items())
        if len(mistakes) == 1:
            raise ConfigurationError(*mistakes)
        if mistakes:
            raise all_mistakes("study", [f"{labels}: {line}" for line, labels in mistakes.items()])

    @cached_property
    def any(self) -> Cell:
        """First cell of the study."""
        return self.cell(next(self.study.combinations()), self.study.scale.seeds[0])

    @cached_property
    def trials(self) -> list[list[Cell]]:
        """Trial cells of each choice, with one list per choice."""
        return trial_cells(self.study, self.cell)

    @property
    def trial_cells(self) -> list[Cell]:
        """Trial cells of all choices, as a single list."""
        return [cell for trial in self.trials for cell in trial]

    def choose(self, run: Callable[[list[Cell]], None] = lambda cells: None) -> list[Chosen]:
        """Return the choices of the study.

        While the chosen learning rate is at the edge of its grid, the grid is extended.

        Args:
            run: Function that runs the trials (default: run no trial).
        """
        while True:
            run(self.trial_cells)
            choices = chosen(self.study, self.trials)
            before, self.study = self.study, with_wider_grids(self.study, choices)
            if self.study is before:
                return choices
            del self.trials

    def cell(self, labels: Labels, seed: int) -> Cell:
        """Return the cell with these labels and this seed."""
        key = (*labels.items(), seed)
        if key not in self._made:
            first = self.study.seeds(labels)[0]
            config = self._resolve(tuple(self._settings(labels)))
            if FOLD in labels and _folds(config) != self.study.folds:
                raise ConfigurationError(
                    f"data.folds: {_folds(config)} in one cell and {self.study.folds} in another; a study has one number of folds"
                )
            given = {**config, "trainer.fast_dev_run": config["trainer"]["fast_dev_run"]}
            for name, value in {**_FIXED, "seed_everything": first}.items():
                if given[name] != value:
                    raise ConfigurationError(
                        f"{name}: {given[name]} is no setting of a study's cells: the study sets seeds and checkpoints; leave it out"
                    )
            rounds = max(int(config["trainer"]["max_epochs"]), 0) or "budget"
            folder = f"{RUNS}/{rounds}"
            if self.study.definition.report != LAST:  # the value depends on how often the cell is evaluated
                folder += f"-every-{config['trainer']['check_val_every_n_epoch']}"
            # the configuration is resolved once for all seeds
            config = {**config, "seed_everything": seed, "name": folder}
            self._made[key] = Cell(labels, seed, config, rerun=self._rerun)
        return self._made[key]

    def needed_metrics(self, cell: Cell) -> list[str]:
        """Return the metrics that the study reads from a cell."""
        if own := self.study.metric(cell.labels):
            return [own]
        chosen_by = [choice.metric for choice in self.study.choices if choice.seed == cell.seed]
        return [*self.study.definition.metrics, *chosen_by]

    def _settings(self, labels: Labels) -> list[str]:
        """Return the arguments of ``fit`` for a combination of labels with its first seed."""
        computed = [as_argument(name, value) for name, value in _COMPUTED.items()]
        arguments = self.study.arguments(labels, self.study.seeds(labels)[0])
        return [*self.study.base, *computed, *arguments, *self._options]

    def table(self, choices: Sequence[Chosen]) -> list[Cell]:
        """Return the cells of the table, for all seeds.

        If the study has chosen a label of an axis, the table omits the other labels of this axis.
        """
        combinations = [x for x in self.study.combinations() if is_chosen(x, choices)]
        return [self.cell(labels, seed) for labels in combinations for seed in self.study.seeds(labels)]
