"""What an aggregator is, the weighted mean, and how many Byzantine clients a rule may be told to withstand."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.errors import ConfigurationError


def check_byzantine(setting: str, f: int, num_clients: int | None = None) -> None:
    """Refuse a number of Byzantine clients that is none, or no minority of the clients.

    Args:
        setting: Name of the setting, such as ``"TrimmedMean.f"``.
        f: The number found.
        num_clients: Clients in a round; None where it is not known yet.

    Raises:
        ConfigurationError: f is not a whole number of at least 0, or at least half of the clients.
    """
    if isinstance(f, bool) or not isinstance(f, int) or f < 0:
        raise ConfigurationError(f"{setting}: {f!r} must be a whole number of at least 0")
    if num_clients is not None and 2 * f >= num_clients:
        most = max((num_clients - 1) // 2, 0)
        raise ConfigurationError(
            f"{setting}: {f} must be less than half of a round's {num_clients} clients; use at most {most}, or at least "
            f"{2 * f + 1} clients in a round"
        )


def weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the clients' rows (FedAvg, McMahan et al. 2017, Algorithm 1).

    Args:
        rows: One row per client, shape ``[n, d]``.
        weights: Non-negative weights that sum to 1, shape ``[n]``.

    Returns:
        The mean, shape ``[d]``.
    """
    return weights.to(rows.dtype) @ rows


class Aggregator(ABC):
    """How the server turns the clients' rows into one."""

    @abstractmethod
    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Aggregate ``rows [n, d]`` with ``weights [n]`` (sum 1) to ``[d]``."""

    def blocks(self, blocks: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        """Aggregate several blocks ``[n, d_k]`` as one vector per client, as rules that measure distances need.

        Args:
            blocks: Column blocks of the clients' rows, each ``[n, d_k]``.
            weights: Weights ``[n]`` that sum to 1.

        Returns:
            The aggregate of each block, ``[d_k]``.
        """
        if not blocks:
            return []
        return list(
            torch.split(self(torch.cat(list(blocks), 1), weights), [block.shape[1] for block in blocks])
        )

    def check(self, num_clients: int) -> None:  # noqa: B027  # many rules take any number
        """Refuse a number of clients in a round that the rule cannot work with, before training starts.

        Args:
            num_clients: Clients in a round.

        Raises:
            ConfigurationError: They are too few.
        """


class WeightedMean(Aggregator):
    """Weighted mean: FedAvg's rule, and the default."""

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Aggregate ``rows [n, d]`` with ``weights [n]`` (sum 1) to ``[d]``."""
        return weighted_mean(rows, weights)

    def blocks(self, blocks: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        """Aggregate each block by itself: the mean is linear, so no copy of all columns is needed."""
        return [self(block, weights) for block in blocks]


def require_weighted_mean(aggregator: Aggregator, method: str, doing: str) -> None:
    """Refuse a rule that a method's own sums over the clients would go round.

    Args:
        aggregator: The run's aggregator.
        method: The method, for the message.
        doing: What it does with every client, for the message.

    Raises:
        ConfigurationError: The aggregator is not the weighted mean.
    """
    if not isinstance(aggregator, WeightedMean):
        raise ConfigurationError(
            f"model.aggregator: {type(aggregator).__name__} cannot protect {method}, which {doing}; use WeightedMean"
        )
