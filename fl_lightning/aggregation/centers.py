"""Centres of the clients' rows: the geometric median, and centered clipping."""

import torch
from torch import Tensor

from fl_lightning.aggregation.distances import Distances, MixingRule
from fl_lightning.aggregation.mean import Per
from fl_lightning.aggregation.preaggregation import PreAggregator
from fl_lightning.errors import ConfigurationError

TOLERANCE = 1e-12
"""The iteration ends where the point moves by less than this, in units of its median distance to the rows."""

_SMOOTHING = 1e-10
_ITERATIONS = 10_000


class GeometricMedian(MixingRule):
    """Geometric median: the point whose distances to all clients have the smallest sum.

    Smoothed Weiszfeld iteration (Pillutla et al. 2022, "Robust Aggregation for Federated Learning", arXiv 1912.13445) to
    convergence. The point is a mean of the rows with shares that are inverse to their distances to it; these follow from
    the rows' inner products, so that the iteration handles n numbers, not d. Rows that hold a value that is not finite are
    left out. Weighted, each distance counts by its client's weight. The rule needs no f; ``pre`` may. See :class:`~fl_lightning.aggregation.robust.RobustAggregator` for the settings.
    """

    def mixing(self, distances: Distances, weights: Tensor | None) -> Tensor:
        """The shares of the rows in their geometric median."""
        # on the host: thousands of steps on n numbers are slower where each is a launch
        kept = ~distances.rejected.cpu()
        shares = torch.full((len(kept),), 1 / len(kept), dtype=torch.float64)
        if kept.any():
            weights = torch.ones_like(shares) if weights is None else weights.cpu() / weights.cpu().mean()
            gram, squared = (matrix.cpu()[kept][:, kept] for matrix in (distances.gram, distances.squared))
            at_rows = _median_rows(gram, squared, weights[kept])
            shares.zero_()[kept] = _iterate(gram, weights[kept]) if at_rows is None else at_rows
        return shares.to(distances.gram.device)


def _median_rows(gram: Tensor, squared: Tensor, weights: Tensor) -> Tensor | None:
    """Shares ``[n]`` of the rows that are a geometric median themselves, if any: there the iteration would creep.

    They are those from which the unit vectors to the other rows, by weight, add up to no more than the weight in their place.
    Two such places are the middle of evenly many rows on a line: then a point between.
    """
    inverse = torch.where(squared > 0, squared.rsqrt(), 0) * weights
    units = inverse - inverse.sum(1).diag()
    pull = ((units @ gram) * units).sum(1).clamp_(min=0).sqrt_()
    found = (pull <= ((squared == 0) * weights).sum(1) + 1e-9) * weights
    return found / found.sum() if found.any() else None


def _iterate(gram: Tensor, weights: Tensor) -> Tensor:
    """Weiszfeld's iteration from the mean, on shares ``[n]``."""
    norms = gram.diagonal()
    shares = weights / weights.sum()
    for _ in range(_ITERATIONS):
        product = gram @ shares
        distance = (norms - 2 * product + shares @ product).clamp_(min=0).sqrt_()
        typical = float(distance.median())
        inverse = weights / distance.clamp_(min=_SMOOTHING * typical)
        before, shares = shares, inverse / inverse.sum()
        moved = shares - before
        if float(moved @ gram @ moved) <= (TOLERANCE * typical) ** 2:
            break
    return shares


class CenteredClipping(MixingRule):
    """Centred clipping: the start, moved by the mean of the clients' deviations from it, each cut to the length tau.

    Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", arXiv 2012.10333. The paper starts at
    the last round's result; this rule keeps no state and **starts at the coordinate-wise median**, so that its result moves
    along when all rows are moved. Rows that hold a value that is not finite are left out of the mean. Every client counts
    alike.

    Args:
        tau: Largest L2 norm of a client's deviation that counts, over its whole vector; positive, in the parameters' unit.
        iterations: How often the point moves on, 1 or more.
        f: Byzantine clients in a round to withstand. The rule needs none; ``pre`` may.
        pre: Applied to the rows first, such as ``NNM``, with its own ``f`` or else this one.
        per: See :class:`~fl_lightning.aggregation.robust.RobustAggregator`.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    def __init__(
        self,
        tau: float,
        iterations: int = 1,
        f: int | None = None,
        pre: PreAggregator | None = None,
        per: Per = None,
    ) -> None:
        super().__init__(f, pre, per)
        if not tau > 0:
            raise ConfigurationError(f"CenteredClipping.tau: {tau} must be positive")
        if iterations < 1:
            raise ConfigurationError(f"CenteredClipping.iterations: {iterations} must be at least 1")
        self.tau, self.iterations = tau, iterations

    def mixing(self, distances: Distances, weights: Tensor | None) -> Tensor:
        """Clip factors over n, after one iteration; the rest of the point is its start's."""
        gram = distances.gram.masked_fill(distances.rejected | distances.rejected[:, None], 0)
        kept = (~distances.rejected).double()
        if not kept.any():
            return torch.full_like(kept, 1 / len(kept))
        shares = torch.zeros_like(kept)
        for _ in range(self.iterations):
            # the point is start + shares @ deviations
            product = gram @ shares
            squared = gram.diagonal() - 2 * product + shares @ product
            moves = kept * (self.tau / squared.clamp_(min=0).sqrt_()).clamp_(max=1) / kept.sum()
            shares = (1 - moves.sum()) * shares + moves
        return shares
