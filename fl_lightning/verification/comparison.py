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


def leaves(tree: Any) -> dict[str, Any]:
    """The leaves of nested dicts and lists by their place in it."""
    return {keystr(place): leaf for place, leaf in tree_flatten_with_path(tree)[0]}


def first_difference(first: Any, second: Any, names: Iterable[str] | None = None) -> str | None:
    """The first place where two trees (or their entries ``names``) are not equal bit for bit; None where they are."""
    if names is not None:
        first, second = ({name: state[name] for name in names} for state in (first, second))
    one, other = leaves(first), leaves(second)
    if one.keys() != other.keys():
        return f"{min(one.keys() ^ other.keys())} is in one of them only"
    return next((place for place, leaf in one.items() if not same(leaf, other[place])), None)


def same(first: Any, second: Any) -> bool:
    """Whether two leaves are equal bit for bit, in type as in value."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        alike = first.shape == second.shape and first.dtype == second.dtype
        return alike and _apart(first, second) == 0
    return type(first) is type(second) and _apart(first, second) == 0


def distance(
    first: Mapping[str, Any], second: Mapping[str, Any], names: Iterable[str] | None = None
) -> tuple[float, str]:
    """The largest difference of two mappings in the entries ``names`` (all of them), and the entry that has it.

    It is infinite where only one of them has an entry, where entries that are no numbers differ, and for NaN beside a number.
    """
    chosen = {**first, **second} if names is None else names
    apart = {name: _apart(first.get(name), second.get(name)) for name in chosen}
    name = max(apart, key=apart.__getitem__, default="")
    return apart.get(name, 0.0), name


def _apart(one: Any, other: Any) -> float:
    numbers = (int, float, Tensor)
    if not (isinstance(one, numbers) and isinstance(other, numbers)):
        return 0.0 if one == other else inf
    first, second = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    alike = (first == second) | (first.isnan() & second.isnan())
    apart = (first - second).abs().nan_to_num(nan=inf, posinf=inf).masked_fill(alike, 0.0)
    return float(apart.max()) if apart.numel() else 0.0
