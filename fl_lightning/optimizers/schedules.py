"""Client learning rates as a function of the communication round."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from fl_lightning.errors import ConfigurationError
from fl_lightning.milestones import in_run, round_at


class LRSchedule(ABC):
    """A factor on the client learning rate for each communication round."""

    @abstractmethod
    def __call__(self, round_number: int, total_rounds: int) -> float:
        """The factor in a round.

        Args:
            round_number: The communication round, from 1.
            total_rounds: Number of planned rounds.
        """


class MultiStep(LRSchedule):
    """Multiply the learning rate by ``gamma`` after each milestone.

    Args:
        milestones: Rounds (int) or fractions of all rounds in (0, 1) (float). Round m itself still has the old rate,
            round m + 1 the new one, so that ``0.5`` decays where ``FixBN(freeze_fraction=0.5)`` freezes.
        gamma: The factor at each milestone.

    Raises:
        ConfigurationError: A milestone is neither a round >= 1 nor a fraction in (0, 1), or gamma <= 0.
    """

    def __init__(self, milestones: Sequence[int | float], gamma: float = 0.1) -> None:
        for milestone in milestones:
            if not in_run(milestone):
                raise ConfigurationError(
                    f"MultiStep.milestones: {milestone} must be a round (1, 2, ...) or a fraction in (0, 1)"
                )
        if gamma <= 0:
            raise ConfigurationError(f"MultiStep.gamma: {gamma} must be positive")
        self.milestones = tuple(milestones)
        self.gamma = gamma

    def __call__(self, round_number: int, total_rounds: int) -> float:
        """``gamma`` to the power of the number of milestones already finished."""
        return self.gamma ** sum(round_number > round_at(m, total_rounds) for m in self.milestones)


class InverseSteps(LRSchedule):
    """Divide the learning rate by 2, 3, ... after one, two, ... periods: ``1 / (1 + floor(t / period))`` with t = round - 1.

    The schedule of the FBN paper (Guerraoui et al., arXiv 2405.14670, Table 2): 0.1, 0.05 and 0.033 for 1,000 steps each.

    Args:
        period: Rounds (int), or a fraction of all rounds in (0, 1) (float). A period ends where a milestone of
            :class:`MultiStep` would be: the last round of it still has the old rate.

    Raises:
        ConfigurationError: The period is neither a round number >= 1 nor a fraction in (0, 1).
    """

    def __init__(self, period: int | float) -> None:
        if not in_run(period):
            raise ConfigurationError(
                f"InverseSteps.period: {period} must be a number of rounds (1, 2, ...) or a fraction in (0, 1)"
            )
        self.period = period

    def __call__(self, round_number: int, total_rounds: int) -> float:
        """One over one more than the number of periods already finished."""
        length = self.period if isinstance(self.period, int) else self.period * total_rounds
        return 1 / math.ceil(round_number / length - 1e-9)
