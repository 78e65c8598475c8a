"""``python -m fl_lightning verify``: check methods. Settings are written as for ``fit``."""

import os
import sys
from collections.abc import Sequence
from functools import partial

import torch

from fl_lightning import callbacks
from fl_lightning.cli.parser import ConciseParser
from fl_lightning.cli.print_errors import command
from fl_lightning.errors import ConfigurationError
from fl_lightning.methods.callback import FederatedCallback


@command()
def main(args: Sequence[str]) -> None:
    """Check the equalities of one method or of all shipped methods, and print a certificate.

    If a check fails, the exit status is 1. If the arguments are invalid, the exit status is 2.

    Args:
        args: Arguments after ``verify``.
    """
    # this process must not use a GPU, because the checks fork it
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parser = ConciseParser(
        prog="python -m fl_lightning verify",
        description="Check the equalities of a method on a tiny federation in float64, and print a certificate.",
    )
    parser.add_argument(
        "--callback",
        type=FederatedCallback,
        help="shipped method, or dotted path of your own class; --callback.KEY VALUE sets its settings",
    )
    words = "your own model for the rules, by class or dotted path; --model.KEY VALUE sets its settings"
    parser.add_argument("--model", type=torch.nn.Module, help=words)
    parser.add_argument("--all", action="store_true", help="check all shipped methods with their examples")
    words = "also measure the equalities that the method does not promise"
    parser.add_argument("--verbose", action="store_true", help=words)
    given = parser.parse_args(list(args))
    if given.all == (given.callback is not None):
        raise ConfigurationError(
            "verify: give one of --callback and --all, such as --callback FixBN, --callback methods.Mine or --all"
        )
    # imported late: the parser would otherwise also accept callbacks that only the checks use
    from fl_lightning.verification.battery import certify
    from fl_lightning.verification.certificate import Certificate, print_certificate, print_summary
    from fl_lightning.verification.differences import Finding
    from fl_lightning.verification.own_model import own_model

    torch.manual_seed(0)  # for the model's weights
    settings = None if given.model is None else own_model(parser.instantiate(given).model)
    if given.all:
        exported = [getattr(callbacks, name) for name in callbacks.__all__]
        methods = [method for method in exported if issubclass(method, FederatedCallback)]
        certificates = []
        for cls, example in [(method, example) for method in methods for example in method.examples]:
            try:
                certificates.append(certify(partial(cls, **example), references=False, settings=settings))
            # record the error, and continue with the other methods
            except ConfigurationError as error:
                failure = Finding("runs", "FAILED", str(error))
                certificates.append(Certificate(f"{cls.__name__}({example})", cls.paper, [failure]))
        print_summary(certificates)
    else:
        certificates = [certify(lambda: parser.instantiate(given).callback, given.verbose, settings)]
        print_certificate(certificates[0])
    sys.exit(int(any(certificate.failed for certificate in certificates)))
