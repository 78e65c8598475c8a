"""The battery: all properties and claims, and what they say about one method."""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.run_directory.describe import describe
from fl_lightning.verification import client_rules, run_rules, state_rules
from fl_lightning.verification.certificate import Certificate, describe_state
from fl_lightning.verification.claims import CLAIMS, REFERENCES, Gap
from fl_lightning.verification.comparison import TOLERANCE, Finding, NotApplicable, Violated
from fl_lightning.verification.trials import Trials

Check = Callable[[Trials], str]

OF_ONE_RUN: dict[str, Check] = {
    "trains": state_rules.trains,
    "between rounds": state_rules.between_rounds,
    "averaged state": state_rules.averaged_state,
    "counters": state_rules.counters,
    "frozen state": state_rules.frozen_state,
    "local state": state_rules.local_state,
    "pooled state": state_rules.pooled_state,
    "variances": state_rules.variances,
    "payload": client_rules.payload,
    "absent clients": client_rules.absent_clients,
    "model comes back": state_rules.model_comes_back,
    "runs repeat": run_rules.repeats,
}
"""Properties of single runs, by the name of their line, and that two equal runs are equal."""

OF_SEVERAL_RUNS: dict[str, Check] = {
    "server optimizer": state_rules.server_optimizer,
    "resume": run_rules.resumes,
    "sequential = vectorised": run_rules.executors,
    "vectorised in blocks": run_rules.blocks,
    "random numbers": run_rules.random_numbers,
    "observers": run_rules.observers,
    "client numbers": run_rules.relabelling,
    "exchange in a round": client_rules.exchange,
    "clients' own state": client_rules.own_state,
}
"""Properties that compare runs in different set-ups: they mean something only where equal runs are equal."""


def certify(
    make: Callable[[], FederatedCallback],
    references: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> Certificate:
    """Run the battery.

    Args:
        make: Makes the callback with its settings; called once for each run, so that no object is used twice.
        references: Whether its distance to references that it claims nothing about is measured, too.
        settings: Settings of ``FederatedModule`` that replace those of the battery, such as another ``client_optimizer``.
            Claims name set-ups of their own, which stay as they are.

    Returns:
        The certificate.

    Raises:
        ConfigurationError: The callback claims something unknown, or raises in an ordinary run.
    """
    started = time.perf_counter()
    method = make()
    for claim in method.claims:
        if claim not in CLAIMS:
            raise ConfigurationError(
                f"{type(method).__name__}.claims: unknown claim {claim!r}{nearest(claim, CLAIMS)}; known are "
                f"{', '.join(CLAIMS)}"
            )
    certificate = Certificate(describe(method), method.paper)
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(make, Path(folder, "rules"), settings or {})
        claimed = Trials(make, Path(folder, "claims")) if settings else trials
        first, hindered = trials.attempt(), ""

        def judge(line: str, check: Check, trials: Trials = trials) -> Finding:
            if hindered:
                return Finding(line, "does not apply", hindered)
            return _judge(trials, method, line, check)

        variances = judge("variances", state_rules.variances)
        if first.error is not None:
            if variances.status != "FAILED":
                raise ConfigurationError(
                    f"{type(method).__name__} cannot be verified, an ordinary run raises "
                    f"{_in_words(first.error, type(method))}"
                ) from first.error
            hindered = f"a running variance is negative, so the run stops in round {len(first.rounds)}"
        for line, check in OF_ONE_RUN.items():
            certificate.rules.append(variances if line == variances.line else judge(line, check))
        if not hindered and certificate.rules[-1].status != "PASSED":
            hindered = "two equal runs differ already"
        certificate.rules += [judge(line, check) for line, check in OF_SEVERAL_RUNS.items()]
        found = {
            name: judge(name, partial(_equals, reference), claimed)
            for name, reference in REFERENCES.items()
            if references or name in method.claims
        }
        certificate.claims = [found[name] for name in method.claims]
        certificate.equals = {n: finding.detail for n, finding in found.items() if n not in method.claims}
        if first.error is None:
            certificate.state = describe_state(first)
    certificate.seconds = time.perf_counter() - started
    return certificate


def _judge(trials: Trials, method: FederatedCallback, line: str, check: Check) -> Finding:
    try:
        return Finding(line, "PASSED", check(trials))
    except Violated as violated:
        return Finding(line, "FAILED", str(violated))
    except NotApplicable as reason:
        return Finding(line, "does not apply", str(reason))
    except Exception as error:  # noqa: BLE001  # whatever a method raises is a finding
        if isinstance(error, ConfigurationError) and _origin(error, type(method)):
            return Finding(line, "does not apply", f"it refuses the set-up: {' '.join(str(error).split())}")
        return Finding(line, "FAILED", f"raises {_in_words(error, type(method))}")


def _equals(reference: Callable[[Trials], Gap], trials: Trials) -> str:
    apart, place, weights = reference(trials)
    if not apart <= TOLERANCE:
        raise Violated(f"differs by {apart:.2g} ({place}), weights by {weights:.2g}")
    return "equal bit for bit" if apart == 0 else f"equal (distance {apart:.1g})"


def _origin(error: BaseException, method: type[FederatedCallback]) -> str:
    """Where in a class's code an exception arose: ``"on_round_end, methods.py line 12"``; empty where none was running."""
    own = {
        getattr(sys.modules.get(cls.__module__), "__file__", None)
        for cls in method.__mro__[: method.__mro__.index(FederatedCallback)]
    }
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    if not frames:
        return ""
    return f"{frames[-1].name}, {Path(frames[-1].filename).name} line {frames[-1].lineno}"


def _in_words(error: BaseException, method: type[FederatedCallback]) -> str:
    """An exception in one line: its type, its place in the method's code, its message."""
    place, text = _origin(error, method), shorten(str(error), 200, placeholder=" ...")
    return f"{type(error).__name__}{f' in {place}' if place else ''}: {text}"
