"""What an attack is: three things that a Byzantine client may do otherwise."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation import Aggregator
from fl_lightning.recorded import Recorded


class Message(NamedTuple):
    """A vector that every client of the cohort sends, as the attackers know it.

    Attributes:
        honest: What the honest clients send, shape ``[h, d]``; parameters as what they differ by from the server's.
        own: What the attackers have computed, likewise ``[f, d]``.
        weights: Aggregation weights of the honest clients and then of the attackers, shape ``[h + f]``, sum 1.
        rule: How the server aggregates the vector.
    """

    honest: Tensor
    own: Tensor
    weights: Tensor
    rule: Aggregator

    def aggregate(self, sent: Tensor) -> Tensor:
        """What the server makes of the vector, shape ``[d]``, if all attackers send ``sent``, of the same shape."""
        rows = torch.cat([self.honest, sent.expand(len(self.own), -1).to(self.honest.dtype)])
        return self.rule(rows, self.weights)


class Attack(Recorded):
    """What a Byzantine client does otherwise: what it sends, what it trains with, what it trains on.

    Attributes:
        least_honest: Honest clients that the attackers must know to make their messages; with fewer in a round they send what
            they have computed.
    """

    least_honest: int = 0

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """What the attackers send instead of each message: ``[d]`` for all of them, or ``[f, d]``."""
        return [message.own for message in messages]

    def gradient(self, gradient: Tensor) -> Tensor:
        """What an attacker trains with instead of its gradient in each local step, of the same shape."""
        return gradient

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """What an attacker trains on instead of a batch of its data.

        Args:
            batch: The batch, ``(inputs, targets)`` for shipped attacks.
            num_classes: Number of classes of the data set, None where it does not say.
        """
        return batch
