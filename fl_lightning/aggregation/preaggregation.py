"""Pre-aggregators, which mix the clients' rows before a robust rule aggregates them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation.masses import check_byzantine
from fl_lightning.errors import check_number
from fl_lightning.recorded import Recorded


class Mixed(NamedTuple):
    """Rows that a pre-aggregator returns, with their shares and weights.

    Attributes:
        blocks: Column blocks of the new rows, each ``[m, d_k]``.
        shares: Share of each client in each new row, float64 ``[m, n]``. The shares of a new row
            sum to 1.
        weights: Weight of each new row, ``[m]``. None: equal weights.
    """

    blocks: Sequence[Tensor]
    shares: Tensor
    weights: Tensor | None


class PreAggregator(Recorded, ABC):
    """Step that mixes the clients' rows before a robust rule aggregates them.

    Args:
        f: Number of Byzantine clients to withstand in a round. The default is the rule's f.

    Attributes:
        rows_are: Noun for the new rows in error messages.

    Raises:
        ConfigurationError: f is negative.
    """

    rows_are: str = "clients"

    def __init__(self, f: int | None = None) -> None:
        if f is not None:
            check_byzantine(f"{type(self).__name__}.f", f)
        self.f = f

    @abstractmethod
    def mix(self, blocks: Sequence[Tensor], f: int, weights: Tensor | None = None) -> Mixed:
        """Return the new rows.

        Args:
            blocks: Column blocks of the clients' rows, each ``[n, d_k]``.
            f: Number of Byzantine clients to withstand.
            weights: Weight of each client, ``[n]``. None: equal weights.
        """

    def rows_left(self, num_clients: int) -> int:
        """Return the number of new rows for ``num_clients`` clients."""
        return num_clients

    def __call__(self, blocks: Sequence[Tensor], f: int) -> list[Tensor]:
        """Return the new rows as blocks ``[m, d_k]``. All clients have equal weight."""
        return list(self.mix(blocks, f).blocks)


class Bucketing(PreAggregator):
    """Bucketing: the robust rule aggregates the means of random buckets of ``size`` clients.

    Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing",
    arXiv 2006.09365. There are ceil(n / size) buckets, and the rule needs more than 2f buckets. The
    clients of each bucket are drawn from torch's global CPU generator. If a client of a bucket has
    a non-finite value, the rule drops the bucket.

    With weights, a bucket's row is the weighted mean of its clients. A bucket's weight is the sum
    of its clients' weights.

    Args:
        size: Number of clients in a bucket, >= 1. The last bucket may have fewer clients.
        f: Number of Byzantine clients to withstand in a round. The default is the rule's f.

    Raises:
        ConfigurationError: ``size`` or f is out of range.
    """

    def __init__(self, size: int, f: int | None = None) -> None:
        super().__init__(f)
        check_number("Bucketing.size", size, least=1)
        self.size, self.rows_are = size, f"buckets of {size}"

    def rows_left(self, num_clients: int) -> int:
        """Return the number of buckets for ``num_clients`` clients."""
        return -(-num_clients // self.size)

    @torch.no_grad()
    def mix(self, blocks: Sequence[Tensor], f: int, weights: Tensor | None = None) -> Mixed:
        """Return the mean of each bucket, with the buckets' shares and weights."""
        n, device = len(blocks[0]), blocks[0].device
        buckets = [bucket.to(device) for bucket in torch.split(torch.randperm(n), self.size)]
        parts = torch.ones(n, dtype=torch.float64, device=device) if weights is None else weights
        shares = torch.zeros(len(buckets), n, dtype=torch.float64, device=device)
        for share, bucket in zip(shares, buckets, strict=True):
            share[bucket] = parts[bucket] / parts[bucket].sum()
        means = []
        for block in blocks:
            means.append(block.new_empty(len(buckets), block.shape[1]))
            for mean, share, bucket in zip(means[-1], shares, buckets, strict=True):
                rows = block[bucket]
                # take the mean of the differences to one row, so that the mean of equal rows is exact
                torch.add(rows[0], share[bucket].to(rows.dtype) @ (rows - rows[0]), out=mean)
        return Mixed(
            means, shares, None if weights is None else torch.stack([weights[b].sum() for b in buckets])
        )
