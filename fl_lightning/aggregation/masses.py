"""How many clients may be Byzantine; and clients that count by weight: that of the heaviest, what lies within bounds."""

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError

TOLERANCE = 1e-12
"""Cumulative weights that differ by less than this part of all are equal, so that n_i / N ties where the n_i do."""


def check_byzantine(setting: str, f: int, num_clients: int | None = None, whom: str = "clients") -> None:
    """Refuse a number of Byzantine clients that is none, or no minority of the clients.

    Args:
        setting: Name of the setting, such as ``"TrimmedMean.f"``.
        f: The number found.
        num_clients: Clients in a round; None where it is not known yet.
        whom: What there is so many of, for the message.

    Raises:
        ConfigurationError: f is not a whole number of at least 0, or at least half of the clients.
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
    """What part of all weights the f largest have together.

    Args:
        weights: Non-negative weights ``[n]``.
        f: Byzantine clients to withstand.
        setting: Name of the setting of f, for the message.

    Raises:
        ConfigurationError: They have half of it or more.
    """
    heaviest = weights.topk(f)
    mass = float(heaviest.values.sum() / weights.sum())
    if mass >= 0.5 * (1 - TOLERANCE):
        rows = ", ".join(map(str, sorted(heaviest.indices.tolist())))
        raise ConfigurationError(
            f"{setting}: {f} rows may have {mass:.3g} of all weight (the heaviest, at positions {rows}), which must be less "
            "than half; lower it or max_weight, or use weighting: uniform"
        )
    return mass


def within(ordered: Tensor, low: float, high: float) -> Tensor:
    """Shares of rows whose weights, side by side, lie within a part of all of it; those at its ends count in part.

    Args:
        ordered: Weights in the rows' order, float64 ``[c, n]``.
        low: Where the part begins, in units of all weight.
        high: Where it ends, above ``low``.

    Returns:
        Float64 ``[c, n]``; sums over n are 1.
    """
    ordered = ordered / ordered.sum(1, keepdim=True)
    reached = ordered.cumsum(1)
    inside = reached.clamp(max=high) - (reached - ordered).clamp(min=low)
    inside.masked_fill_(inside < TOLERANCE, 0)
    return inside / inside.sum(1, keepdim=True)


def around_half(ordered: Tensor) -> Tensor:
    """Shares ``[c, n]`` of the row in which half of all weight is reached; 1/2 each where it is between two rows."""
    reached = ordered.cumsum(1)
    half = ordered.sum(1, keepdim=True) / 2
    shares = torch.zeros_like(ordered)
    for first in (reached < half * (1 - TOLERANCE), reached <= half * (1 + TOLERANCE)):
        shares.scatter_add_(1, first.sum(1, keepdim=True), torch.full_like(half, 0.5))
    return shares
