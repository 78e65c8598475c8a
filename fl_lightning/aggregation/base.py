"""What an aggregator is: the weighted mean, and what all rules have in common that withstand Byzantine clients."""

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


class PreAggregator(ABC):
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
    def __call__(self, blocks: Sequence[Tensor], f: int) -> list[Tensor]:
        """New rows for the column blocks ``[n, d_k]``, of the same shapes, withstanding f Byzantine clients."""


class RobustAggregator(Aggregator):
    """A rule that withstands f Byzantine clients in a round.

    **Every client counts alike**: the aggregation weights are not used. A client's parameters are one vector; running
    means are another, running variances a third.

    Args:
        f: Byzantine clients in a round to withstand, 0 or more and less than half of them.
        pre: Applied to the rows first, such as ``NNM``, with its own ``f`` or else this one.

    Raises:
        ConfigurationError: f is out of range, or nobody tells ``pre`` its f.
    """

    def __init__(self, f: int | None = None, pre: PreAggregator | None = None) -> None:
        name = type(self).__name__
        if f is not None:
            check_byzantine(f"{name}.f", f)
        f_of_pre = f if pre is None or pre.f is None else pre.f
        if pre is not None and f_of_pre is None:
            before = type(pre).__name__
            raise ConfigurationError(
                f"{before}.f: null, and {name}.f is null as well; give one of them, such as {before}(f=1)"
            )
        self.f, self.pre = f, pre
        self._f_of_pre = f_of_pre or 0

    @abstractmethod
    def aggregate(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Aggregate the column blocks ``[n, d_k]``, each client being one vector over all of them, to ``[d_k]``."""

    def __call__(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Aggregate ``rows [n, d]`` to ``[d]``, without regard to ``weights``."""
        return self.blocks([rows], weights)[0]

    @torch.no_grad()
    def blocks(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """Aggregate several blocks ``[n, d_k]`` as one vector per client, without regard to ``weights``."""
        if not blocks:
            return []
        if len(blocks[0]) == 1:  # a centralised run: nobody to withstand
            return [block[0].clone() for block in blocks]
        self.check(len(blocks[0]))
        if self.pre is not None:
            blocks = self.pre(blocks, self._f_of_pre)
        return self.aggregate(blocks)

    def check(self, num_clients: int) -> None:
        """Refuse fewer clients in a round than withstand f Byzantine ones.

        Raises:
            ConfigurationError: Half of them or more may be Byzantine.
        """
        if self.f is not None:
            check_byzantine(f"{type(self).__name__}.f", self.f, num_clients)
        if self.pre is not None:
            check_byzantine(f"{type(self.pre).__name__}.f", self._f_of_pre, num_clients)


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
