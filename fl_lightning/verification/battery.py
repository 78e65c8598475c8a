"""Check of one method against all rules and equalities."""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from fl_lightning.aggregation import Median
from fl_lightning.errors import ConfigurationError, check_choice
from fl_lightning.methods.callback import FederatedCallback
from fl_lightning.recorded import describe
from fl_lightning.verification.beside_fedavg import beside_fedavg
from fl_lightning.verification.certificate import Certificate
from fl_lightning.verification.differences import TOLERANCE, Finding, NotApplicable, Violated
from fl_lightning.verification.equalities import BITWISE, EQUALITIES
from fl_lightning.verification.rules import REMEDIES, RULES, Rule
from fl_lightning.verification.trials import Trials

NEEDED = ("trains", "runs repeat")
"""Names of two rules. If a method breaks one of them, all other findings are meaningless."""


def certify(
    make: Callable[[], FederatedCallback],
    references: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> Certificate:
    """Check all rules and equalities of a method, and return the certificate.

    Args:
        make: Function that returns a new callback for each run.
        references: Whether to also measure the equalities that the method does not promise.
        settings: Settings of ``FederatedModule`` for the checks of the rules, such as another
            ``client_optimizer``, or the user's model of
            :func:`~fl_lightning.verification.own_model.own_model`. Equalities are checked with the default settings.

    Raises:
        ConfigurationError: The callback promises an unknown equality, or the default run of the
            method raises an exception.
    """
    started = time.perf_counter()
    method = make()
    for equality in method.equalities:
        check_choice(f"{type(method).__name__}.equalities", equality, EQUALITIES)
    if method.role == "attack":
        settings = {"aggregator": Median(), **(settings or {})}
    certificate = Certificate(describe(method), method.paper)
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(make, Path(folder, "rules"), settings)
        promised = Trials(make, Path(folder, "equalities")) if settings else trials
        first, hindered = trials.attempt(), ""
        raised: dict[int, str] = {}
        for line, check in RULES.items():
            finding = _judge(line, check, trials, hindered, raised)
            certificate.rules.append(finding)
            if line in NEEDED and finding.status == "FAILED":
                hindered = f"rule {line!r} failed"
            if first.error is not None and not hindered:
                raise ConfigurationError(
                    f"{type(method).__name__} cannot be verified, an ordinary run raises "
                    f"{_in_words(first.error, type(method))}"
                ) from first.error
        findings = {
            name: _judge(name, partial(_equals, name), promised, hindered, raised)
            # equalities first, because a run's exception is a finding of its first check only
            for name in dict.fromkeys([*method.equalities, *(EQUALITIES if references else ())])
        }
        certificate.equalities = [findings.pop(name) for name in method.equalities]
        certificate.equals = {name: finding.detail for name, finding in findings.items()}
        if not hindered:
            certificate.beside_fedavg = beside_fedavg(trials)
    certificate.seconds = time.perf_counter() - started
    return certificate


def _judge(line: str, check: Rule, trials: Trials, hindered: str, raised: dict[int, str]) -> Finding:
    """Return the finding of a check. Add the id of its exception, if any, to ``raised``."""
    if hindered:
        return Finding(line, "does not apply", hindered)
    try:
        return Finding(line, "PASSED", check(trials))
    except Violated as violated:
        remedy = f"; {REMEDIES[line]} {_anchor(line)}" if line in REMEDIES else ""
        return Finding(line, "FAILED", f"{violated}{remedy}")
    except NotApplicable as reason:
        return Finding(line, "does not apply", str(reason))
    except ConfigurationError as error:
        return Finding(line, "does not apply", f"this set-up is rejected: {' '.join(str(error).split())}")
    except Exception as error:  # noqa: BLE001  # any exception of a method is a finding
        if id(error) in raised:
            return Finding(line, "does not apply", f"the run of {raised[id(error)]!r} raises an error")
        raised[id(error)] = line
        return Finding(
            line, "FAILED", f"a run raises {_in_words(error, type(trials.make()))} {_anchor(line)}"
        )


def _anchor(line: str) -> str:
    return f"(docs/verify-rules.md#{line.replace(' ', '-') if line in RULES else 'equalities'})"


def _equals(name: str, trials: Trials) -> str:
    apart, place = EQUALITIES[name](trials)
    tolerance = 0.0 if name in BITWISE else TOLERANCE
    if not apart <= tolerance:
        raise Violated(f"differs by {apart:.2g} in {place} (tolerance {tolerance:g})")
    return "equal bit for bit" if apart == 0 else f"equal (distance {apart:.1g})"


def _in_words(error: BaseException, method: type[FederatedCallback]) -> str:
    """Return an exception as one line with its type, the line of code and its message."""
    file = getattr(sys.modules.get(method.__module__), "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = (
        f" in {frames[-1].name}, {Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else ""
    )
    return f"{type(error).__name__}{place}: {shorten(str(error), 200, placeholder=' ...')}"
