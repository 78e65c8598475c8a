"""Rules that measure distances between clients: nearest-neighbour mixing, Krum and multi-Krum.

They need the n x n distances only, which one matrix product gives, and then mix rows with shares that follow from them.
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
from fl_lightning.errors import ConfigurationError, check_choice

KrumScore = Literal["byzfl", "blanchard"]

_FEW = 16
"""Up to so many rows, differences pair by pair take less time than a median and a matrix product."""


class NNM(PreAggregator):
    """Nearest-neighbour mixing: every row becomes the mean of the n - f rows closest to it, itself among them.

    Allouah et al. 2023, "Fixing by Mixing", arXiv 2302.01772. Equal distances: the lower index. A row that holds a value
    that is not finite is the last that others mix, and becomes NaN itself: a rule that follows drops it. With f = 0 every
    row becomes the mean. Weighted, a row mixes the nearest until they have all weight but what the f heaviest clients have
    together, the last of them in part.
    """

    def mix(self, blocks: Sequence[Tensor], f: int, weights: Tensor | None = None) -> Mixed:
        """Mix each client with its n - f nearest; distances are over all blocks together."""
        distances = measure(blocks)
        closest = distances.squared.argsort(dim=1, stable=True)
        if weights is None:
            shares = _equal_shares(closest[:, : len(closest) - f], len(closest))
        else:
            near = within(weights[closest], 0, 1 - byzantine_mass(weights, f, "NNM.f"))
            shares = torch.zeros_like(near).scatter_(1, closest, near)
        return Mixed(mix(blocks, shares, distances.centres, distances.rejected), shares, weights)


class Krum(RobustAggregator):
    """Krum: the client whose neighbours are closest to it (Blanchard et al. 2017, "Machine Learning with Adversaries").

    A client's score is the mean of its squared distances to the closest other clients. Equal scores: the lower index. A row
    that holds a value that is not finite is the last to win. Every client counts alike.

    Args:
        f: Byzantine clients in a round to withstand, 0 or more and less than half of them.
        pre: Applied to the rows first, such as ``NNM``, with its own ``f`` or else this one.
        per: See :class:`~fl_lightning.aggregation.robust.RobustAggregator`.
        score: How many other clients count: ``"byzfl"``: n - f - 1, as in the ByzFL library; ``"blanchard"``: n - f - 2, as
            in the paper.

    Raises:
        ConfigurationError: f is out of range, or the score unknown.
    """

    f: int

    def __init__(
        self, f: int, pre: PreAggregator | None = None, per: Per = None, score: KrumScore = "byzfl"
    ) -> None:
        super().__init__(f, pre, per)
        check_choice(f"{type(self).__name__}.score", score, ("byzfl", "blanchard"))
        self.score: KrumScore = score

    def check(self, num_clients: int) -> None:
        """Refuse fewer clients in a round than withstand f Byzantine ones and give each a neighbour to score.

        Raises:
            ConfigurationError: They are too few.
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
        """The client whose neighbours are closest."""
        winner = self.ranking(squared_distances(blocks))[:1]
        return [block.index_select(0, winner)[0] for block in blocks]

    def shares_of_rows(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """1 for the client whose neighbours are closest."""
        return _equal_shares(self.ranking(squared_distances(blocks))[None, :1], len(blocks[0]))[0]

    def ranking(self, squared: Tensor) -> Tensor:
        """The clients in ascending order of their score, int64 ``[n]``, from squared distances ``[n, n]``; ties by index."""
        neighbours = len(squared) - self.f - (1 if self.score == "byzfl" else 2)
        others = squared.sort(dim=1).values[:, 1 : neighbours + 1]
        return others.sum(1).argsort(stable=True)


class MultiKrum(Krum):
    """Multi-Krum: the mean of the n - f clients with the lowest score of :class:`Krum`, which has the same settings."""

    def aggregate(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """The mean of the clients whose neighbours are closest."""
        squared = squared_distances(blocks)
        ranking = self.ranking(squared)
        shares = _equal_shares(ranking[None, : len(ranking) - self.f], len(ranking))
        centres = [block.index_select(0, ranking[:1])[0] for block in blocks]
        rejected = squared.isinf().sum(1) == len(squared) - 1
        return [rows[0] for rows in mix(blocks, shares, centres, rejected)]

    def shares_of_rows(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """1 / (n - f) for each client that is chosen."""
        ranking = self.ranking(squared_distances(blocks))
        return _equal_shares(ranking[None, : len(ranking) - self.f], len(ranking))[0]


class MixingRule(RobustAggregator):
    """A rule whose result mixes the clients' vectors with shares that follow from their inner products."""

    @abstractmethod
    def mixing(self, distances: "Distances", weights: Tensor | None) -> Tensor:
        """Shares ``[n]`` of the rows, 0 for rejected ones; what they lack to a sum of 1 is the centres'."""

    def aggregate(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """The rows, mixed."""
        distances = measure(blocks)
        shares = self.mixing(distances, weights)[None]
        return [rows[0] for rows in mix(blocks, shares, distances.centres, distances.rejected)]

    def shares_of_rows(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """The shares with which they are mixed."""
        return self.mixing(measure(blocks), weights)


class Distances(NamedTuple):
    """Where the clients' rows lie to each other.

    Attributes:
        gram: Inner products of the rows' deviations from the centres, float64 ``[n, n]``.
        squared: Squared Euclidean distances, float64 ``[n, n]``; infinite to and from a rejected row, 0 on the diagonal.
        rejected: Which rows hold a value that is not finite, bool ``[n]``.
        centres: Where the deviations begin, by default at the coordinate-wise median of each block, ``[d_k]``.
    """

    gram: Tensor
    squared: Tensor
    rejected: Tensor
    centres: list[Tensor]


@torch.no_grad()
def measure(blocks: Sequence[Tensor], centres: list[Tensor] | None = None) -> Distances:
    """Distances between the clients, each client's vector being its rows of all blocks side by side.

    They come from the Gram matrix of the deviations from the coordinate-wise median, in float64: a matrix product is an
    order of magnitude faster than differences pair by pair, and around the median nothing cancels between close rows,
    however far away a minority of outliers lies.

    Args:
        blocks: Column blocks ``[n, d_k]`` of the clients' rows.
        centres: Other points instead of the medians, ``[d_k]``.
    """
    n = len(blocks[0])
    gram = torch.zeros(n, n, dtype=torch.float64, device=blocks[0].device)
    centres = [median(block) for block in blocks] if centres is None else centres
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
    """Squared Euclidean distances between the clients, as :func:`measure` gives them: float64 ``[n, n]``.

    Those of few rows are measured pair by pair, so that nothing can cancel and no centre is needed.

    Args:
        blocks: Column blocks ``[n, d_k]`` of the clients' rows.
    """
    n = len(blocks[0])
    if n > _FEW:
        return measure(blocks).squared
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
    """Rows mixed with other rows: ``shares @ block`` for each block, exact where the mixed rows equal the centre.

    A result that mixes a rejected row is NaN; other results do not feel rejected rows.

    Args:
        blocks: Column blocks ``[n, d_k]`` of the clients' rows.
        shares: Non-negative shares, float64 ``[m, n]``; what a row's sum lacks to 1 is the centre's.
        centres: A point of each block amid most rows, ``[d_k]``.
        rejected: Which rows hold a value that is not finite, bool ``[n]``.

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
            # rounding must not leave the rows' range: a mean of variances is a variance
            mixed = torch.maximum(weights @ deviation, deviation.amin(0)).add_(centre[columns])
            result[:, columns] = mixed.masked_fill_(spoilt, torch.nan)
        results.append(result)
    return results


def _equal_shares(chosen: Tensor, num_clients: int) -> Tensor:
    """Shares ``[m, num_clients]`` that are alike for the clients ``chosen [m, k]``."""
    m, k = chosen.shape
    shares = torch.zeros(m, num_clients, dtype=torch.float64, device=chosen.device)
    return shares.scatter_(1, chosen, 1 / k)
