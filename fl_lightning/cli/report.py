"""``python -m fl_lightning report``: an HTML page about studies and runs."""

from collections.abc import Sequence

from fl_lightning.cli.messages import command
from fl_lightning.cli.options import CommandParser
from fl_lightning.experiments.studies.report import write_report
from fl_lightning.files import user_path

_DESCRIPTION = """\
Write one HTML page about studies (runs/studies/NAME-SCALE) and runs (runs/NAME/*): verdicts, tables, figures, settings, provenance.
Runs of one configuration are grouped by seed. The page needs no network and no other file; nothing is trained."""


@command()
def main(args: Sequence[str]) -> None:
    """Write the page.

    Args:
        args: Arguments after ``report``.
    """
    parser = CommandParser("report", _DESCRIPTION)
    parser.add_argument("directories", metavar="DIR", nargs="+", help="folder of a study, or run directory")
    parser.add_argument("--output", metavar="FILE", default="report.html", help="(default: report.html)")
    options = parser.parse_args(args)
    output = user_path("output", options.output)
    write_report([user_path("report", path) for path in options.directories], output)
    print(f"report  {output}")
