"""The robust rules as classes, for the setting ``aggregator``."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from fl_lightning.aggregation.base import Aggregator, check_byzantine
from fl_lightning.aggregation.coordinates import median, trimmed_mean
from fl_lightning.aggregation.distances import (
    KrumScore,
    krum_neighbours,
    krum_order,
    measure,
    mix,
    multi_krum_shares,
    neighbour_shares,
)
from fl_lightning.aggregation.weiszfeld import median_shares
from fl_lightning.errors import ConfigurationError, check_choice


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


class NNM(PreAggregator):
    """Nearest-neighbour mixing: :func:`~fl_lightning.aggregation.distances.nearest_neighbor_mixing`."""

    def __call__(self, blocks: Sequence[Tensor], f: int) -> list[Tensor]:
        """Mix each client with its n - f nearest; distances are over all blocks together."""
        return mix(blocks, lambda distances: neighbour_shares(distances, f))


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

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Aggregate ``rows [n, d]`` to ``[d]``, without regard to ``weights``."""
        return self.blocks([rows], weights)[0]

    def blocks(self, blocks: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
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


class Median(RobustAggregator):
    """Coordinate-wise median: :func:`~fl_lightning.aggregation.coordinates.median`. It needs no f; ``pre`` may.

    See :class:`RobustAggregator` for its settings.
    """

    def aggregate(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The median of each column."""
        return [median(block) for block in blocks]


class GeometricMedian(RobustAggregator):
    """Geometric median: :func:`~fl_lightning.aggregation.weiszfeld.geometric_median`. It needs no f; ``pre`` may.

    See :class:`RobustAggregator` for its settings.
    """

    def aggregate(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The point closest to all clients."""
        return [rows[0] for rows in mix(blocks, median_shares)]


class TrimmedMean(RobustAggregator):
    """Coordinate-wise trimmed mean: :func:`~fl_lightning.aggregation.coordinates.trimmed_mean`.

    See :class:`RobustAggregator` for its settings.
    """

    f: int

    def __init__(self, f: int, pre: PreAggregator | None = None) -> None:
        super().__init__(f, pre)

    def aggregate(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The mean of each column's middle n - 2f values."""
        return [trimmed_mean(block, self.f) for block in blocks]


class Krum(RobustAggregator):
    """Krum: :func:`~fl_lightning.aggregation.distances.krum`, one client's whole vector.

    Args:
        f: Byzantine clients in a round to withstand, 0 or more and less than half of them.
        pre: Applied to the rows first, such as ``NNM``, with its own ``f`` or else this one.
        score: How many other clients count: ``"byzfl"``: n - f - 1, ``"blanchard"``: n - f - 2, as in the paper.

    Raises:
        ConfigurationError: f is out of range, or the score unknown.
    """

    f: int

    def __init__(self, f: int, pre: PreAggregator | None = None, score: KrumScore = "byzfl") -> None:
        super().__init__(f, pre)
        check_choice(f"{type(self).__name__}.score", score, ("byzfl", "blanchard"))
        self.score: KrumScore = score

    def check(self, num_clients: int) -> None:
        """Refuse fewer clients in a round than withstand f Byzantine ones and give each a neighbour to score.

        Raises:
            ConfigurationError: They are too few.
        """
        super().check(num_clients)
        krum_neighbours(num_clients, self.f, self.score, f"{type(self).__name__}.score")

    def aggregate(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The client whose neighbours are closest."""
        winner = krum_order(measure(blocks), self.f, self.score)[:1]
        return [block.index_select(0, winner)[0] for block in blocks]


class MultiKrum(Krum):
    """Multi-Krum: :func:`~fl_lightning.aggregation.distances.multi_krum`, the mean of the n - f best clients by Krum's score.

    See :class:`Krum` for its settings.
    """

    def aggregate(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The mean of the clients whose neighbours are closest."""
        mixed = mix(blocks, lambda distances: multi_krum_shares(distances, self.f, self.score))
        return [rows[0] for rows in mixed]
