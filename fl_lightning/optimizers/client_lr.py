"""Schedules of the client learning rate over the communication rounds."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from fl_lightning.errors import check_number, doing
from fl_lightning.optimizers.milestones import check_milestone, round_at
from fl_lightning.recorded import Recorded


class LRSchedule(Recorded, ABC):
    """Base class of schedules. In each round, a schedule scales the client learning rate."""

    @abstractmethod
    def __call__(self, round_number: int, total_rounds: int) -> float:
        """Return the factor for the client learning rate in a round.

        Args:
            round_number: The communication round, from 1.
            total_rounds: Number of planned rounds.
        """


def lr_factor(schedule: Callable[[int, int], float] | None, round_number: int, total_rounds: int) -> float:
    """Return a schedule's factor for the client learning rate in a round.

    If there is no schedule, the factor is 1.

    Raises:
        ConfigurationError: The factor is negative or not finite.
    """
    if schedule is None:
        return 1.0
    with doing(f"calling model.client_lr_schedule with round {round_number} of {total_rounds}"):
        factor = float(schedule(round_number, total_rounds))
    check_number(f"client_lr_schedule, round {round_number}", factor, least=0, below=math.inf)
    return factor


class MultiStep(LRSchedule):
    """Schedule that multiplies the learning rate by ``gamma`` after each milestone.

    Args:
        milestones: Rounds (int), or fractions of all rounds (float) in (0, 1). A milestone at round
            m changes the rate from round m + 1. The milestone 0.5 takes effect in the same round as
            ``FixBN(freeze_round=0.5)``.
        gamma: Factor at each milestone, positive and finite.
        first_round: Additional factor in round 1, positive and finite. The code of FedBE (Chen,
            Chao, ICLR 2021) uses 0.5.

    Raises:
        ConfigurationError: A milestone is neither a round >= 1 nor a fraction in (0, 1), or a
            factor is invalid.

    Example:
        >>> [MultiStep([0.5])(round_number, 4) for round_number in (1, 2, 3, 4)]
        [1.0, 1.0, 0.1, 0.1]
    """

    def __init__(
        self, milestones: Sequence[int | float], gamma: float = 0.1, first_round: float = 1.0
    ) -> None:
        for milestone in milestones:
            check_milestone("MultiStep.milestones", milestone)
        check_number("MultiStep.gamma", gamma, above=0, below=math.inf)
        check_number("MultiStep.first_round", first_round, above=0, below=math.inf)
        self.milestones = tuple(milestones)
        self.gamma = gamma
        self.first_round = first_round

    def __call__(self, round_number: int, total_rounds: int) -> float:
        """Return ``gamma ** (number of past milestones)``.

        The result for round 1 is also multiplied by ``first_round``.
        """
        factor = self.gamma ** sum(round_number > round_at(m, total_rounds) for m in self.milestones)
        return factor * self.first_round if round_number == 1 else factor


class InverseSteps(LRSchedule):
    """Schedule that divides the learning rate by k + 1 after k periods.

    The factor is ``1 / ceil(round / period)``. The FBN paper (Guerraoui et al., arXiv 2405.14670,
    Table 2) uses the rates 0.1, 0.05 and 0.033, each for 1,000 steps.

    Args:
        period: Length of a period: a number of rounds (int), or a fraction of all rounds (float) in
            (0, 1). The rate changes after the last round of a period.

    Raises:
        ConfigurationError: The period is neither an int >= 1 nor a fraction in (0, 1).

    Example:
        >>> [InverseSteps(2)(round_number, 6) for round_number in (1, 2, 3, 4, 5)]
        [1.0, 1.0, 0.5, 0.5, 0.3333333333333333]
    """

    def __init__(self, period: int | float) -> None:
        check_milestone("InverseSteps.period", period)
        self.period = period

    def __call__(self, round_number: int, total_rounds: int) -> float:
        """Return ``1 / (1 + number of past periods)``."""
        length = self.period if isinstance(self.period, int) else self.period * total_rounds
        return 1 / math.ceil(round_number / length - 1e-9)
