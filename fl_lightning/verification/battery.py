"""All properties and claims, and what they say about one method."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.run_directory.describe import describe
from fl_lightning.verification import client_rules, model_rule, run_rules, state_rules
from fl_lightning.verification.bench import Bench
from fl_lightning.verification.blame import in_words, origin
from fl_lightning.verification.claims import CLAIMS, Gap, centralised_frozen_bn, fedavg
from fl_lightning.verification.description import describe_state
from fl_lightning.verification.verdicts import TOLERANCE, Finding, NotApplicable, Violated

Check = Callable[[Bench], str]

OF_ONE_RUN: dict[str, Check] = {
    "trains": state_rules.trains,
    "averaged state": state_rules.averaged_state,
    "counters": state_rules.counters,
    "frozen state": state_rules.frozen_state,
    "local state": state_rules.local_state,
    "pooled state": state_rules.pooled_state,
    "variances": state_rules.variances,
    "payload": client_rules.payload,
    "absent clients": client_rules.absent_clients,
    "model comes back": model_rule.model_comes_back,
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

_REFERENCES: dict[str, Callable[[Bench], Gap]] = {
    **CLAIMS,
    "fedavg": fedavg,
    "centralised_frozen_bn": centralised_frozen_bn,
}


@dataclass
class Certificate:
    """What was found about a method.

    Attributes:
        method: The method, as it could be written.
        paper: Where it comes from.
        rules: The rules for all methods, line by line.
        claims: What its class claims beyond them.
        equals: How far it is from references that it claims nothing about.
        state: What it sends, keeps, resets and freezes.
        seconds: How long it took.
    """

    method: str
    paper: str
    rules: list[Finding] = field(default_factory=list)
    claims: list[Finding] = field(default_factory=list)
    equals: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> list[Finding]:
        """The lines that failed."""
        return [finding for finding in (*self.rules, *self.claims) if finding.status == "FAILED"]


def certify(
    make: Callable[[], FederatedCallback], title: str | None = None, references: bool = True
) -> Certificate:
    """Run the battery.

    Args:
        make: Makes the callback with its settings; called once for each run, so that no object is used twice.
        title: How the certificate calls it; None for its class and the settings that are not defaults.
        references: Whether its distance to references that it claims nothing about is measured, too.

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
    certificate = Certificate(title or describe(method), method.paper)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(make, Path(folder))
        first = bench.attempt()
        variances = _judge(bench, method, "variances", state_rules.variances)
        if first.error is not None:
            if variances.status != "FAILED":
                raise ConfigurationError(
                    f"{type(method).__name__} cannot be verified, an ordinary run raises "
                    f"{in_words(first.error, type(method))}"
                ) from first.error
            stopped = f"a running variance is negative, so the run stops in round {len(first.rounds)}"
            certificate.rules = [
                variances if line == variances.line else Finding(line, "does not apply", stopped)
                for line in (*OF_ONE_RUN, *OF_SEVERAL_RUNS)
            ]
            return certificate
        certificate.rules = [_judge(bench, method, line, check) for line, check in OF_ONE_RUN.items()]
        repeatable = certificate.rules[-1].status == "PASSED"

        def judge_if_repeatable(line: str, check: Check) -> Finding:
            if repeatable:
                return _judge(bench, method, line, check)
            return Finding(line, "does not apply", "two equal runs differ already")

        certificate.rules += [judge_if_repeatable(line, check) for line, check in OF_SEVERAL_RUNS.items()]
        certificate.claims = [judge_if_repeatable(name, _as_check(CLAIMS[name])) for name in method.claims]
        if references:
            found = [judge_if_repeatable(name, _as_check(one)) for name, one in _REFERENCES.items()]
            certificate.equals = {one.line: one.detail for one in found if one.line not in method.claims}
        certificate.state = describe_state(first)
    certificate.seconds = time.perf_counter() - started
    return certificate


def _judge(bench: Bench, method: FederatedCallback, line: str, check: Check) -> Finding:
    try:
        return Finding(line, "PASSED", check(bench))
    except Violated as violated:
        return Finding(line, "FAILED", str(violated))
    except NotApplicable as reason:
        return Finding(line, "does not apply", str(reason))
    except Exception as error:  # noqa: BLE001  # whatever a method raises is a finding
        if isinstance(error, ConfigurationError) and origin(error, type(method)):
            return Finding(line, "does not apply", f"it refuses the set-up: {' '.join(str(error).split())}")
        return Finding(line, "FAILED", f"raises {in_words(error, type(method))}")


def _as_check(reference: Callable[[Bench], Gap]) -> Check:
    def check(bench: Bench) -> str:
        apart, place, weights = reference(bench)
        if not apart <= TOLERANCE:
            raise Violated(f"differs by {apart:.2g} ({place}), weights by {weights:.2g}")
        return "equal bit for bit" if apart == 0 else f"equal (distance {apart:.1g})"

    return check
