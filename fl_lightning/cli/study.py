"""``python -m fl_lightning study``: the runs of a table or figure, their tables and what holds of the claims."""

import io
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from fl_lightning.cli.command_line import build, resolve, shipped
from fl_lightning.cli.messages import CommandParser, command
from fl_lightning.console import in_words
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.interruption import Stopped
from fl_lightning.experiments.run_directory.description import OUTSIDE_THE_HASH
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.studies.cells import RUNS, Cell, State, expect_newest_data
from fl_lightning.experiments.studies.choosing import chosen, is_chosen, trial_cells
from fl_lightning.experiments.studies.definition import Labels, Study, as_argument
from fl_lightning.experiments.studies.engines.base import Engine
from fl_lightning.experiments.studies.figures import write_figures
from fl_lightning.experiments.studies.findings import findings
from fl_lightning.experiments.studies.found import ChoiceFound, Found
from fl_lightning.experiments.studies.progress import StudyProgress, time_left
from fl_lightning.experiments.studies.reading import read_study
from fl_lightning.experiments.studies.reads import Reads
from fl_lightning.experiments.studies.running import Runner
from fl_lightning.experiments.studies.sharing import share_first_stages
from fl_lightning.experiments.studies.tables import (
    as_text,
    caption,
    choice_in_words,
    spread_table,
    whole_table,
    write_tables,
)
from fl_lightning.files import folder_below, write_json

ENGINES = {"local": "LocalEngine", "ray": "RayEngine", "slurm": "SlurmEngine"}
"""The classes of ``--engine``, in the modules of the same names in ``fl_lightning.experiments.studies.engines``."""

_COMPUTED = {
    "threads": 1, "trainer.accelerator": "cpu", "trainer.devices": 1, "trainer.num_nodes": 1,
    "model.executor": "SequentialExecutor", "model.executor.compile": False,
}  # fmt: skip
"""How each cell is computed unless the study or the command line says otherwise: the same bits however many run at a time."""

_DESCRIPTION = """\
Run the cells of a study that have no result yet, and print its table. The same command again goes on where it was stopped. All other
options are settings of every cell, such as --data.data_dir data/cifar10 or --trainer.accelerator gpu."""


@contextmanager
def _cells_are_kept() -> Iterator[None]:
    """Let a stop say what is kept, at whatever moment it comes."""
    try:
        yield
    except Stopped as stopped:
        stopped.kept = "finished cells and the checkpoints of others are kept; the same command goes on"
        raise


@command()
@_cells_are_kept()
def main(args: Sequence[str]) -> None:
    """Run a study, print and write its tables.

    Args:
        args: Arguments after ``study``.
    """
    parser = CommandParser(
        "study",
        _DESCRIPTION,
        "FILE [--scale quick|reduced|full] [--engine local|ray|slurm] [--jobs N] [--dry-run] [--accept-stale] [--name NAME] [--max-cells N] [options of fit]",
    )
    parser.add_argument("file", metavar="FILE", help="a study, such as configs/studies/fixbn_table4.yaml")
    parser.add_argument("--scale", default="quick", help="quick (default), reduced or full")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="local",
        help="who computes: this machine (default), a Ray cluster, Slurm",
    )
    parser.add_argument("--jobs", type=int, help="cells at a time (default: one for each GPU or core)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the cells, what there is of each, and the time that is left",
    )
    parser.add_argument(
        "--accept-stale",
        action="store_true",
        help="take results of other source, versions or data as they are",
    )
    parser.add_argument(
        "--name",
        help="folder of its tables in runs/studies (default: that of FILE and --scale, whatever the options)",
    )
    parser.add_argument(
        "--max-cells",
        type=int,
        default=1000,
        help="how many cells its axes and seeds may make (default 1000): another number allows more",
    )
    own, fit_options = parser.parse_known_args(args)
    if own.jobs is not None and own.jobs < 1:
        raise ConfigurationError(f"--jobs: {own.jobs} must be at least 1")
    if own.name is not None and Path(own.name).name != own.name:
        raise ConfigurationError(f"--name: {own.name!r} must be the name of a folder, such as mine")
    study = read_study(Path(shipped(own.file)), own.scale)

    if study.size > own.max_cells:
        raise ConfigurationError(
            f"study: {study.name} has {study.size:,} cells at scale {own.scale}, more than --max-cells {own.max_cells}; name fewer labels or "
            f"seeds, or allow them with --max-cells {study.size}"
        )

    cells = StudyCells(study, fit_options)
    cells.check()
    if own.dry_run:
        dry_run(cells, own.jobs or 1, own.accept_stale)
        return
    name = own.name or f"{study.name}-{study.scale_name}"
    folder = folder_below(cells.any.config["run_root"], f"studies/{name}")
    engine = make_engine(own.engine)
    jobs = own.jobs or _room(cells, engine)
    reads = Reads(study)
    with StudyProgress(jobs, study.scale.cell_seconds) as progress:

        def show(states: Sequence[tuple[Cell, State]]) -> None:
            progress.show(states)
            reads.check(states)

        runner = Runner(folder, engine, jobs, own.accept_stale, show)
        trials = reads.soon([cell for trial in cells.trials for cell in trial])
        runner.run(trials)
        choices = chosen(study, cells.trials, own.accept_stale, runner.diverged)
        table = cells.table(choices)
        runner.run([*trials, *reads.soon(table)])
        while (again := chosen(study, cells.trials, own.accept_stale, runner.diverged)) != choices:
            choices, table = again, cells.table(again)  # a trial was on other data than the table's cells
            runner.run([*trials, *table])
    if table:
        found = findings(study, table, choices, runner.failed, own.accept_stale, runner.diverged)
        named = ["--name", own.name] if own.name else []
        command_line = ["study", own.file, "--scale", own.scale, *named, *fit_options]
        found |= {"options": shlex.join(deciding_options(fit_options)), "command": shlex.join(command_line)}
        write_json(folder / "study.json", found)
        write_tables(folder, found)
        write_figures(folder, found)
        print_found(found, folder)
    worst = runner.diverged - {cell.key for cell in table}
    for cell in {cell.key: cell for cell in (*trials, *table)}.values():
        if cell.key in runner.failed:
            what = "failed, and counted as the worst trial" if cell.key in worst else "failed"
            print(f"{what}: {cell.name}: {runner.failed[cell.key]}")
    if failed := runner.failed.keys() - worst:
        raise ConfigurationError(
            f"study: {len(failed)} cell{'s' * (len(failed) > 1)} failed; mend what is named above, and the same command runs them again"
        )


class StudyCells:
    """The cells of a study under the settings of a command line.

    Args:
        study: The study.
        fit_options: Settings of all cells, as arguments of ``fit``.
    """

    def __init__(self, study: Study, fit_options: Sequence[str]) -> None:
        self.study, self._options = study, list(fit_options)
        self._made: dict[tuple[Any, ...], Cell] = {}
        if not study.has():
            raise ConfigurationError(
                f"study: {study.name} leaves out all of its cells at scale {study.scale_name}"
            )

    def check(self) -> None:
        """Build data, model and callbacks of some cells, such that each label of each axis is among them.

        Raises:
            ConfigurationError: Settings do not work; the line names the first mistake of each of these cells.
        """
        seen: set[tuple[str, str]] = set()
        mistakes: dict[str, str] = {}
        for labels in self.study.combinations():
            if not seen.issuperset(labels.items()):
                try:
                    settings = self._settings(labels)
                    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                        build(settings)
                    _resolved(tuple(settings))
                except ConfigurationError as error:
                    names = " ".join(f"{axis}={label}" for axis, label in labels.items())
                    mistakes.setdefault(f"{error}", names)
                seen.update(labels.items())
        if len(mistakes) == 1:
            raise ConfigurationError(*mistakes)
        if mistakes:
            told = (f"({i}) {labels}: {line}" for i, (line, labels) in enumerate(mistakes.items(), 1))
            raise ConfigurationError(f"study: {len(mistakes)} mistakes: {' '.join(told)}")

    @cached_property
    def any(self) -> Cell:
        """Some cell."""
        return self.cell(next(self.study.combinations()), self.study.scale.seeds[0])

    @cached_property
    def trials(self) -> list[list[Cell]]:
        """The cells of each choice on validation data."""
        return trial_cells(self.study, self.cell)

    def cell(self, labels: Labels, seed: int) -> Cell:
        """The cell of a combination and a seed."""
        key = (*labels.items(), seed)
        if key not in self._made:
            first = self.study.seeds(labels)[0]
            config = deepcopy(_resolved(tuple(self._settings(labels))))
            own = {"seed_everything": first, "ckpt_path": None, "accept_data": False, "weights_only": None}
            for name, value in own.items():
                if config[name] != value:
                    raise ConfigurationError(
                        f"{name}: {config[name]} is no setting of a study's cells, which have seeds and checkpoints of their own; leave it out"
                    )
            rounds = max(int(config["trainer"]["max_epochs"]), 0) or "budget"
            config |= {"seed_everything": seed, "name": f"{RUNS}/{rounds}"}  # seeds differ in nothing else
            self._made[key] = Cell(labels, seed, config)
        return self._made[key]

    def _settings(self, labels: Labels) -> list[str]:
        """The settings of a combination, as arguments of ``fit``, with its first seed."""
        computed = [as_argument(name, value) for name, value in _COMPUTED.items()]
        arguments = self.study.arguments(labels, self.study.seeds(labels)[0])
        return [*self.study.base, *computed, *arguments, *self._options]

    def table(self, choices: Sequence[ChoiceFound]) -> list[Cell]:
        """The cells of the table: those with the labels that were chosen, or would be, of all seeds."""
        return [
            self.cell(labels, seed)
            for labels in self.study.combinations()
            if is_chosen(labels, choices)
            for seed in self.study.seeds(labels)
        ]


@cache
def _resolved(arguments: tuple[str, ...]) -> Config:
    return resolve(arguments)


def dry_run(cells: StudyCells, jobs: int, accept_stale: bool) -> None:
    """Print the cells, what there is of each, and the estimated time."""
    for _ in range(2):  # what is on other data than newer cells chooses nothing
        choices = chosen(cells.study, cells.trials, accept_stale)
        every = [*(cell for trial in cells.trials for cell in trial), *cells.table(choices)]
        unique = [*{cell.key: cell for cell in every}.values()]
        expect_newest_data([cell.state(accept_stale) for cell in unique], unique)
    share_first_stages(unique)
    states = [(cell, cell.state(accept_stale)) for cell in unique]
    for cell, state in states:
        after = (
            f", after round {cell.shared_rounds} of {cell.parent.name}"
            if cell.parent is not None and state.phase != "done"
            else ""
        )
        why = f": {state.why}" if state.why else ""
        print(
            f"{state.phase:<8} {cell.name}{after}{why}  {state.attempt.path if state.attempt else ''}".rstrip()
        )
    guess: list[ChoiceFound] = [
        {**one, "chosen": one["chosen"] or next(iter(one["values"]))} for one in choices
    ]
    later = {cell.key: cell for cell in cells.table(guess) if cell.key not in {known.key for known in unique}}
    if any(one["chosen"] is None for one in choices):
        names = ", ".join(dict.fromkeys(one["axis"] for one in choices))
        print(f"later    {len(later)} cells, when {names} is chosen by the trials above")
    done = sum(state.phase == "done" for _, state in states)
    everything = [*states, *((cell, cell.state(accept_stale)) for cell in later.values())]
    seconds = time_left(everything, jobs, cells.study.scale.cell_seconds)
    left = (
        f"about {in_words(seconds)} left with --jobs {jobs}"
        if seconds is not None
        else "no cell has been timed yet"
    )
    print(f"{done} of {len(everything)} cells are there; {left}")


def deciding_options(fit_options: Sequence[str]) -> list[str]:
    """The options of a command line without those that name no other cell, such as ``--threads 2``: who finds a cell may have set them otherwise."""
    kept: list[str] = []
    counts = True
    for word in fit_options:
        if word.startswith(("--", "-c")):
            first, _, rest = word.lstrip("-").partition("=")[0].removesuffix("+").partition(".")
            outside = first == "trainer" and rest.partition(".")[0] in OUTSIDE_THE_HASH - {"max_epochs"}
            deciding = first in ("c", "config", "model", "data", "trainer")
            counts = deciding and not outside and rest not in ("threads", "init_args.threads")
        kept += [word] * counts
    return kept


def print_found(found: Found, folder: Path) -> None:
    """Print the tables and the verdicts."""
    print(caption(found))
    for rows in (spread_table(found), whole_table(found, brief=True)):
        if rows is not None:
            print(f"\n{as_text(rows)}")
    for one in found["choices"]:
        print(f"\n{choice_in_words(one)}")
    for claim in found["claims"]:
        print(f"\n{claim['claim']}: {claim['verdict']} ({claim['words']})")
    print(f"\nfiles  {folder}")


def make_engine(name: str) -> Engine:
    """The engine of a name.

    Raises:
        ConfigurationError: Its package is missing.
    """
    try:
        engine: Engine = getattr(
            import_module(f"fl_lightning.experiments.studies.engines.{name}"), ENGINES[name]
        )()
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--engine: {name} needs the package {error.name}; pip install 'fl_lightning[{name}]'"
        ) from error
    return engine


def _room(cells: StudyCells, engine: Engine) -> int:
    """How many cells an engine computes at a time: one on each GPU, or as many as there are cores for."""
    first = cells.any.config
    if engine.gpus and first["trainer"]["accelerator"] != "cpu":
        return engine.gpus
    return max(engine.cores // (first["threads"] or 1), 1)
