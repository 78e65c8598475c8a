"""``python -m fl_lightning report``: write an HTML page about studies."""

from collections.abc import Sequence

from fl_lightning.cli.options import CommandParser
from fl_lightning.cli.print_errors import command
from fl_lightning.experiments.studies.html_report import write_report
from fl_lightning.experiments.studies.table_columns import split_columns
from fl_lightning.files import user_path

_DESCRIPTION = """\
Write one HTML page about studies (runs/studies/NAME-SCALE): verdicts, tables, figures, settings, provenance. The page needs no network and no other file; nothing is trained."""


@command()
def main(args: Sequence[str]) -> None:
    """Write the HTML page and print its path.

    Args:
        args: Arguments after ``report``.
    """
    parser = CommandParser("report", _DESCRIPTION)
    parser.add_argument("directories", metavar="DIR", nargs="+", help="folder of a study")
    words = "page to write (default: report.html in a single study's folder, else in the working directory)"
    parser.add_argument("--output", metavar="FILE", help=words)
    words = "rewrite the tables with these columns after the labels, such as 'test accuracy, seeds, training'"
    parser.add_argument("--columns", type=split_columns, default=[], metavar="NAMES", help=words)
    options = parser.parse_args(args)
    output = user_path("output", options.output) if options.output is not None else None
    directories = [user_path("report", path) for path in options.directories]
    page, *others = write_report(directories, output, options.columns)
    print(f"report  {page}")
    for path in others:
        print(f"file    {path}")
