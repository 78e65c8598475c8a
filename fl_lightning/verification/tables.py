"""Certificates as tables."""

from collections.abc import Sequence

from fl_lightning.console import print_table
from fl_lightning.verification.battery import Certificate


def print_certificate(certificate: Certificate) -> None:
    """Print a certificate as tables."""
    paper = f" ({certificate.paper})" if certificate.paper else ""
    lines = {finding.line: f"{finding.status:<16}{finding.detail}" for finding in certificate.rules}
    print_table(f"{certificate.method}{paper}", lines)
    if certificate.claims:
        print_table("\nClaims", {one.line: f"{one.status:<16}{one.detail}" for one in certificate.claims})
    if certificate.equals:
        print_table("\nNot claimed", certificate.equals)
    if certificate.state:
        print_table("\nState, on a model with two BN layers", certificate.state)
    print_table("\nVerdict", {"": _verdict(certificate)})


def print_summary(certificates: Sequence[Certificate]) -> None:
    """Print one line for each certificate, and every line that failed."""
    print_table("Methods", {certificate.method: _verdict(certificate) for certificate in certificates})
    for certificate in certificates:
        if certificate.failed:
            print_table(
                f"\n{certificate.method}", {one.line: f"FAILED  {one.detail}" for one in certificate.failed}
            )


def _verdict(certificate: Certificate) -> str:
    lines = [*certificate.rules, *certificate.claims]
    count = {
        status: sum(line.status == status for line in lines)
        for status in ("PASSED", "FAILED", "does not apply")
    }
    return (
        f"{count['PASSED']} passed, {count['FAILED']} failed, {count['does not apply']} do not apply "
        f"({certificate.seconds:.1f} s)"
    )
