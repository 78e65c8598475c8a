"""``python -m fl_lightning verify``: its settings, read like those of ``fit``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.cli.command_line import import_shipped, quiet_host
from fl_lightning.cli.messages import told
from fl_lightning.cli.parser import ConciseParser
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.callback import FederatedCallback


def main(args: Sequence[str]) -> int:
    """Check what a method promises, or what all shipped ones do, and print a certificate.

    Args:
        args: Arguments after ``verify``.

    Returns:
        The exit status: 0 where nothing failed, 1 where something did, 2 where the arguments cannot be used.
    """
    quiet_host()
    try:
        return _verify(args)
    except ConfigurationError as error:
        print(f"error: {told(error)}", file=sys.stderr)
        return 2


def _verify(args: Sequence[str]) -> int:
    shipped = import_shipped()["callbacks"]
    parser = ConciseParser(
        prog="python -m fl_lightning verify",
        description="Check what a method promises on a tiny federation in float64, and print a certificate.",
    )
    parser.add_argument(
        "--callback",
        type=FederatedCallback,
        help="a shipped method, or the dotted path of a class of your own; --callback.KEY VALUE sets its settings",
    )
    parser.add_argument("--all", action="store_true", help="all shipped methods, each with its examples")
    parser.add_argument(
        "--json", type=str | None, default=None, help="a file that the certificate is written to, too"
    )
    given = parser.parse_args(list(args))
    if given.all == (given.callback is not None):
        raise ConfigurationError(
            "verify: give one of --callback and --all, such as --callback FixBN, --callback methods.Mine or --all"
        )
    # imported now: the battery's own callbacks are no methods that the parser should know
    from fl_lightning.verification.command import verify_all, verify_one

    file = Path(given.json) if given.json is not None else None
    if given.callback is not None:
        return verify_one(lambda: parser.instantiate(given).callback, file)
    exported = [getattr(shipped, name) for name in shipped.__all__]
    return verify_all([cls for cls in exported if issubclass(cls, FederatedCallback)], file)
