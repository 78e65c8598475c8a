"""What is done to the clients' rows before a robust rule aggregates them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fl_lightning.aggregation.masses import check_byzantine
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
