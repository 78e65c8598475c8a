"""The register of broken callbacks: the lines of a certificate that say what is wrong with each."""

from fl_lightning import FederatedCallback

FAILS: dict[type[FederatedCallback], set[str]] = {}
"""The lines on which each broken callback fails, no more and no less."""


def fails(*lines):
    """Register a broken callback."""

    def register(cls):
        FAILS[cls] = set(lines)
        return cls

    return register


def of_kind(cohort, *kinds):
    """Names of a cohort's tensors of some kinds."""
    return [name for name, kind in {**cohort.parameter_kinds, **cohort.buffer_kinds}.items() if kind in kinds]
