"""Comparison of two states, and the result of a check."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

TOLERANCE = 1e-10
"""Tolerance of checks in float64: values that differ by at most this number count as equal."""

Status = Literal["PASSED", "FAILED", "does not apply"]


class Violated(Exception):
    """Exception for a violated rule or equality. Its message gives the difference and the tensor."""


class NotApplicable(Exception):
    """Exception for a rule or equality that does not apply to a method. Its message is the reason."""


@dataclass(frozen=True)
class Finding:
    """Result of one check: a line of a certificate.

    Attributes:
        line: Name of the rule or equality.
        status: Whether the check passed, failed or does not apply.
        detail: Measured value, violation, or reason why the check does not apply.
    """

    line: str
    status: Status
    detail: str


Leaves = dict[str, Any]
"""Values in nested dicts and lists, keyed by path, such as ``['momentum'][0]``."""


def leaves(tree: Any) -> Leaves:
    """Return the values of nested dicts and lists, keyed by path."""
    return {keystr(place): leaf for place, leaf in tree_flatten_with_path(tree)[0]}


def difference(first: Any, second: Any, names: Iterable[str] | None = None) -> str | None:
    """Return the path of the largest difference between two trees; None if they are equal.

    If ``names`` is given, only the entries with these keys are compared.
    """
    if names is not None:
        first, second = ({name: state[name] for name in names} for state in (first, second))
    most, place = largest_difference(leaves(first), leaves(second))
    return place if most else None


def largest_difference(
    first: Mapping[str, object], second: Mapping[str, object], names: Iterable[str] | None = None
) -> tuple[float, str]:
    """Return the largest difference between the entries of two mappings, and the entry's name.

    ``names`` are the entries to compare (default: all entries).
    """
    chosen = {**first, **second} if names is None else names
    differences = {name: apart(first.get(name), second.get(name)) for name in chosen}
    name = max(differences, key=differences.__getitem__, default="")
    return differences.get(name, 0.0), name


def apart(one: Any, other: Any) -> float:
    """Return the largest difference between two values, such as tensors or numbers.

    The difference is infinite if types or shapes differ, or if only one of two values is NaN.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return inf
    elif type(one) is not type(other) or not isinstance(one, int | float):
        return 0.0 if type(one) is type(other) and one == other else inf
    first, second = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    alike = (first == second) | (first.isnan() & second.isnan())
    differences = (first - second).abs().nan_to_num(nan=inf, posinf=inf).masked_fill(alike, 0.0)
    return float(differences.max()) if differences.numel() else 0.0
