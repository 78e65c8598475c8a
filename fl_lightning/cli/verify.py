"""``python -m fl_lightning verify``: its settings, read like those of ``fit``."""

import os
import sys
from collections.abc import Sequence
from functools import partial

from fl_lightning import callbacks
from fl_lightning.cli.messages import command
from fl_lightning.cli.parser import ConciseParser
from fl_lightning.errors import ConfigurationError
from fl_lightning.methods.callback import FederatedCallback


@command()
def main(args: Sequence[str]) -> None:
    """Check what a method promises, or what all shipped ones do, and print a certificate.

    Exits with status 1 where something failed, and 2 where the arguments cannot be used.

    Args:
        args: Arguments after ``verify``.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that uses a GPU cannot be copied
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
    given = parser.parse_args(list(args))
    if given.all == (given.callback is not None):
        raise ConfigurationError(
            "verify: give one of --callback and --all, such as --callback FixBN, --callback methods.Mine or --all"
        )
    # imported now: the battery's own callbacks are no methods that the parser should know
    from fl_lightning.verification.battery import certify
    from fl_lightning.verification.certificate import Certificate, print_certificate, print_summary
    from fl_lightning.verification.comparison import Finding

    if given.all:
        exported = [getattr(callbacks, name) for name in callbacks.__all__]
        methods = [one for one in exported if issubclass(one, FederatedCallback)]
        certificates = []
        for cls, settings in [(one, settings) for one in methods for settings in one.examples]:
            try:
                # a table of all has no room for distances to references
                certificates.append(certify(partial(cls, **settings), references=False))
            except ConfigurationError as error:  # the others still have their certificates
                failure = Finding("runs", "FAILED", str(error))
                certificates.append(Certificate(f"{cls.__name__}({settings})", cls.paper, [failure]))
        print_summary(certificates)
    else:
        certificates = [certify(lambda: parser.instantiate(given).callback)]
        print_certificate(certificates[0])
    sys.exit(int(any(one.failed for one in certificates)))
