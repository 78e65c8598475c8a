"""Checks of the number and weight of Byzantine clients, and shares of weighted rows."""

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError

TOLERANCE = 1e-12
"""Tolerance for rounding errors: cumulative weights that differ by less count as equal.
"""


def check_byzantine(setting: str, f: int, num_clients: int | None = None, whom: str = "clients") -> None:
    """Check that ``f`` is a whole number, at least 0 and less than half of the clients.

    Args:
        setting: Name of the setting, such as ``"TrimmedMean.f"``.
        f: Number of Byzantine clients to withstand.
        num_clients: Number of clients in a round; None if unknown.
        whom: Noun after the number in the error message, such as ``"clients"`` or ``"buckets"``.

    Raises:
        ConfigurationError: ``f`` is out of range.
    """
    if isinstance(f, bool) or not isinstance(f, int) or f < 0:
        raise ConfigurationError(f"{setting}: {f!r} must be a whole number of at least 0")
    if num_clients is not None and 2 * f >= num_clients:
        most = max((num_clients - 1) // 2, 0)
        raise ConfigurationError(
            f"{setting}: {f} must be less than half of a round's {num_clients} {whom}; use at most {most}, or at least "
            f"{2 * f + 1} {whom} in a round"
        )


def byzantine_mass(weights: Tensor, f: int, setting: str) -> float:
    """Return the sum of the f largest weights, divided by the total weight.

    Args:
        weights: Weights ``[n]``, >= 0.
        f: Number of Byzantine clients to withstand.
        setting: Name of the setting of f, for the error message.

    Raises:
        ConfigurationError: The result would be 1/2 or more.
    """
    heaviest = weights.topk(f)
    mass = float(heaviest.values.sum() / weights.sum())
    if mass >= 0.5 * (1 - TOLERANCE):
        rows = ", ".join(map(str, sorted(heaviest.indices.tolist())))
        raise ConfigurationError(
            f"{setting}: the {f} heaviest rows (at positions {rows}) have {mass:.3g} of all weight, which must be less "
            "than half; lower f or max_weight, or use weighting: uniform"
        )
    return mass


def within(ordered: Tensor, low: float, high: float) -> Tensor:
    """Return the shares of the rows in a range of the cumulative weight.

    The sorted rows cover consecutive intervals. The length of an interval is the weight of its row.
    A row's share is proportional to the part of its interval inside the range.

    Args:
        ordered: Weights of the rows in sorted order, float64 ``[c, n]``.
        low: Start of the range, as a share of the total weight.
        high: End of the range, as a share of the total weight, > ``low``.

    Returns:
        Shares, float64 ``[c, n]``, which sum to 1 over n.
    """
    ordered = ordered / ordered.sum(1, keepdim=True)
    reached = ordered.cumsum(1)
    inside = reached.clamp(max=high) - (reached - ordered).clamp(min=low)
    inside.masked_fill_(inside < TOLERANCE, 0)
    return inside / inside.sum(1, keepdim=True)


def around_half(ordered: Tensor) -> Tensor:
    """Return the shares of rows in the weighted median, ``[c, n]``.

    Either one row has the share 1, or two rows have the share 1/2 each.

    Args:
        ordered: Weights of the rows in sorted order, float64 ``[c, n]``.
    """
    reached = ordered.cumsum(1)
    half = ordered.sum(1, keepdim=True) / 2
    shares = torch.zeros_like(ordered)
    for first in (reached < half * (1 - TOLERANCE), reached <= half * (1 + TOLERANCE)):
        shares.scatter_add_(1, first.sum(1, keepdim=True), torch.full_like(half, 0.5))
    return shares
