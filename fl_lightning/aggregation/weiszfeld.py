"""The geometric median, by Weiszfeld's iteration."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.aggregation.base import RobustAggregator
from fl_lightning.aggregation.distances import Distances, measure, mix

TOLERANCE = 1e-12
"""The iteration ends where the point moves by less than this, in units of its median distance to the rows."""

_SMOOTHING = 1e-10
_ITERATIONS = 10_000


class GeometricMedian(RobustAggregator):
    """Geometric median: the point whose distances to all clients have the smallest sum.

    Smoothed Weiszfeld iteration (Pillutla et al. 2022, "Robust Aggregation for Federated Learning", arXiv 1912.13445) to
    convergence. The point is a mean of the rows with shares that are inverse to their distances to it; these follow from
    the rows' inner products, so that the iteration handles n numbers, not d. Rows that hold a value that is not finite are
    left out. The rule needs no f; ``pre`` may. See :class:`~fl_lightning.aggregation.base.RobustAggregator` for the settings.
    """

    def aggregate(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The point closest to all clients."""
        distances = measure(blocks)
        return [rows[0] for rows in mix(blocks, distances, _shares(distances))]


def _shares(distances: Distances) -> Tensor:
    """The shares ``[1, n]`` of the rows in their geometric median: 0 for rejected rows."""
    # on the host: thousands of steps on n numbers are slower where each is a launch
    kept = ~distances.rejected.cpu()
    shares = torch.full((1, len(kept)), 1 / len(kept), dtype=torch.float64)
    if kept.any():
        gram, squared = (matrix.cpu()[kept][:, kept] for matrix in (distances.gram, distances.squared))
        at_rows = _median_rows(gram, squared)
        shares.zero_()[0, kept] = _iterate(gram) if at_rows is None else at_rows
    return shares.to(distances.gram.device)


def _median_rows(gram: Tensor, squared: Tensor) -> Tensor | None:
    """Shares ``[n]`` of the rows that are a geometric median themselves, if any: there the iteration would creep.

    They are those from which the unit vectors to the other rows add up to no more than the number of rows in their place.
    Two such places are the middle of evenly many rows on a line: then the point halfway.
    """
    inverse = torch.where(squared > 0, squared.rsqrt(), 0)
    units = inverse - inverse.sum(1).diag()
    pull = ((units @ gram) * units).sum(1).clamp_(min=0).sqrt_()
    found = (pull <= (squared == 0).sum(1) + 1e-9).to(gram.dtype)
    return found / found.sum() if found.any() else None


def _iterate(gram: Tensor) -> Tensor:
    """Weiszfeld's iteration from the mean, on shares ``[n]``."""
    norms = gram.diagonal()
    shares = torch.full_like(norms, 1 / len(norms))
    for _ in range(_ITERATIONS):
        product = gram @ shares
        distance = (norms - 2 * product + shares @ product).clamp_(min=0).sqrt_()
        typical = float(distance.median())
        inverse = 1 / distance.clamp_(min=_SMOOTHING * typical)
        before, shares = shares, inverse / inverse.sum()
        moved = shares - before
        if float(moved @ gram @ moved) <= (TOLERANCE * typical) ** 2:
            break
    return shares
