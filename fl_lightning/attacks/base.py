"""Base class of attacks, with three hooks that change the behaviour of Byzantine clients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation import Aggregator
from fl_lightning.recorded import Recorded


class Message(NamedTuple):
    """A vector from each client in the cohort, before the attack.

    Attributes:
        honest: Vectors of the h honest clients, ``[h, d]``. For parameters, the vectors are
            updates.
        own: Vectors that the f attackers would send without the attack, ``[f, d]``. The attackers
            are those of all ``Byzantine`` callbacks in the round.
        weights: Aggregation weights ``[h + f]``, which sum to 1. The honest clients come first.
        rule: The server's aggregation rule for this vector.
    """

    honest: Tensor
    own: Tensor
    weights: Tensor
    rule: Aggregator

    def aggregate(self, sent: Tensor) -> Tensor:
        """Return the aggregate ``[d]`` if all attackers send the vector ``sent``."""
        rows = torch.cat([self.honest, sent.expand(len(self.own), -1).to(self.honest.dtype)])
        return self.rule(rows, self.weights)


class Attack(Recorded):
    """Base class of attacks. By default, attackers behave like honest clients.

    Attributes:
        least_honest: Minimum number of honest clients in a round. If a round has fewer honest
            clients, :meth:`messages` is not called, and attackers send their vectors unchanged.
    """

    least_honest: int = 0

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the vectors that the attackers send for each message.

        Returns:
            For each message, one vector ``[d]`` for all attackers, or one vector per attacker,
            ``[f, d]``.
        """
        return [message.own for message in messages]

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient that an attacker uses in a local step. The shape does not change."""
        return gradient

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """Return the batch that an attacker trains on.

        Args:
            batch: Batch of the attacker's data. The attacks of this package expect ``(inputs,
                targets)``.
            num_classes: Number of classes of the data set; None if unknown.
        """
        return batch
