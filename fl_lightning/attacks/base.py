"""Base class of attacks. Three hooks change the behaviour of Byzantine clients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation import Aggregator
from fl_lightning.recorded import Recorded


class Message(NamedTuple):
    """One vector of each client of the cohort, as the attackers know it before they attack.

    Attributes:
        honest: Vectors of the h honest clients, ``[h, d]``. For parameters these are updates.
        own: Vectors of the f attackers, computed by ordinary local steps, ``[f, d]``.
        weights: Aggregation weights, first of the honest clients, then of the attackers,
            ``[h + f]``, sum 1.
        rule: The server's aggregation rule for this vector.
    """

    honest: Tensor
    own: Tensor
    weights: Tensor
    rule: Aggregator

    def aggregate(self, sent: Tensor) -> Tensor:
        """Return the aggregate ``[d]`` for the case that all attackers send ``sent``, ``[d]``."""
        rows = torch.cat([self.honest, sent.expand(len(self.own), -1).to(self.honest.dtype)])
        return self.rule(rows, self.weights)


class Attack(Recorded):
    """Base class of attacks: the behaviour of Byzantine clients. By default they behave honestly.

    Attributes:
        least_honest: Least number of honest clients for which :meth:`messages` is called. With
            fewer honest clients, attackers send their unchanged vectors.
    """

    least_honest: int = 0

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return what the attackers send instead of each message.

        Returns:
            For each message: one vector ``[d]`` for all attackers, or one vector per attacker,
            ``[f, d]``.
        """
        return [message.own for message in messages]

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient that an attacker uses in a local step, of the same shape."""
        return gradient

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """Return the batch that an attacker trains on.

        Args:
            batch: Batch of the attacker's data. Shipped attacks expect ``(inputs, targets)``.
            num_classes: Number of classes of the data set. None: not known.
        """
        return batch
