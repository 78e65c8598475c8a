"""``python -m fl_lightning verify``: the battery from the command line."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from fl_lightning.errors import ConfigurationError
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.verification.battery import Certificate, certify
from fl_lightning.verification.lookup import find, is_method, maker, read_settings
from fl_lightning.verification.tables import print_certificate, print_summary
from fl_lightning.verification.verdicts import Finding

SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "MaintainedMomentum": ({"scope": "local"}, {"scope": "global"}),
    "FixBN": ({"freeze_round": 2}, {"freeze_round": 1, "freeze": "both"}),
    "FBN": ({"wire": "run"}, {"wire": "batch"}),
    "SlidingWindowFixBN": ({"window": 2, "threshold": 1e9},),
    "ClientGradientClipping": ({"max_norm": 0.5},),
}
"""Settings with which shipped methods show what they do in four rounds, where their defaults do not."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"verify: {message}")


def verify(arguments: Sequence[str], shipped: Mapping[str, object]) -> int:
    """Verify one callback, or all that are shipped, and print what was found.

    Args:
        arguments: Arguments after ``verify``.
        shipped: The shipped callbacks by name.

    Returns:
        The exit status: 0 where nothing failed, 1 otherwise.

    Raises:
        ConfigurationError: The arguments name no callback that could be made and run.
    """
    parser = _Parser(
        prog="python -m fl_lightning verify",
        description="Check what a method promises on a tiny federation in float64, and print a certificate.",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--callback", metavar="NAME", help="a shipped method, or the dotted path of a class of your own"
    )
    what.add_argument("--all", action="store_true", help="all shipped methods")
    parser.add_argument(
        "--init", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="settings of the class"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the certificate to a file, too")
    given = parser.parse_args(list(arguments))
    if given.json is not None and not given.json.resolve().parent.is_dir():
        raise ConfigurationError(f"--json: {given.json} is in a folder that does not exist")
    methods = {name: cls for name, cls in shipped.items() if is_method(cls)}
    if given.all:
        if given.init:
            raise ConfigurationError("verify: --init belongs to one --callback, not to --all")
        measured = given.json is not None  # the table has no room for distances to references
        certificates = [
            _certify_or_fail(cls, settings, measured)
            for name, cls in methods.items()
            for settings in SETTINGS.get(name, ({},))
        ]
        print_summary(certificates)
    else:
        cls = find(given.callback, methods)
        init = read_settings(given.init)
        defaults = SETTINGS.get(cls.__name__, ({},))[0] if methods.get(cls.__name__) is cls else {}
        settings = init or defaults
        certificates = [certify(maker(cls, settings), _title(cls, settings))]
        print_certificate(certificates[0])
    if given.json is not None:
        records = [asdict(certificate) for certificate in certificates]
        given.json.write_text(json.dumps(records if given.all else records[0], indent=2) + "\n")
    return int(any(certificate.failed for certificate in certificates))


def _certify_or_fail(
    cls: type[FederatedCallback], settings: Mapping[str, Any], references: bool
) -> Certificate:
    """A certificate also of a method that cannot be made or run, so that the others still have theirs."""
    title = _title(cls, settings)
    try:
        return certify(maker(cls, settings), title, references)
    except ConfigurationError as error:
        return Certificate(title, "", [Finding("runs", "FAILED", str(error))])


def _title(cls: type, settings: Mapping[str, Any]) -> str:
    return f"{cls.__name__}({', '.join(f'{key}={value}' for key, value in settings.items())})"
