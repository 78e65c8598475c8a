"""Base class of attacks, with three hooks that change the behaviour of Byzantine clients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation import Aggregator
from fl_lightning.recorded import Recorded


class Message(NamedTuple):
    """A vector that every client of the cohort sends, as the attackers know it.

    Attributes:
        honest: Vectors of the honest clients, shape ``[h, d]``; for parameters, the updates.
        own: Vectors from the attackers' own local steps, shape ``[f, d]``.
        weights: Aggregation weights of the honest clients, then the attackers, ``[h + f]``, sum 1.
        rule: The server's aggregation rule for the vector.
    """

    honest: Tensor
    own: Tensor
    weights: Tensor
    rule: Aggregator

    def aggregate(self, sent: Tensor) -> Tensor:
        """Return the aggregate ``[d]`` if all attackers send ``sent [d]``."""
        rows = torch.cat([self.honest, sent.expand(len(self.own), -1).to(self.honest.dtype)])
        return self.rule(rows, self.weights)


class Attack(Recorded):
    """The behaviour of Byzantine clients; by default they are honest.

    Attributes:
        least_honest: Honest clients that :meth:`messages` needs; with fewer, attackers send their
            ``own``.
    """

    least_honest: int = 0

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the attackers' vectors for each message: one ``[d]`` for all, or ``[f, d]``."""
        return [message.own for message in messages]

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient that an attacker uses in a local step, of the same shape."""
        return gradient

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """Return the batch that an attacker trains on.

        Args:
            batch: A batch of its data, ``(inputs, targets)`` for shipped attacks.
            num_classes: Number of classes of the data set; None if unknown.
        """
        return batch
