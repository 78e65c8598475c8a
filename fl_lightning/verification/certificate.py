"""A certificate: what was found about a method, what it sends, keeps, resets and freezes, and both as tables."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fl_lightning.batch_norm.kinds import KIND_LABELS, KINDS
from fl_lightning.console import print_table
from fl_lightning.round.policy import stages_in_words
from fl_lightning.verification.comparison import Finding
from fl_lightning.verification.memory import entries
from fl_lightning.verification.observation import Round, Run


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


def describe_state(run: Run) -> dict[str, str]:
    """Rows of a table: by kind of state what happens to it, then what is sent, kept and reset.

    Args:
        run: A run over its planned rounds; its model's floats are the ones that are counted.
    """
    rounds = run.rounds
    rows = {
        KIND_LABELS[kind]: _stages([seen.policy[kind] for seen in rounds])
        for kind in KINDS
        if kind in run.kinds.values()
    }
    rows["a client sends"] = _stages([_sent(run, seen) for seen in rounds])
    rows["beside that"] = _stages([_extra(seen) for seen in rounds])
    memory = entries(rounds[-1].memory)
    clients = [kept for owner, kept in memory.items() if owner is not None]
    rows["keeps by client"] = _names(clients[0] if clients else {})
    rows["keeps besides"] = _names(memory.get(None, {}))
    reset = all(seen.optimizer_was_reset for seen in rounds[1:])
    rows["client optimizer"] = "state reset each round" if reset else "state kept between rounds"
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


def _sent(run: Run, seen: Round) -> str:
    floats: dict[str, int] = {}
    for name, kind in run.kinds.items():
        value = seen.broadcast[name]
        if seen.policy[kind] in ("averaged", "pooled") and value.is_floating_point():
            floats[kind] = floats.get(kind, 0) + value.numel()
    parts = ", ".join(f"{KIND_LABELS[kind]} {count}" for kind, count in floats.items())
    return f"{sum(floats.values())} floats ({parts}), up and down"


def _extra(seen: Round) -> str:
    up, down = seen.payload
    exchanges = 1 + seen.exchanges
    return f"{up} floats up, {down} down; {exchanges} exchange{'s' if exchanges > 1 else ''} a round"


def _stages(texts: list[str]) -> str:
    pairs = zip(["", *texts], texts, strict=False)
    return stages_in_words((number, text) for number, (before, text) in enumerate(pairs, 1) if text != before)


def _names(kept: dict[str, Any]) -> str:
    floats = sum(
        value.numel() for value in kept.values() if torch.is_tensor(value) and value.is_floating_point()
    )
    names = ["/".join(re.findall(r"[^\[\]']+", place)) for place in kept]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{shown} ({floats} floats)" if names else "nothing"


def _verdict(certificate: Certificate) -> str:
    count = Counter(finding.status for finding in (*certificate.rules, *certificate.claims))
    return (
        f"{count['PASSED']} passed, {count['FAILED']} failed, {count['does not apply']} do not apply "
        f"({certificate.seconds:.1f} s)"
    )
