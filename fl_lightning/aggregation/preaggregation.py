"""What is done to the clients' rows before a robust rule aggregates them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation.masses import check_byzantine
from fl_lightning.errors import ConfigurationError
from fl_lightning.recorded import Recorded


class Mixed(NamedTuple):
    """What a pre-aggregator makes of the clients' rows.

    Attributes:
        blocks: The new rows, ``[m, d_k]`` each.
        shares: The clients' shares in them, float64 ``[m, n]``; each row sums to 1.
        weights: The new rows' weights, ``[m]``; None where all count alike.
    """

    blocks: Sequence[Tensor]
    shares: Tensor
    weights: Tensor | None


class PreAggregator(Recorded, ABC):
    """What is done to the clients' rows before a robust rule aggregates them.

    Args:
        f: Byzantine clients in a round to withstand; None takes the rule's.

    Raises:
        ConfigurationError: f is negative.
    """

    def __init__(self, f: int | None = None) -> None:
        if f is not None:
            check_byzantine(f"{type(self).__name__}.f", f)
        self.f = f

    @abstractmethod
    def mix(self, blocks: Sequence[Tensor], f: int, weights: Tensor | None = None) -> Mixed:
        """New rows for the column blocks ``[n, d_k]``, withstanding f Byzantine clients.

        Args:
            blocks: Column blocks of the clients' rows, each ``[n, d_k]``.
            f: Byzantine clients to withstand.
            weights: How much each client counts, ``[n]``; None: all alike.
        """

    def rows_left(self, num_clients: int) -> int:
        """How many rows it makes of those of ``num_clients`` clients."""
        return num_clients

    @property
    def rows_are(self) -> str:
        """What its rows are, for messages."""
        return "clients"

    def __call__(self, blocks: Sequence[Tensor], f: int) -> list[Tensor]:
        """New rows for the column blocks ``[n, d_k]``, with all clients alike."""
        return list(self.mix(blocks, f).blocks)


class Bucketing(PreAggregator):
    """Bucketing: the clients are dealt at random into buckets of ``size``, and each bucket's mean is a row for the rule.

    Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", arXiv 2006.09365. The rule
    gets ceil(n / size) rows, up to f of them spoilt, and 2f must be less than that. The deal is drawn from torch's global CPU
    generator. A bucket with a value that is not finite has none: a rule that follows drops it. Weighted, a bucket has its
    clients' weighted mean and counts by their sum.

    Args:
        size: Clients in a bucket, 1 or more; the last bucket may have fewer.
        f: Byzantine clients in a round to withstand; null takes the rule's.

    Raises:
        ConfigurationError: ``size`` or f is out of range.
    """

    def __init__(self, size: int, f: int | None = None) -> None:
        super().__init__(f)
        if size < 1:
            raise ConfigurationError(f"Bucketing.size: {size} must be at least 1")
        self.size = size

    def rows_left(self, num_clients: int) -> int:
        """The number of buckets."""
        return -(-num_clients // self.size)

    @property
    def rows_are(self) -> str:
        """Such as ``"buckets of 2"``."""
        return f"buckets of {self.size}"

    @torch.no_grad()
    def mix(self, blocks: Sequence[Tensor], f: int, weights: Tensor | None = None) -> Mixed:
        """The buckets' means."""
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
                # deviations from a row: exact where all are equal
                torch.add(rows[0], share[bucket].to(rows.dtype) @ (rows - rows[0]), out=mean)
        return Mixed(
            means, shares, None if weights is None else torch.stack([weights[b].sum() for b in buckets])
        )
