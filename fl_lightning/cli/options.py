"""Options of commands. This module does not import PyTorch."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fl_lightning.errors import ConfigurationError

ENGINES = {"local": "LocalEngine", "ray": "RayEngine", "slurm": "SlurmEngine"}
"""Names of the engines' classes, keyed by module in ``fl_lightning.experiments.studies.engines``.
"""

_DESCRIPTION = """\
Run the cells of a study that have no result yet, and print its table. The same command resumes a stopped study. All other
options are settings of every cell, such as --data.data_dir data/cifar10 or --trainer.accelerator gpu."""


class CommandParser(ArgumentParser):
    """Parser of a command's options. An error has one line. No option can be abbreviated.

    Args:
        command: Name of the command.
        description: Description in ``--help``.
        usage: Text after the command in the usage line. With None, the line lists all options.
    """

    def __init__(self, command: str, description: str, usage: str | None = None) -> None:
        super().__init__(
            prog=f"python -m fl_lightning {command}",
            usage=usage and f"%(prog)s {usage}",
            description=description,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise a ``ConfigurationError`` with the parser's message and the command's help."""
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def study_options(args: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Split arguments into the options of ``study`` and the options of ``fit``.

    Raises:
        ConfigurationError: An option is not valid.
    """
    parser = CommandParser(
        "study",
        _DESCRIPTION,
        "FILE [--scale quick|reduced|full] [--engine local|ray|slurm] [--jobs N] [--dry-run] [--rerun] [--name NAME] [options of fit]",
    )
    parser.add_argument("file", metavar="FILE", help="study, such as configs/studies/fixbn_table4.yaml")
    parser.add_argument("--scale", default="quick", help="quick (default), reduced or full")
    words = "where cells are computed: on this machine (default), a Ray cluster or Slurm"
    parser.add_argument("--engine", choices=ENGINES, default="local", help=words)
    parser.add_argument("--jobs", type=int, help="cells at a time (default: one for each GPU or core)")
    words = "print the state of each cell and the remaining time, without running cells"
    parser.add_argument("--dry-run", action="store_true", help=words)
    words = "compute cells of other code or versions anew"
    parser.add_argument("--rerun", action="store_true", help=words)
    words = "folder of the tables in runs/studies (default: stem of FILE and scale, for any other options)"
    parser.add_argument("--name", help=words)
    options, fit_options = parser.parse_known_args(args)
    if options.jobs is not None and options.jobs < 1:
        raise ConfigurationError(f"--jobs: {options.jobs} must be at least 1")
    if options.name is not None and Path(options.name).name != options.name:
        raise ConfigurationError(f"--name: {options.name!r} must be the name of a folder, such as mine")
    return options, fit_options
