"""The geometric median, by Weiszfeld's iteration."""

import torch
from torch import Tensor

from fl_lightning.aggregation.distances import Distances, MixingRule

TOLERANCE = 1e-12
"""The iteration ends where the point moves by less than this, in units of its median distance to the rows."""

_SMOOTHING = 1e-10
_ITERATIONS = 10_000


class GeometricMedian(MixingRule):
    """Geometric median: the point whose distances to all clients have the smallest sum.

    Smoothed Weiszfeld iteration (Pillutla et al. 2022, "Robust Aggregation for Federated Learning", arXiv 1912.13445) to
    convergence. The point is a mean of the rows with shares that are inverse to their distances to it; these follow from
    the rows' inner products, so that the iteration handles n numbers, not d. Rows that hold a value that is not finite are
    left out. Weighted, each distance counts by its client's weight. The rule needs no f; ``pre`` may. See :class:`~fl_lightning.aggregation.base.RobustAggregator` for the settings.
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
