"""Rules that measure distances between clients: nearest-neighbour mixing, Krum and multi-Krum.

They need the n x n distances only, which one matrix product gives, and then mix rows with shares that follow from them.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation.base import check_byzantine
from fl_lightning.aggregation.coordinates import chunks, median
from fl_lightning.errors import ConfigurationError, check_choice

KrumScore = Literal["byzfl", "blanchard"]


class Distances(NamedTuple):
    """Where the clients' rows lie to each other.

    Attributes:
        gram: Inner products of the rows' deviations from the centres, float64 ``[n, n]``.
        squared: Squared Euclidean distances, float64 ``[n, n]``; infinite to and from a rejected row, 0 on the diagonal.
        rejected: Which rows hold a value that is not finite, bool ``[n]``.
        centres: Coordinate-wise median of each block, ``[d_k]``.
    """

    gram: Tensor
    squared: Tensor
    rejected: Tensor
    centres: list[Tensor]


@torch.no_grad()
def measure(blocks: Sequence[Tensor]) -> Distances:
    """Distances between the clients, each client's vector being its rows of all blocks side by side.

    They come from the Gram matrix of the deviations from the coordinate-wise median, in float64: a matrix product is an
    order of magnitude faster than differences pair by pair, and around the median nothing cancels between close rows,
    however far away a minority of outliers lies.

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
def mix(blocks: Sequence[Tensor], shares_of: Callable[[Distances], Tensor]) -> list[Tensor]:
    """Rows mixed with other rows: ``shares @ block`` for each block, exact where the mixed rows are equal.

    A result that mixes a rejected row is NaN; other results do not feel rejected rows.

    Args:
        blocks: Column blocks ``[n, d_k]`` of the clients' rows.
        shares_of: Gives non-negative shares, float64 ``[m, n]``, for what :func:`measure` found; each row sums to 1.

    Returns:
        The mixed rows of each block, ``[m, d_k]``.
    """
    distances = measure(blocks)
    shares = shares_of(distances)
    rejected = distances.rejected[:, None]
    spoilt = ((shares > 0) & distances.rejected).any(1, keepdim=True)
    results = []
    for block, centre in zip(blocks, distances.centres, strict=True):
        weights = shares.to(block.dtype)
        result = block.new_empty(len(shares), block.shape[1])
        for columns in chunks(block):
            deviation = (block[:, columns] - centre[columns]).masked_fill_(rejected, 0)
            # rounding must not leave the rows' range: a mean of variances is a variance
            mixed = torch.maximum(weights @ deviation, deviation.amin(0)).add_(centre[columns])
            result[:, columns] = mixed.masked_fill_(spoilt, torch.nan)
        results.append(result)
    return results


def neighbour_shares(distances: Distances, f: int) -> Tensor:
    """NNM's shares ``[n, n]``: 1 / (n - f) for the n - f rows closest to each row, itself among them."""
    n = len(distances.squared)
    closest = distances.squared.argsort(dim=1, stable=True)[:, : n - f]
    return torch.zeros_like(distances.squared).scatter_(1, closest, 1 / (n - f))


def krum_order(distances: Distances, f: int, score: KrumScore = "byzfl") -> Tensor:
    """The clients in ascending order of Krum's score, int64 ``[n]``; ties by index."""
    n = len(distances.squared)
    others = distances.squared.sort(dim=1).values[:, 1 : krum_neighbours(n, f, score) + 1]
    return others.sum(1).argsort(stable=True)


def krum_neighbours(n: int, f: int, score: KrumScore = "byzfl", setting: str = "score") -> int:
    """How many other rows Krum's score looks at: n - f - 1 (``"byzfl"``) or n - f - 2 (``"blanchard"``).

    Raises:
        ConfigurationError: Unknown score, or one that looks at nobody.
    """
    check_choice(setting, score, ("byzfl", "blanchard"))
    if score == "blanchard" and n < f + 3:
        raise ConfigurationError(
            f"{setting}: blanchard needs at least f + 3 = {f + 3} clients in a round, not {n}; use byzfl"
        )
    return n - f - (1 if score == "byzfl" else 2)


def nearest_neighbor_mixing(rows: Tensor, f: int) -> Tensor:
    """Nearest-neighbour mixing (NNM): every row becomes the mean of the n - f rows closest to it, itself among them.

    Allouah et al. 2023, "Fixing by Mixing", arXiv 2302.01772. Equal distances: the lower index. A row that holds a value
    that is not finite is the last that others mix, and becomes NaN itself: a rule that follows drops it. With f = 0 every
    row becomes the mean.

    Args:
        rows: One row per client, shape ``[n, d]``.
        f: Byzantine clients to withstand, 0 or more and less than n/2.

    Returns:
        The mixed rows, shape ``[n, d]``.

    Raises:
        ConfigurationError: f is out of range.
    """
    check_byzantine("nearest_neighbor_mixing f", f, len(rows))
    return mix([rows], lambda distances: neighbour_shares(distances, f))[0]


@torch.no_grad()
def krum(rows: Tensor, f: int, *, score: KrumScore = "byzfl") -> Tensor:
    """Krum: the row whose neighbours are closest to it (Blanchard et al. 2017, "Machine Learning with Adversaries").

    A row's score is the mean of its squared distances to the closest other rows. Equal scores: the lower index. A row that
    holds a value that is not finite is the last to win.

    Args:
        rows: One row per client, shape ``[n, d]``.
        f: Byzantine clients to withstand, 0 or more and less than n/2.
        score: How many other rows count: ``"byzfl"``: n - f - 1, as in the ByzFL library; ``"blanchard"``: n - f - 2, as in
            the paper.

    Returns:
        The winning row, shape ``[d]``.

    Raises:
        ConfigurationError: f is out of range, or the score unknown.
    """
    check_byzantine("krum f", f, len(rows))
    return rows.index_select(0, krum_order(measure([rows]), f, score)[:1])[0]


def multi_krum(rows: Tensor, f: int, *, score: KrumScore = "byzfl") -> Tensor:
    """Multi-Krum: the mean of the n - f rows with the lowest score of :func:`krum`.

    Args:
        rows: One row per client, shape ``[n, d]``.
        f: Byzantine clients to withstand, 0 or more and less than n/2.
        score: As in :func:`krum`.

    Returns:
        The mean, shape ``[d]``.

    Raises:
        ConfigurationError: f is out of range, or the score unknown.
    """
    check_byzantine("multi_krum f", f, len(rows))
    return mix([rows], lambda distances: multi_krum_shares(distances, f, score))[0][0]


def multi_krum_shares(distances: Distances, f: int, score: KrumScore = "byzfl") -> Tensor:
    """Multi-Krum's shares ``[1, n]``: 1 / (n - f) for the rows with the lowest scores."""
    chosen = krum_order(distances, f, score)[None, : len(distances.squared) - f]
    return torch.zeros_like(distances.squared[:1]).scatter_(1, chosen, 1 / chosen.shape[1])
