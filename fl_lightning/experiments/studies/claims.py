"""Syntax of claims.

Examples of claims:

- ``"FixBN > GN > BN"`` states that FixBN has the largest metric, and BN the smallest.
- ``"GN > BN at E=1"`` compares only the runs with E=1.
- ``"E=100 > E=1 at method=BN"`` also names the axis of each label.
- ``"FBN ~ centralised within 0.02"`` states that the two differ by less than 0.02.
"""

import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from fl_lightning.errors import ConfigurationError


class Claim(NamedTuple):
    """A parsed claim.

    Attributes:
        sides: Text of each side. For example, the sides of ``"GN > BN at E=1"`` are GN and BN.
        constraints: Labels that each side names, keyed by axis.
        fixed: Labels after ``at``, keyed by axis.
        margin: Largest difference that counts as equality; None for an ordering.
    """

    sides: list[str]
    constraints: list[dict[str, str]]
    fixed: dict[str, str]
    margin: float | None


def read_claim(claim: str, known: Mapping[str, Sequence[str]]) -> Claim:
    """Read a claim.

    Args:
        claim: Text of the claim.
        known: All labels, keyed by axis.

    Raises:
        ConfigurationError: The claim cannot be read or tested.
    """
    body, _, at = claim.partition(" at ")
    ordering, _, within = body.partition(" within ")
    sides, signs = [part.strip() for part in re.split(r"[>~]", ordering)], {*re.findall(r"[>~]", ordering)}
    try:
        margin = float(within) if within else None
    except ValueError:
        margin = -1.0
    if len(signs) > 1:
        raise ConfigurationError(f"claims: {claim!r} mixes > and ~; write a claim for each of them")
    if not signs or (signs == {"~"}) != bool(within) or not 0 < (1 if margin is None else margin) < inf:
        raise ConfigurationError(
            f"claims: {claim!r} must be an ordering such as 'A > B at axis=label' or 'A ~ B within 0.02'"
        )
    constraints = [_labels(side, claim, known) for side in sides]
    fixed = _labels(at, claim, known) if at else {}
    _comparable(claim, sides, constraints)
    if twice := fixed.keys() & constraints[0].keys():
        raise ConfigurationError(
            f"claims: {claim!r} compares labels of {twice.pop()}, so 'at' must not name this axis; leave it out there"
        )
    return Claim(sides, constraints, fixed, margin)


def read_difference(words: str, known: Mapping[str, Sequence[str]]) -> Claim:
    """Read a difference such as ``"GN - BN"``.

    Args:
        words: Text of the difference.
        known: All labels, keyed by axis.

    Raises:
        ConfigurationError: The difference cannot be read, or its sides are equal.
    """
    sides = [side.strip() for side in words.split(" - ")]
    if len(sides) != 2:
        raise ConfigurationError(f"difference: {words!r} must be one label minus another, such as 'GN - BN'")
    constraints = [_labels(side, words, known, "difference") for side in sides]
    _comparable(words, sides, constraints, "difference")
    return Claim(sides, constraints, {}, None)


def _comparable(
    words: str, sides: Sequence[str], constraints: Sequence[Mapping[str, str]], key: str = "claims"
) -> None:
    """Raise an error if two sides are equal or name labels of different axes."""
    for number, (side, labels) in enumerate(zip(sides, constraints, strict=True)):
        if labels in constraints[:number]:
            raise ConfigurationError(f"{key}: {words!r} has {side} twice; name different labels")
        if labels.keys() != constraints[0].keys():
            raise ConfigurationError(
                f"{key}: {words!r} compares {sides[0]} with {side}, labels of different axes; "
                "name labels of the same axes"
            )


def _labels(text: str, claim: str, known: Mapping[str, Sequence[str]], key: str = "claims") -> dict[str, str]:
    labels: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",")):
        axis, _, label = part.rpartition("=")
        axes = [axis] if axis else [name for name, labels_of_axis in known.items() if label in labels_of_axis]
        if len(axes) != 1 or label not in known.get(axes[0], ()):
            raise ConfigurationError(
                f"{key}: {claim!r}: {part!r} is no label of one axis; there are "
                + ", ".join(f"{name}: {', '.join(choices)}" for name, choices in known.items())
            )
        if axes[0] in labels:
            raise ConfigurationError(
                f"{key}: {claim!r}: {text.strip()!r} names {axes[0]} twice; name it once"
            )
        labels[axes[0]] = label
    return labels
