"""A certificate: what was found about a method, what it sends, keeps, resets and freezes, and both as tables."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import shorten

from fl_lightning.batch_norm.kinds import KIND_LABELS, KINDS
from fl_lightning.console import print_table
from fl_lightning.round.policy import stages_in_words
from fl_lightning.verification.comparison import Finding
from fl_lightning.verification.memory import entries
from fl_lightning.verification.observation import Run


@dataclass
class Certificate:
    """What was found about a method.

    Attributes:
        method: The method, as it could be written.
        paper: Where it comes from.
        rules: The rules for all methods, line by line.
        claims: What its class claims beyond them.
        equals: How far it is from the equalities that it claims nothing about.
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


def describe_state(run: Run) -> dict[str, str]:
    """Rows of a table: what happens to each kind of state, what is sent on top, and what is kept, of which clients."""
    rows = {
        KIND_LABELS[kind]: _stages([seen.policy[kind] for seen in run.rounds])
        for kind in KINDS
        if kind in run.kinds.values()
    }
    rows["sent besides"] = _stages(
        [
            "{} floats up, {} down; {} more exchanges".format(*seen.payload, seen.exchanges)
            for seen in run.rounds
        ]
    )
    for owner, kept in entries(run.rounds[-1].memory).items():
        names = ", ".join("/".join(re.findall(r"[^\[\]']+", place)) for place in kept)
        rows["kept of the server" if owner is None else "kept of a client"] = shorten(
            names, 150, placeholder=" ..."
        )
    return rows


def print_certificate(certificate: Certificate) -> None:
    """Print a certificate as tables."""
    rules, claims = (
        {finding.line: f"{finding.status:<16}{finding.detail}" for finding in findings}
        for findings in (certificate.rules, certificate.claims)
    )
    print_table(certificate.method + (f" ({certificate.paper})" if certificate.paper else ""), rules)
    for title, rows in (
        ("Claims", claims),
        ("Not claimed", certificate.equals),
        ("State, on a model with two BN layers", certificate.state),
        ("Verdict", {"": _verdict(certificate)}),
    ):
        if rows:
            print_table(f"\n{title}", rows)


def print_summary(certificates: Sequence[Certificate]) -> None:
    """Print one line for each certificate, and every line that failed."""
    print_table("Methods", {certificate.method: _verdict(certificate) for certificate in certificates})
    for certificate in certificates:
        if certificate.failed:
            print_table(
                f"\n{certificate.method}", {one.line: f"FAILED  {one.detail}" for one in certificate.failed}
            )


def _stages(texts: list[str]) -> str:
    pairs = zip(["", *texts], texts, strict=False)
    return stages_in_words((number, text) for number, (before, text) in enumerate(pairs, 1) if text != before)


def _verdict(certificate: Certificate) -> str:
    count = Counter(finding.status for finding in (*certificate.rules, *certificate.claims))
    return (
        f"{count['PASSED']} passed, {count['FAILED']} failed, {count['does not apply']} do not apply "
        f"({certificate.seconds:.1f} s)"
    )
