"""Centres of the clients' rows: the geometric median and centred clipping."""

import torch
from torch import Tensor

from fl_lightning.aggregation.distances import Distances, MixingRule
from fl_lightning.aggregation.mean import Per
from fl_lightning.aggregation.preaggregation import PreAggregator
from fl_lightning.errors import ConfigurationError

TOLERANCE = 1e-12
"""Step length at which the iteration ends, relative to the point's median distance to the rows."""

_SMOOTHING = 1e-10
_ITERATIONS = 10_000


class GeometricMedian(MixingRule):
    """Geometric median: the point whose distances to all clients have the smallest sum.

    Smoothed Weiszfeld iteration (Pillutla et al. 2022, "Robust Aggregation for Federated Learning",
    arXiv 1912.13445) to convergence. The point is a mean of the rows, with shares inverse to their
    distances. The distances follow from the rows' inner products, so the iteration updates n
    numbers, not d. Rows with a non-finite value are left out. If weighted, distances are multiplied
    by the clients' weights. Only ``pre`` may need ``f``. Settings:
    :class:`~fl_lightning.aggregation.robust.RobustAggregator`.
    """

    def mixing(self, distances: Distances, weights: Tensor | None) -> Tensor:
        """Return the rows' shares in their geometric median."""
        # on the CPU: a GPU would launch thousands of kernels on n numbers
        finite = ~distances.rejected.cpu()
        shares = torch.full((len(finite),), 1 / len(finite), dtype=torch.float64)
        if finite.any():
            weights = torch.ones_like(shares) if weights is None else weights.cpu() / weights.cpu().mean()
            gram, squared = (
                matrix.cpu()[finite][:, finite] for matrix in (distances.gram, distances.squared)
            )
            at_rows = _median_rows(gram, squared, weights[finite])
            shares.zero_()[finite] = _iterate(gram, weights[finite]) if at_rows is None else at_rows
        return shares.to(distances.gram.device)


def _median_rows(gram: Tensor, squared: Tensor, weights: Tensor) -> Tensor | None:
    """Return shares ``[n]`` if the geometric median is one of the rows, else None.

    There the iteration would be slow. A row is a geometric median if the weighted sum of the unit
    vectors to the other rows is no longer than the weight at this point. An even number of rows on
    a line has two such points: the result is between them.
    """
    inverse = torch.where(squared > 0, squared.rsqrt(), 0) * weights
    units = inverse - inverse.sum(1).diag()
    pull = ((units @ gram) * units).sum(1).clamp_(min=0).sqrt_()
    at_median = (pull <= ((squared == 0) * weights).sum(1) + 1e-9) * weights
    return at_median / at_median.sum() if at_median.any() else None


def _iterate(gram: Tensor, weights: Tensor) -> Tensor:
    """Run Weiszfeld's iteration on the shares ``[n]``, from the mean."""
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
    """Centred clipping: a start point plus the mean of the clients' clipped deviations from it.

    Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", arXiv
    2012.10333. The paper starts at the last round's result. This rule keeps no state and **starts
    at the coordinate-wise median**, so the result is equivariant to translation. Rows with a
    non-finite value are left out. All clients have equal weight.

    Args:
        tau: L2 norm to which a client's deviation is clipped, in the parameters' unit; positive.
        iterations: Number of iterations, 1 or more; each starts from the last result.
        f: Byzantine clients to withstand in a round. Only ``pre`` may need it.
        pre: Pre-aggregator of the rows, such as ``NNM``; its ``f`` defaults to this one.
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
        """Return the rows' shares: clip factors / n after one iteration; the start has the rest."""
        gram = distances.gram.masked_fill(distances.rejected | distances.rejected[:, None], 0)
        finite = (~distances.rejected).double()
        if not finite.any():
            return torch.full_like(finite, 1 / len(finite))
        shares = torch.zeros_like(finite)
        for _ in range(self.iterations):
            # the point is start + shares @ deviations
            product = gram @ shares
            squared = gram.diagonal() - 2 * product + shares @ product
            moves = finite * (self.tau / squared.clamp_(min=0).sqrt_()).clamp_(max=1) / finite.sum()
            shares = (1 - moves.sum()) * shares + moves
        return shares
