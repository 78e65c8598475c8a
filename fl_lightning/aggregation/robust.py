"""Base class of rules that withstand Byzantine clients."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.aggregation.masses import byzantine_mass, check_byzantine
from fl_lightning.aggregation.mean import Aggregator, Per
from fl_lightning.aggregation.preaggregation import PreAggregator
from fl_lightning.errors import ConfigurationError, check_number

Weighting = Literal["uniform", "weighted"]


class RobustAggregator(Aggregator):
    """Rule that withstands f Byzantine clients in a round.

    **By default, all clients have equal weight**: the rule ignores the aggregation weights. With
    ``weighting="weighted"``, the rule uses the aggregation weights. Attackers could report large
    numbers of examples. Each weight is therefore capped at ``max_weight`` times the mean weight.
    The f largest weights must sum to less than half of the total weight.

    Args:
        f: Number of Byzantine clients to withstand, in [0, n/2) for n clients in a round.
        pre: Pre-aggregator of the rows, such as ``NNM``. ``f`` is the default of ``pre.f``.
        per: Layers in a client's vector: ``"layer"`` for one layer, ``"model"`` for all layers.
            None (default) means all layers for parameters, and one layer for running means or
            variances.
        weighting: ``"uniform"`` for equal weights, or ``"weighted"`` for the aggregation weights.
            ``pre`` uses the same weights.
        max_weight: Largest weight of a client, as a multiple of the clients' mean weight, >= 1.

    Raises:
        ConfigurationError: A setting is out of range, or ``pre`` is set but neither ``f`` nor
            ``pre.f``.
    """

    def __init__(
        self,
        f: int | None = None,
        pre: PreAggregator | None = None,
        per: Per = None,
        weighting: Weighting = "uniform",
        max_weight: float = 2.0,
    ) -> None:
        name = type(self).__name__
        if f is not None:
            check_byzantine(f"{name}.f", f)
        check_number(f"{name}.max_weight", max_weight, ", the mean weight", least=1)
        f_of_pre = f if pre is None or pre.f is None else pre.f
        if pre is not None and f_of_pre is None:
            before = type(pre).__name__
            raise ConfigurationError(
                f"{before}.f: null, and {name}.f is null as well; give one of them, such as {before}(f=1)"
            )
        self.f, self.pre, self.per = f, pre, per
        self.weighting, self.max_weight = weighting, max_weight
        self._f_of_pre = f_of_pre or 0

    @abstractmethod
    def aggregate(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """Aggregate blocks ``[n, d_k]`` to blocks ``[d_k]``. A client's vector spans all blocks.

        Args:
            blocks: Column blocks of the rows that ``pre`` returns; of the clients' rows without
                ``pre``.
            weights: Weight of each row, float64 ``[n]``. None: equal weights.
        """

    @abstractmethod
    def shares_of_rows(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """Return each row's share in the result of :meth:`aggregate`, float64 ``[n]``."""

    def __call__(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Aggregate ``rows [n, d]`` to ``[d]``."""
        return self.blocks([rows], weights)[0]

    @torch.no_grad()
    def blocks(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """Aggregate the clients' vectors, each of which spans several blocks ``[n, d_k]``."""
        if len(blocks[0]) == 1:  # a centralised run has no attackers
            return [block[0].clone() for block in blocks]
        rows, _, counted = self._prepare(blocks, weights)
        return self.aggregate(rows, counted)

    @torch.no_grad()
    def shares(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """Return each client's share in the aggregate, averaged over coordinates, float64 ``[n]``.

        The shares sum to 1. With a rule that clips, they sum to less than 1, because the start
        point has a share, too. If ``pre`` is random, each call draws new random numbers.
        """
        if len(blocks[0]) == 1:
            return blocks[0].new_ones(1, dtype=torch.float64)
        rows, of_clients, counted = self._prepare(blocks, weights)
        shares = self.shares_of_rows(rows, counted)
        return shares if of_clients is None else shares @ of_clients

    def check(self, num_clients: int) -> None:
        """Check that f is less than half of a round's clients.

        Raises:
            ConfigurationError: f is at least half of a round's clients.
        """
        rows, whom = self._rows_left(num_clients), "clients" if self.pre is None else self.pre.rows_are
        if self.f is not None:
            check_byzantine(f"{type(self).__name__}.f", self.f, rows, whom)
        if self.pre is not None:
            check_byzantine(f"{type(self.pre).__name__}.f", self._f_of_pre, rows, whom)

    def _rows_left(self, num_clients: int) -> int:
        return num_clients if self.pre is None else self.pre.rows_left(num_clients)

    def _prepare(
        self, blocks: Sequence[Tensor], weights: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor | None, Tensor | None]:
        """Apply ``pre`` to the rows, and cap the weights.

        Returns:
            The column blocks of the new rows, each client's share in the new rows, and the weights
            of the new rows. Without ``pre``, the shares are None. If all weights are equal, the
            weights are None.
        """
        self.check(len(blocks[0]))
        counted, of_clients = None, None
        if self.weighting == "weighted" and weights is not None:
            counted = weights.detach().to(blocks[0].device, torch.float64)
            counted = counted.clamp(max=self.max_weight * counted.mean())
        if self.pre is not None:
            blocks, of_clients, counted = self.pre.mix(blocks, self._f_of_pre, counted)
        if self.f and counted is not None:
            byzantine_mass(counted, self.f, f"{type(self).__name__}.f")
        return blocks, of_clients, counted
