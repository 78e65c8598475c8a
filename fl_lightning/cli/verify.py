"""``python -m fl_lightning verify``: check methods. Their settings have the syntax of ``fit``."""

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
    """Check the claims of a method, or of all shipped methods, and print a certificate.

    The exit status is 1 if a check fails, and 2 if the arguments cannot be used.

    Args:
        args: Arguments after ``verify``.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # checks fork this process, so it must not use a GPU
    parser = ConciseParser(
        prog="python -m fl_lightning verify",
        description="Check the claims of a method on a tiny federation in float64, and print a certificate.",
    )
    parser.add_argument(
        "--callback",
        type=FederatedCallback,
        help="shipped method, or dotted path of your own class; --callback.KEY VALUE sets its settings",
    )
    parser.add_argument("--all", action="store_true", help="check all shipped methods with their examples")
    given = parser.parse_args(list(args))
    if given.all == (given.callback is not None):
        raise ConfigurationError(
            "verify: give one of --callback and --all, such as --callback FixBN, --callback methods.Mine or --all"
        )
    # imported late: the parser must not accept the callbacks that the battery defines
    from fl_lightning.verification.battery import certify
    from fl_lightning.verification.certificate import Certificate, print_certificate, print_summary
    from fl_lightning.verification.comparison import Finding

    if given.all:
        exported = [getattr(callbacks, name) for name in callbacks.__all__]
        methods = [method for method in exported if issubclass(method, FederatedCallback)]
        certificates = []
        for cls, settings in [(method, settings) for method in methods for settings in method.examples]:
            try:
                # the summary table has no room for distances to references
                certificates.append(certify(partial(cls, **settings), references=False))
            except ConfigurationError as error:  # continue with the other methods
                failure = Finding("runs", "FAILED", str(error))
                certificates.append(Certificate(f"{cls.__name__}({settings})", cls.paper, [failure]))
        print_summary(certificates)
    else:
        certificates = [certify(lambda: parser.instantiate(given).callback)]
        print_certificate(certificates[0])
    sys.exit(int(any(certificate.failed for certificate in certificates)))
