"""``python -m fl_lightning runs``: show all runs below a folder. This module does not import PyTorch."""

import os
import sys
from collections.abc import Sequence
from math import isnan
from pathlib import Path

import pandas as pd
from tabulate import tabulate

from fl_lightning.cli.options import CommandParser
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.experiments.run_directory.runs_frame import COLUMNS, runs_frame
from fl_lightning.files import user_file, user_path, write_text

_DESCRIPTION = """\
Show all runs below a folder in a table: method, data, seed, rounds, state, and the metric with its best round.
A column is one of the table, a setting such as model.local_steps, or a metric of finished runs such as test/accuracy."""


def main(args: Sequence[str]) -> None:
    """Print the table of runs.

    Args:
        args: Arguments after ``runs``.

    Raises:
        ConfigurationError: An option is not valid, the folder has no run, or a column does not
            exist.
    """
    parser = CommandParser("runs", _DESCRIPTION)
    parser.add_argument("folder", metavar="DIR", nargs="?", default="runs", help="folder (default: runs)")
    words = "sort by a column, smallest value first"
    parser.add_argument("--sort", metavar="COLUMN", help=words)
    words = "show only runs with this value; several options must all hold"
    parser.add_argument("--where", metavar="COLUMN=VALUE", action="append", default=[], help=words)
    parser.add_argument("--csv", metavar="FILE", help="write the runs with all columns to a CSV file")
    options = parser.parse_args(args)
    folder, file = user_path("runs", options.folder), options.csv and user_file("csv", options.csv)
    wanted = [_wanted(text) for text in options.where]
    named = [name for name in (*(name for name, _ in wanted), options.sort) if name]
    frame = _runs(folder, named)
    for name, value in wanted:
        frame = frame[[_equal(x, value) for x in frame[name]]]
    if options.sort:
        texts = frame[options.sort].map(lambda x: isinstance(x, str)).any()
        frame = frame.sort_values(options.sort, kind="stable", key=lambda x: x.map(str) if texts else x)
    if file:
        write_text(file, frame.to_csv(index=False, lineterminator="\n"))
    shown = [name for name in frame if name in (*COLUMNS, *named)]
    body = [[_text(value) for value in row] for row in frame[shown].itertuples(index=False)]
    count = f"{len(frame)} run{'s' * (len(frame) != 1)}"
    try:
        print(tabulate(body, shown, disable_numparse=True), f"\n{count}", sep="\n", flush=True)
    except OSError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _runs(folder: Path, names: Sequence[str]) -> pd.DataFrame:
    frame = runs_frame(folder, [name for name in names if name not in COLUMNS and "/" not in name])
    if frame.empty:
        raise ConfigurationError(
            f"runs: {folder} has no run (no folder with a config.yaml); give a folder such as runs or runs/NAME"
        )
    for name in names:
        if name not in frame or (name not in COLUMNS and frame[name].isna().all()):
            known = [*COLUMNS, *(column for column in frame if "/" in column)]
            raise ConfigurationError(
                f"runs: no run has a column or setting {name!r}{nearest(name, known)}; there are {', '.join(known)}, "
                "and settings such as model.local_steps"
            )
    return frame


def _wanted(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--where: {text!r} must be COLUMN=VALUE, such as method=FedAvg or seed=0")
    return name, value


def _equal(value: object, wanted: str) -> bool:
    try:
        return float(str(value)) == float(wanted)
    except ValueError:
        return str(value).lower() == wanted.lower()


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if isnan(value) else f"{value:.4g}"
    return "" if value is None else str(value)
