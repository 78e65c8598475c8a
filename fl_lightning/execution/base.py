"""Base class of executors, which compute the losses and gradients of a local step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.clients.task import ClientTask
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.recorded import Recorded


class Compilation(NamedTuple):
    """Decision whether to compile the clients' forward and backward passes.

    Attributes:
        compiled: Whether to compile the passes.
        reason: Reason for the decision, in a few words. The text is empty if a user's setting
            decides.
    """

    compiled: bool
    reason: str = ""


class Executor(Recorded, ABC):
    """Base class of executors. An executor computes losses and gradients of a local step.

    Attributes:
        compilation: Decision whether to compile the passes. The module sets this attribute before
            round 1.
    """

    compilation = Compilation(False)

    @abstractmethod
    def backward(
        self, task: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        """Compute the losses and gradients of a local step for some clients.

        The gradients and the new buffers are written to the cohort.

        Args:
            task: What a client computes.
            cohort: The round's cohort, with the stacked state of its clients.
            batch: One batch for each client in ``rows``.
            rows: The clients that take this local step, as indices into the cohort.

        Returns:
            The clients' losses ``[len(rows)]``, detached.
        """

    def clients_together(self, clients: int) -> int | None:
        """Return how many clients share a forward pass; None if clients have separate passes.

        Args:
            clients: Number of clients in the step.
        """
        return None

    def close(self) -> None:  # not abstract, because most executors hold no resources
        """Release the resources that the executor holds between local steps.

        The executor can be used again afterwards.
        """
