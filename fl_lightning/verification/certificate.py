"""Certificate of one method: the results of its checks, and their printed tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fl_lightning.console import print_table
from fl_lightning.verification.differences import Finding


@dataclass
class Certificate:
    """Results of all checks of a method.

    Attributes:
        method: The method with its settings.
        paper: The method's paper.
        rules: Findings on the rules for all methods.
        equalities: Findings on the method's equalities.
        equals: Measured differences for equalities that the method does not promise, by name.
        beside_fedavg: Comparison of the method's default run with FedAvg.
        seconds: Duration of the verification.
    """

    method: str
    paper: str
    rules: list[Finding] = field(default_factory=list)
    equalities: list[Finding] = field(default_factory=list)
    equals: dict[str, str] = field(default_factory=dict)
    beside_fedavg: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> list[Finding]:
        """Findings on rules and equalities with the status ``"FAILED"``."""
        return [finding for finding in (*self.rules, *self.equalities) if finding.status == "FAILED"]


def print_certificate(certificate: Certificate) -> None:
    """Print a certificate as tables."""
    rules, equalities = (
        {finding.line: f"{finding.status:<16}{finding.detail}" for finding in findings}
        for findings in (certificate.rules, certificate.equalities)
    )
    print_table(certificate.method + (f" ({certificate.paper})" if certificate.paper else ""), rules)
    for title, rows in (
        ("Equalities", equalities),
        ("Measured: equalities that the method does not promise", certificate.equals),
        ("Beside FedAvg", {"": certificate.beside_fedavg} if certificate.beside_fedavg else {}),
        ("Verdict", {"": _verdict(certificate)}),
    ):
        if rows:
            print_table(f"\n{title}", rows)


def print_summary(certificates: Sequence[Certificate]) -> None:
    """Print a line for each certificate; then print the failed rules and equalities."""
    print_table("Methods", {certificate.method: _verdict(certificate) for certificate in certificates})
    for certificate in certificates:
        if certificate.failed:
            lines = {finding.line: f"FAILED  {finding.detail}" for finding in certificate.failed}
            print_table(f"\n{certificate.method}", lines)


def _verdict(certificate: Certificate) -> str:
    count = Counter(finding.status for finding in (*certificate.rules, *certificate.equalities))
    return (
        f"{count['PASSED']} passed, {count['FAILED']} failed, {count['does not apply']} do not apply "
        f"({certificate.seconds:.1f} s)"
    )
