"""``python -m fl_lightning study``: run the cells of a study and write tables and verdicts."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

from fl_lightning.cli import study_cell
from fl_lightning.cli.command_line import build, resolve
from fl_lightning.cli.options import ENGINES, study_options
from fl_lightning.cli.print_errors import command
from fl_lightning.console import time_in_words
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.interruption import Stopped
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.studies.cells import expect_newest_data
from fl_lightning.experiments.studies.client_tables import client_tables, write_client_tables
from fl_lightning.experiments.studies.collecting import collect
from fl_lightning.experiments.studies.definition import Study
from fl_lightning.experiments.studies.engines.base import Engine
from fl_lightning.experiments.studies.figures import write_figures
from fl_lightning.experiments.studies.progress import StudyProgress, time_left
from fl_lightning.experiments.studies.reading import read_study
from fl_lightning.experiments.studies.running import Runner, share_first_stages
from fl_lightning.experiments.studies.study_cells import StudyCells
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


@cache
def _resolved(arguments: tuple[str, ...]) -> Config:
    return resolve(arguments)


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
    study = read_study(_file(options.file), options.scale)
    cells = cells_of(study, fit_options, options.rerun)
    cells.check()
    if options.dry_run:
        dry_run(cells, options.jobs or 1)
        return
    name = options.name or f"{study.name}-{study.scale_name}"
    folder = folder_below(cells.any.config["run_root"], f"studies/{name}")
    _refuse_other_study(folder, options.file)
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
        write_client_tables(folder, results)
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


def _file(name: str) -> Path:
    return shipped(name) or Path(name)


def _refuse_other_study(folder: Path, file: str) -> None:
    """Raise an error if the folder has the results of another file, which the tables would replace."""
    try:
        command_line = shlex.split(json.loads((folder / "study.json").read_text())["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    other = command_line[4] if len(command_line) > 4 else file
    if _file(other).resolve() != _file(file).resolve():
        raise ConfigurationError(
            f"study: {folder} has the results of {other}; choose another folder by --name, such as --name mine"
        )


def cells_of(study: Study, fit_options: Sequence[str], rerun: bool = False) -> StudyCells:
    """Return the cells of a study, whose settings the command line resolves and checks."""
    return StudyCells(study, fit_options, _resolved, build, rerun)


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
    known = f"about {time_in_words(seconds)} left with --jobs {jobs}" if seconds is not None else ""
    print(f"{done} of {len(everything)} cells are done; {known or 'no cell has been timed yet'}")


def print_results(results: StudyFrame, folder: Path) -> None:
    """Print the tables and the verdicts."""
    print(caption(results))
    for table in (spread_table(results), whole_table(results)):
        if table is not None:
            print(f"\n{as_text(table)}")
    for of_clients in client_tables(results)[:1]:
        print(f"\n{of_clients.caption}\n\n{as_text(of_clients.frame(narrow=True))}")
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
