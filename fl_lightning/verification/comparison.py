"""How far two states are apart, where, and what that says of a property."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

TOLERANCE = 1e-10
"""Largest distance at which two float64 computations of one quantity count as equal."""

Status = Literal["PASSED", "FAILED", "does not apply"]


class Violated(Exception):
    """A property does not hold; the message says by how much and where."""


class NotApplicable(Exception):
    """A property says nothing about this method; the message says why."""


@dataclass(frozen=True)
class Finding:
    """One line of a certificate.

    Attributes:
        line: Name of the property or claim.
        status: Whether it holds.
        detail: What was measured, the place of the violation, or why it does not apply.
    """

    line: str
    status: Status
    detail: str


Leaves = dict[str, Any]
"""The leaves of a tree by place."""


def leaves(tree: Any) -> Leaves:
    """The leaves of nested dicts and lists by their place in it."""
    return {keystr(place): leaf for place, leaf in tree_flatten_with_path(tree)[0]}


def difference(first: Any, second: Any, names: Iterable[str] | None = None) -> str | None:
    """A place where two trees (or their entries ``names``) are not equal bit for bit; None where there is none."""
    if names is not None:
        first, second = ({name: state[name] for name in names} for state in (first, second))
    most, place = distance(leaves(first), leaves(second))
    return place if most else None


def distance(
    first: Mapping[str, object], second: Mapping[str, object], names: Iterable[str] | None = None
) -> tuple[float, str]:
    """The largest difference of two mappings in the entries ``names`` (all of them), and the entry that has it."""
    chosen = {**first, **second} if names is None else names
    found = {name: apart(first.get(name), second.get(name)) for name in chosen}
    name = max(found, key=found.__getitem__, default="")
    return found.get(name, 0.0), name


def apart(one: Any, other: Any) -> float:
    """The largest difference of two leaves: infinite for other types or shapes, other things than numbers, NaN beside a number."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return inf
    elif type(one) is not type(other) or not isinstance(one, int | float):
        return 0.0 if type(one) is type(other) and one == other else inf
    first, second = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    alike = (first == second) | (first.isnan() & second.isnan())
    differences = (first - second).abs().nan_to_num(nan=inf, posinf=inf).masked_fill(alike, 0.0)
    return float(differences.max()) if differences.numel() else 0.0
