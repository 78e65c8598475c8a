"""Rules that use the distances between clients: nearest-neighbour mixing, Krum and multi-Krum.

A single matrix product gives the distances between all pairs of clients. The distances determine
the share of each row in the result.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation.coordinates import chunks, median
from fl_lightning.aggregation.masses import byzantine_mass, within
from fl_lightning.aggregation.mean import Per
from fl_lightning.aggregation.preaggregation import Mixed, PreAggregator
from fl_lightning.aggregation.robust import RobustAggregator
from fl_lightning.errors import ConfigurationError

KrumScore = Literal["byzfl", "blanchard"]

_FEW = 16
"""Largest number of rows for which subtracting pairs of rows is faster than a matrix product."""


class NNM(PreAggregator):
    """Nearest-neighbour mixing: a row becomes the mean of its n - f closest rows, including itself.

    Allouah et al. 2023, "Fixing by Mixing", arXiv 2302.01772. If two rows are equally far away, the
    row with the lower index counts as closer. A row with a non-finite value counts as the farthest
    from every row. Such a row becomes NaN, and the rule after the mixing drops the row. With f = 0,
    every row becomes the mean of all rows.

    With weights, let W be the total weight of all clients except the f heaviest. A row becomes the
    weighted mean of its closest rows with total weight W. To reach exactly W, the farthest of these
    rows counts with only a part of its weight.
    """

    def mix(self, blocks: Sequence[Tensor], f: int, weights: Tensor | None = None) -> Mixed:
        """Mix each client with its n - f nearest clients.

        The distance between two clients includes all blocks.
        """
        distances = measure_distances(blocks)
        closest = distances.squared.argsort(dim=1, stable=True)
        if weights is None:
            shares = _equal_shares(closest[:, : len(closest) - f], len(closest))
        else:
            near = within(weights[closest], 0, 1 - byzantine_mass(weights, f, "NNM.f"))
            shares = torch.zeros_like(near).scatter_(1, closest, near)
        return Mixed(mix(blocks, shares, distances.centres, distances.rejected), shares, weights)


class Krum(RobustAggregator):
    """Krum: the row of the client with the lowest score.

    Blanchard et al. 2017, "Machine Learning with Adversaries". A client's score is the mean squared
    distance to its closest other clients. If two clients have equal scores, the client with the
    lower index is chosen. A row with a non-finite value has the highest score. All clients have
    equal weight.

    Args:
        f: Number of Byzantine clients to withstand, in [0, n/2) for n clients in a round.
        pre: Pre-aggregator of the rows, such as ``NNM``. ``f`` is the default of ``pre.f``.
        per: See :class:`~fl_lightning.aggregation.robust.RobustAggregator`.
        score: Number of closest clients in the score. ``"byzfl"`` is n - f - 1, as in the ByzFL
            library. ``"blanchard"`` is n - f - 2, as in the paper.

    Raises:
        ConfigurationError: f is out of range, or the score is unknown.
    """

    f: int

    def __init__(
        self, f: int, pre: PreAggregator | None = None, per: Per = None, score: KrumScore = "byzfl"
    ) -> None:
        super().__init__(f, pre, per)
        self.score: KrumScore = score

    def check(self, num_clients: int) -> None:
        """Check that a round has enough clients for ``f`` and ``score``.

        Raises:
            ConfigurationError: A round has too few clients.
        """
        super().check(num_clients)
        rows = self._rows_left(num_clients)
        if self.score == "blanchard" and rows < self.f + 3:
            whom = "clients" if self.pre is None else self.pre.rows_are
            raise ConfigurationError(
                f"{type(self).__name__}.score: blanchard needs at least f + 3 = {self.f + 3} {whom} in a round, not "
                f"{rows}; use byzfl"
            )

    def aggregate(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """Return the row of the client with the lowest score."""
        winner = self.chosen(squared_distances(blocks))
        return [block.index_select(0, winner)[0] for block in blocks]

    def shares_of_rows(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the clients' shares: 1 / k for each of the k chosen clients, 0 for all others."""
        return _equal_shares(self.chosen(squared_distances(blocks))[None], len(blocks[0]))[0]

    def chosen(self, squared: Tensor) -> Tensor:
        """Return the client with the lowest score, ``[1]``.

        Args:
            squared: Squared distances, ``[n, n]``.
        """
        return self.ranking(squared)[:1]

    def ranking(self, squared: Tensor) -> Tensor:
        """Return the clients in order of ascending score, then of ascending index.

        Args:
            squared: Squared distances, ``[n, n]``.
        """
        neighbours = len(squared) - self.f - (1 if self.score == "byzfl" else 2)
        others = squared.sort(dim=1).values[:, 1 : neighbours + 1]
        return others.sum(1).argsort(stable=True)


class MultiKrum(Krum):
    """Multi-Krum: the mean of the n - f clients with the lowest scores of :class:`Krum`."""

    def aggregate(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """Return the mean of the n - f clients with the lowest scores."""
        squared = squared_distances(blocks)
        chosen = self.chosen(squared)
        shares = _equal_shares(chosen[None], len(squared))
        centres = [block.index_select(0, chosen[:1])[0] for block in blocks]
        rejected = squared.isinf().sum(1) == len(squared) - 1
        return [rows[0] for rows in mix(blocks, shares, centres, rejected)]

    def chosen(self, squared: Tensor) -> Tensor:
        """Return the n - f clients with the lowest scores, ``[n - f]``."""
        return self.ranking(squared)[: len(squared) - self.f]


class MixingRule(RobustAggregator):
    """Base class of rules that mix the clients' rows.

    The share of a row depends on the inner products of the rows.
    """

    @abstractmethod
    def mixing(self, distances: "Distances", weights: Tensor | None) -> Tensor:
        """Return the share of each row in the mixed row, ``[n]``.

        The centre has the remaining share. A rejected row has the share 0.
        """

    def aggregate(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """Mix the rows with the shares that :meth:`mixing` returns."""
        distances = measure_distances(blocks)
        shares = self.mixing(distances, weights)[None]
        return [rows[0] for rows in mix(blocks, shares, distances.centres, distances.rejected)]

    def shares_of_rows(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the shares that :meth:`mixing` returns for these rows."""
        return self.mixing(measure_distances(blocks), weights)


class Distances(NamedTuple):
    """Distances and inner products of the clients' rows.

    Attributes:
        gram: Inner products of the rows' deviations from ``centres``, float64 ``[n, n]``.
        squared: Squared distances between rows, float64 ``[n, n]``. Distances to rejected rows are
            infinite. The diagonal is 0.
        rejected: Mask of the rows with a non-finite value, bool ``[n]``.
        centres: For each block, the coordinate-wise median ``[d_k]``.
    """

    gram: Tensor
    squared: Tensor
    rejected: Tensor
    centres: list[Tensor]


@torch.no_grad()
def measure_distances(blocks: Sequence[Tensor]) -> Distances:
    """Measure the distances between the clients' vectors, which span all blocks.

    The distances are computed in float64 from the inner products of the rows' deviations from the
    coordinate-wise median. A single matrix product gives all inner products. It is ten times as fast as
    subtracting every pair of rows. With the median as centre, the deviations of most rows are
    small, even if a minority of rows are far outliers. Small deviations avoid cancellation in the
    distances between close rows.

    Args:
        blocks: Column blocks ``[n, d_k]`` of the clients' rows.
    """
    n = len(blocks[0])
    gram = torch.zeros(n, n, dtype=torch.float64, device=blocks[0].device)
    centres = [median(block) for block in blocks]
    for block, centre in zip(blocks, centres, strict=True):
        for columns in chunks(block):
            deviation = block[:, columns].to(torch.float64, copy=True).sub_(centre[columns])
            gram.addmm_(deviation, deviation.t())
    norms = gram.diagonal()
    squared = (norms[:, None] + norms - 2 * gram).clamp_(min=0)
    rejected = ~norms.isfinite()
    squared.masked_fill_(rejected | rejected[:, None], torch.inf).fill_diagonal_(0)
    return Distances(gram, squared, rejected, centres)


@torch.no_grad()
def squared_distances(blocks: Sequence[Tensor]) -> Tensor:
    """Return the squared Euclidean distances between the clients' vectors, float64 ``[n, n]``.

    For few rows, each pair of rows is subtracted, which avoids cancellation. For many rows,
    :func:`measure_distances` computes the distances.

    Args:
        blocks: Column blocks ``[n, d_k]`` of the clients' rows.
    """
    n = len(blocks[0])
    if n > _FEW:
        return measure_distances(blocks).squared
    squared = torch.zeros(n, n, dtype=torch.float64, device=blocks[0].device)
    row, column = torch.triu_indices(n, n, 1, device=squared.device)
    pairs = squared[row, column]
    for block in blocks:
        for columns in chunks(block):
            pairs += torch.pdist(block[:, columns].double()).square_()
    squared[row, column] = pairs.masked_fill_(~pairs.isfinite(), torch.inf)
    return squared + squared.t()


@torch.no_grad()
def mix(
    blocks: Sequence[Tensor], shares: Tensor, centres: Sequence[Tensor], rejected: Tensor
) -> list[Tensor]:
    """Return the product of ``shares`` and each block.

    If all rows equal the centre, the results are exact. A result with a share of a rejected row is
    NaN. All other results ignore rejected rows.

    Args:
        blocks: Column blocks ``[n, d_k]`` of the clients' rows.
        shares: Shares of the n rows in m results, >= 0, float64 ``[m, n]``. The centre has the
            remaining share in each result.
        centres: For each block, a point ``[d_k]`` that is close to most rows.
        rejected: Mask of the rows with a non-finite value, bool ``[n]``.

    Returns:
        The mixed rows of each block, ``[m, d_k]``.
    """
    spoilt = ((shares > 0) & rejected).any(1, keepdim=True)
    unused = (rejected | (shares == 0).all(0))[:, None]
    results = []
    for block, centre in zip(blocks, centres, strict=True):
        weights = shares.to(block.dtype)
        result = block.new_empty(len(shares), block.shape[1])
        for columns in chunks(block):
            deviation = (block[:, columns] - centre[columns]).masked_fill_(unused, 0)
            # clamp: rounding could make a mean of variances negative; the centre's own deviation is 0
            lowest = deviation.amin(0).clamp_(max=0)
            mixed = torch.maximum(weights @ deviation, lowest).add_(centre[columns])
            result[:, columns] = mixed.masked_fill_(spoilt, torch.nan)
        results.append(result)
    return results


def _equal_shares(chosen: Tensor, num_clients: int) -> Tensor:
    """Return the share 1/k for each chosen client, and 0 for all others, ``[m, num_clients]``."""
    m, k = chosen.shape
    shares = torch.zeros(m, num_clients, dtype=torch.float64, device=chosen.device)
    return shares.scatter_(1, chosen, 1 / k)
