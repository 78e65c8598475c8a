"""Base class of aggregators, and FedAvg's weighted mean."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError
from fl_lightning.recorded import Recorded

Per = Literal["model", "layer"] | None


def weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the clients' rows (FedAvg, McMahan et al. 2017, Algorithm 1).

    Args:
        rows: One row per client, shape ``[n, d]``.
        weights: Non-negative weights that sum to 1, shape ``[n]``.

    Returns:
        The mean, shape ``[d]``.
    """
    return weights.to(rows.dtype) @ rows


class Aggregator(Recorded, ABC):
    """Base class of rules that combine the clients' rows into one row.

    Attributes:
        per: Layers in a client's vector: ``"layer"`` for one layer, ``"model"`` for all layers.
            None (default) means all layers for parameters, and one layer for running statistics.
    """

    per: Per = None

    @abstractmethod
    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Aggregate ``rows [n, d]`` to ``[d]``, with ``weights [n]`` that sum to 1."""

    def blocks(self, blocks: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        """Aggregate the clients' vectors, each of which spans several blocks.

        Args:
            blocks: Column blocks of the clients' rows, at least one, each ``[n, d_k]``.
            weights: Weights ``[n]`` that sum to 1.

        Returns:
            The aggregate of each block, ``[d_k]``.
        """
        return list(
            torch.split(self(torch.cat(list(blocks), 1), weights), [block.shape[1] for block in blocks])
        )

    def shares(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """Return each client's share in the aggregate, averaged over coordinates, float64 ``[n]``."""
        raise ConfigurationError(
            f"{type(self).__name__} does not implement shares(blocks, weights), each client's share in the result"
        )

    def check(self, num_clients: int) -> None:  # not abstract: many rules need no check
        """Check that a round with ``num_clients`` clients has enough clients for the rule.

        Raises:
            ConfigurationError: The rule needs more clients.
        """


class WeightedMean(Aggregator):
    """Weighted mean: the rule of FedAvg, and the default."""

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Aggregate ``rows [n, d]`` to ``[d]``, with ``weights [n]`` that sum to 1."""
        return weighted_mean(rows, weights)

    def blocks(self, blocks: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        """Average each block separately."""
        return [self(block, weights) for block in blocks]

    def shares(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the weights as float64. If ``weights`` is None, return equal weights."""
        n = len(blocks[0])
        weights = torch.full((n,), 1 / n, dtype=torch.float64) if weights is None else weights
        return weights.to(blocks[0].device, torch.float64)
