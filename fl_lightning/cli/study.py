"""``python -m fl_lightning study``: run the cells of a study and write tables and verdicts."""

import io
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from fl_lightning.cli import study_cell
from fl_lightning.cli.command_line import build, resolve
from fl_lightning.cli.messages import command
from fl_lightning.cli.options import ENGINES, study_options
from fl_lightning.console import in_words
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.interruption import Stopped
from fl_lightning.experiments.studies.cells import RUNS, Cell, expect_newest_data
from fl_lightning.experiments.studies.choosing import chosen, is_chosen, trial_cells, with_wider_grids
from fl_lightning.experiments.studies.collecting import collect
from fl_lightning.experiments.studies.definition import Labels, Study, as_argument
from fl_lightning.experiments.studies.engines.base import Engine
from fl_lightning.experiments.studies.figures import write_figures
from fl_lightning.experiments.studies.progress import StudyProgress, time_left
from fl_lightning.experiments.studies.reading import all_mistakes, read_study
from fl_lightning.experiments.studies.report_rule import LAST, check_rule
from fl_lightning.experiments.studies.running import Runner, share_first_stages
from fl_lightning.experiments.studies.study_frame import Chosen, StudyFrame
from fl_lightning.experiments.studies.table_columns import FURTHER
from fl_lightning.experiments.studies.tables import (
    as_text,
    caption,
    choice_in_words,
    remark_lines,
    spread_table,
    whole_table,
    write_tables,
)
from fl_lightning.files import folder_below, shipped

_COMPUTED = {
    "threads": 1, "trainer.accelerator": "cpu", "trainer.devices": 1, "trainer.num_nodes": 1,
    "model.executor": "SequentialExecutor", "model.executor.compile": False,
}  # fmt: skip
"""Default settings of cells.

With these settings, results do not depend on how many cells run at a time."""

_FIXED = {"ckpt_path": None, "accept_data": False, "weights_only": None, "trainer.fast_dev_run": False}
"""Settings that no cell may change: ``fast_dev_run``, for example, writes no result."""

_resolved = cache(resolve)


@contextmanager
def _cells_are_kept() -> Iterator[None]:
    """Tell the user of an interrupted study that finished cells and checkpoints are kept."""
    try:
        yield
    except Stopped as stopped:
        stopped.kept = (
            "finished cells and the checkpoints of others are kept; the same command resumes the study"
        )
        raise


@command()
@_cells_are_kept()
def main(args: Sequence[str]) -> None:
    """Run a study, print the tables, and write the tables to files.

    Args:
        args: Arguments after ``study``.
    """
    options, fit_options = study_options(args)
    study = read_study(shipped(options.file) or Path(options.file), options.scale)
    cells = StudyCells(study, fit_options, options.rerun)
    cells.check()
    if options.dry_run:
        dry_run(cells, options.jobs or 1)
        return
    name = options.name or f"{study.name}-{study.scale_name}"
    folder = folder_below(cells.any.config["run_root"], f"studies/{name}")
    engine = make_engine(options.engine)
    jobs = options.jobs or _room(cells, engine)
    with StudyProgress(cells.needed_metrics, jobs, study.scale.cell_seconds) as progress:
        runner = Runner(folder, engine, jobs, progress.show)
        choices = cells.choose(runner.run)
        while True:
            table = cells.table(choices)
            runner.run([*cells.trial_cells, *table])
            before, choices = choices, cells.choose(runner.run)
            # if the data have changed, the trials were run again, which may have changed the choice
            if choices == before:
                break
    if table:
        named = ["--name", options.name] if options.name else []
        command_line = ["study", options.file, "--scale", options.scale, *named, *fit_options]
        results = replace(
            collect(cells.study, table, choices, runner.failed),
            command=f"python -m fl_lightning {shlex.join(command_line)}",
        )
        results.save(folder)
        write_tables(folder, results)
        write_figures(folder, results)
        print_results(results, folder)
    unique = {cell.key: cell for cell in (*cells.trial_cells, *table)}
    failed = [cell for key, cell in unique.items() if key in runner.failed]
    in_table = {cell.key for cell in table}
    worst = {cell for cell in failed if cell.state().diverged and cell.key not in in_table}
    for cell in failed:
        what = "failed, and counted as the worst trial" if cell in worst else "failed"
        print(f"{what}: {cell.name}: {runner.failed[cell.key]}")
    if failed := [cell for cell in failed if cell not in worst]:
        raise ConfigurationError(
            f"study: {len(failed)} cell{'s' * (len(failed) > 1)} failed; fix the errors above and run the same command again"
        )


class StudyCells:
    """The cells of a study. Settings on the command line apply to all cells.

    Args:
        study: The study.
        fit_options: Settings of all cells as arguments of ``fit``.
        rerun: Whether results of other code are computed anew (default False).
    """

    def __init__(self, study: Study, fit_options: Sequence[str], rerun: bool = False) -> None:
        self.study, self._options, self._rerun = study, list(fit_options), rerun
        self._made: dict[tuple[Any, ...], Cell] = {}
        if next(study.combinations(), None) is None:
            raise ConfigurationError(
                f"study: {study.name} omits all of its cells at scale {study.scale_name}; change 'without'"
            )

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
                        build(settings)
                    config = _resolved(tuple(settings))
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
            config = _resolved(tuple(self._settings(labels)))
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


def dry_run(cells: StudyCells, jobs: int) -> None:
    """Print the state of each cell and the estimated time."""
    # the first pass finds the newest data, and the second pass uses only trials on the newest data
    for _ in range(2):
        choices = cells.choose()
        every = [*cells.trial_cells, *cells.table(choices)]
        unique = [*{cell.key: cell for cell in every}.values()]
        expect_newest_data([cell.state() for cell in unique], unique)
    share_first_stages(unique)
    states = [(cell, cell.state()) for cell in unique]
    for cell, state in states:
        waits = cell.parent is not None and state.phase != "done"
        after = f", after round {cell.shared_rounds} of {cell.parent.name}" if cell.parent and waits else ""
        why = f": {state.why}" if state.why else ""
        place = state.attempt.path if state.attempt else ""
        print(f"{state.phase:<8} {cell.name}{after}{why}  {place}".rstrip())
    guess: list[Chosen] = [replace(x, chosen=x.chosen or next(iter(x.values))) for x in choices]
    later = {cell.key: cell for cell in cells.table(guess) if cell.key not in {known.key for known in unique}}
    if any(choice.chosen is None for choice in choices):
        names = ", ".join(dict.fromkeys(choice.axis for choice in choices))
        print(f"later    {len(later)} cells, when {names} is chosen by the trials above")
    done = sum(state.phase == "done" for _, state in states)
    everything = [*states, *((cell, cell.state()) for cell in later.values())]
    seconds = time_left(everything, jobs, cells.study.scale.cell_seconds)
    known = f"about {in_words(seconds)} left with --jobs {jobs}" if seconds is not None else ""
    print(f"{done} of {len(everything)} cells are done; {known or 'no cell has been timed yet'}")


def print_results(results: StudyFrame, folder: Path) -> None:
    """Print the tables and the verdicts."""
    print(caption(results))
    for table in (spread_table(results), whole_table(results)):
        if table is not None:
            print(f"\n{as_text(table)}")
    for line in remark_lines(results):
        print(f"\n{line}")
    print(f"\ncolumns for 'report {folder} --columns': {', '.join([*results.metrics.values(), *FURTHER])}")
    for choice in results.choices:
        print(f"\n{choice_in_words(choice)}")
    for claim in results.claims:
        print(f"\n{claim.claim}: {claim.verdict} ({claim.words})")
    print(f"\nfiles  {folder}")


def make_engine(name: str) -> Engine:
    """Return a new engine, given its name.

    Raises:
        ConfigurationError: The package of the engine is missing.
    """
    try:
        module = import_module(f"fl_lightning.experiments.studies.engines.{name}")
        engine: Engine = getattr(module, ENGINES[name])(study_cell.__name__)
    except ModuleNotFoundError as error:
        message = f"--engine: {name} needs the package {error.name}; pip install 'fl_lightning[{name}]'"
        raise ConfigurationError(message) from error
    return engine


def _room(cells: StudyCells, engine: Engine) -> int:
    """Return the default number of cells at a time."""
    first = cells.any.config
    if engine.gpus and first["trainer"]["accelerator"] != "cpu":
        return engine.gpus
    return max(engine.cores // (first["threads"] or 1), 1)
