"""Weights of clients that count by their weight: the mass of the heaviest, and what part of a row lies within bounds."""

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError

TOLERANCE = 1e-12
"""Cumulative weights that differ by less than this part of all are equal, so that n_i / N ties where the n_i do."""


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
