"""Centred clipping."""

import torch
from torch import Tensor

from fl_lightning.aggregation.base import Per
from fl_lightning.aggregation.distances import Distances, MixingRule
from fl_lightning.aggregation.preaggregation import PreAggregator
from fl_lightning.errors import ConfigurationError


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
        per: See :class:`~fl_lightning.aggregation.base.RobustAggregator`.

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
