"""The base of rules that withstand Byzantine clients."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.aggregation.masses import byzantine_mass, check_byzantine
from fl_lightning.aggregation.mean import Aggregator, Per
from fl_lightning.aggregation.preaggregation import PreAggregator
from fl_lightning.errors import ConfigurationError, check_choice

Weighting = Literal["uniform", "weighted"]


class RobustAggregator(Aggregator):
    """A rule that withstands f Byzantine clients in a round.

    **Every client counts alike** unless ``weighting`` says else: the aggregation weights are not used. A client's parameters
    are one vector; each layer's running means are another, its running variances a third.

    Weighted clients are cut to ``max_weight`` first, as attackers report their own sizes. Withstanding f of them is
    withstanding the f largest weights: together they must be less than half of all.

    Args:
        f: Byzantine clients in a round to withstand, 0 or more and less than half of them.
        pre: Applied to the rows first, such as ``NNM``, with its own ``f`` or else this one.
        per: Whether each layer is a vector of its own: ``"model"`` or ``"layer"``. Null: a client's parameters are one vector,
            its statistics one per layer.
        weighting: ``"weighted"``: clients count by their aggregation weights, in ``pre`` as well; ``"uniform"``: all alike.
        max_weight: Largest weight that counts, in units of the clients' mean weight.

    Raises:
        ConfigurationError: f, ``per``, ``weighting`` or ``max_weight`` is out of range, or nobody tells ``pre`` its f.
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
        if per is not None:
            check_choice(f"{name}.per", per, ("model", "layer"))
        check_choice(f"{name}.weighting", weighting, ("uniform", "weighted"))
        if not max_weight >= 1:
            raise ConfigurationError(f"{name}.max_weight: {max_weight} must be at least 1, the mean weight")
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
        """Aggregate the column blocks ``[n, d_k]``, each client being one vector over all of them, to ``[d_k]``.

        Args:
            blocks: The rows, after ``pre``.
            weights: How much each row counts, float64 ``[n]``; None: all alike.
        """

    @abstractmethod
    def shares_of_rows(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """The rows' shares, float64 ``[n]``, in what :meth:`aggregate` makes of them."""

    def __call__(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Aggregate ``rows [n, d]`` to ``[d]``."""
        return self.blocks([rows], weights)[0]

    @torch.no_grad()
    def blocks(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """Aggregate several blocks ``[n, d_k]`` as one vector per client."""
        if not blocks:
            return []
        if len(blocks[0]) == 1:  # a centralised run: nobody to withstand
            return [block[0].clone() for block in blocks]
        rows, _, counted = self._prepare(blocks, weights)
        return self.aggregate(rows, counted)

    @torch.no_grad()
    def shares(self, blocks: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
        """What part each client has in the aggregate of ``blocks``, the mean over all coordinates: float64 ``[n]``.

        They sum to 1; with :class:`~fl_lightning.aggregation.centers.CenteredClipping` to less, since what was clipped is its
        start's. ``pre`` that draws at random draws anew.
        """
        if len(blocks[0]) == 1:
            return blocks[0].new_ones(1, dtype=torch.float64)
        rows, of_clients, counted = self._prepare(blocks, weights)
        shares = self.shares_of_rows(rows, counted)
        return shares if of_clients is None else shares @ of_clients

    def check(self, num_clients: int) -> None:
        """Refuse fewer clients in a round than withstand f Byzantine ones.

        Raises:
            ConfigurationError: Half of them or more may be Byzantine.
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
        """The rows that reach the rule, the clients' shares in them (None: one each) and how much each row counts."""
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
