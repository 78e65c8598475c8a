"""Centres of the clients' rows: the geometric median and centred clipping."""

import torch
from torch import Tensor

from fl_lightning.aggregation.distances import Distances, MixingRule
from fl_lightning.aggregation.mean import Per
from fl_lightning.aggregation.preaggregation import PreAggregator
from fl_lightning.errors import check_number

TOLERANCE = 1e-12
"""Step length below which Weiszfeld's iteration ends.

The unit is the median distance between the current point and the rows.
"""

_SMOOTHING = 1e-10
_ITERATIONS = 10_000


class GeometricMedian(MixingRule):
    """Geometric median: the point with the smallest sum of distances to all clients.

    The rule runs the smoothed Weiszfeld iteration (Pillutla et al. 2022, "Robust Aggregation for
    Federated Learning", arXiv 1912.13445) until it converges. The median is a weighted mean of the
    rows. A row's share is inversely proportional to the row's distance from the median. The rule
    computes these distances from the inner products of the rows. An iteration therefore updates
    only n shares, and no vector of d coordinates.

    Rows with a non-finite value are left out. With ``weighting="weighted"``, each distance is
    multiplied by the client's weight. The rule itself does not use ``f``, but the pre-aggregator
    ``pre`` may need ``f``. For the settings, see
    :class:`~fl_lightning.aggregation.robust.RobustAggregator`.
    """

    def mixing(self, distances: Distances, weights: Tensor | None) -> Tensor:
        """Return the share of each row in the geometric median, a weighted mean of the rows."""
        # compute on the CPU, because a GPU would launch thousands of kernels for only n numbers
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
    """Return the rows' shares ``[n]`` if the geometric median equals a row, otherwise None.

    In this case, Weiszfeld's iteration would converge slowly. To test a row, compute the weighted
    sum of the unit vectors from this row to the other rows. The row is a geometric median if this
    sum is not longer than the total weight of all rows that equal the row. If all rows lie on a
    line, two rows can be geometric medians. The shares then give a point between the two rows.
    """
    inverse = torch.where(squared > 0, squared.rsqrt(), 0) * weights
    units = inverse - inverse.sum(1).diag()
    pull = ((units @ gram) * units).sum(1).clamp_(min=0).sqrt_()
    at_median = (pull <= ((squared == 0) * weights).sum(1) + 1e-9) * weights
    return at_median / at_median.sum() if at_median.any() else None


def _iterate(gram: Tensor, weights: Tensor) -> Tensor:
    """Run Weiszfeld's iteration from the mean, and return the shares ``[n]``."""
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
    """Centred clipping: a start point plus the mean of the clients' clipped deviations.

    Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", arXiv
    2012.10333. The paper starts from the result of the previous round. This rule keeps no state and
    **starts from the coordinate-wise median**. Adding a vector to all rows therefore adds the same
    vector to the result. Rows with a non-finite value are left out. All clients have equal weight.

    Args:
        tau: Largest L2 norm of a client's deviation, > 0. Larger deviations are clipped.
        iterations: Number of iterations, >= 1. Each iteration starts from the result of the
            previous iteration.
        f: Number of Byzantine clients. Only ``pre`` uses this number.
        pre: Pre-aggregator of the rows, such as ``NNM``. ``f`` is the default of ``pre.f``.
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
        check_number("CenteredClipping.tau", tau, above=0)
        check_number("CenteredClipping.iterations", iterations, least=1)
        self.tau, self.iterations = tau, iterations

    def mixing(self, distances: Distances, weights: Tensor | None) -> Tensor:
        """Return the share of each row in the result, ``[n]``.

        The start point has the remaining share.

        After one iteration, the share of a row is its clipping factor divided by n.
        """
        gram = distances.gram.masked_fill(distances.rejected | distances.rejected[:, None], 0)
        finite = (~distances.rejected).double()
        if not finite.any():
            return torch.full_like(finite, 1 / len(finite))
        shares = torch.zeros_like(finite)
        for _ in range(self.iterations):
            # the iteration's current point is start + shares @ deviations
            product = gram @ shares
            squared = gram.diagonal() - 2 * product + shares @ product
            moves = finite * (self.tau / squared.clamp_(min=0).sqrt_()).clamp_(max=1) / finite.sum()
            shares = (1 - moves.sum()) * shares + moves
        return shares
