"""Client learning rates as a function of the communication round."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fl_lightning.errors import ConfigurationError


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
            if not (milestone >= 1 if isinstance(milestone, int) else 0 < milestone < 1):
                raise ConfigurationError(
                    f"MultiStep.milestones: {milestone} must be a round (1, 2, ...) or a fraction in (0, 1)"
                )
        if gamma <= 0:
            raise ConfigurationError(f"MultiStep.gamma: {gamma} must be positive")
        self.milestones = tuple(milestones)
        self.gamma = gamma

    def __call__(self, round_number: int, total_rounds: int) -> float:
        """``gamma`` to the power of the number of milestones already finished."""
        rounds = (m if isinstance(m, int) else round_at(m, total_rounds) for m in self.milestones)
        return self.gamma ** sum(round_number > m for m in rounds)


def round_at(fraction: float, total_rounds: int) -> int:
    """The last round of the first ``fraction`` of a run: ``floor(fraction * total_rounds)``, safe against rounding."""
    return int(fraction * total_rounds + 1e-9)
