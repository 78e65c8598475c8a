"""``python -m fl_lightning verify``: certificates of one method or of all, printed and written to a file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fl_lightning.errors import ConfigurationError
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.verification.battery import certify
from fl_lightning.verification.certificate import Certificate, print_certificate, print_summary
from fl_lightning.verification.comparison import Finding


def verify_one(make: Callable[[], FederatedCallback], file: Path | None = None) -> int:
    """Verify a method and print its certificate.

    Args:
        make: Makes the callback with its settings: a new object at each call.
        file: Where the certificate is written as JSON, too.

    Returns:
        The exit status: 0 where nothing failed, 1 otherwise.

    Raises:
        ConfigurationError: The callback could not be made or run, or the file's folder does not exist.
    """
    _check_folder(file)
    certificate = certify(make)
    print_certificate(certificate)
    if file is not None:
        file.write_text(json.dumps(asdict(certificate), indent=2) + "\n")
    return int(bool(certificate.failed))


def verify_all(classes: Sequence[type[FederatedCallback]], file: Path | None = None) -> int:
    """Verify methods with the settings of their ``examples``, and print a line for each.

    Args:
        classes: The methods' classes.
        file: Where all certificates are written as JSON, with the distances to references that the table has no room for.

    Returns:
        The exit status: 0 where nothing failed, 1 otherwise.

    Raises:
        ConfigurationError: The file's folder does not exist.
    """
    _check_folder(file)
    certificates = []
    for cls in classes:
        for settings in cls.examples:
            try:
                certificates.append(certify(partial(cls, **settings), references=file is not None))
            except ConfigurationError as error:  # the others still have their certificates
                failure = Finding("runs", "FAILED", str(error))
                certificates.append(Certificate(f"{cls.__name__}({settings})", cls.paper, [failure]))
    print_summary(certificates)
    if file is not None:
        file.write_text(json.dumps([asdict(one) for one in certificates], indent=2) + "\n")
    return int(any(certificate.failed for certificate in certificates))


def _check_folder(file: Path | None) -> None:
    if file is not None and not file.resolve().parent.is_dir():
        raise ConfigurationError(f"json: {file} is in a folder that does not exist")
