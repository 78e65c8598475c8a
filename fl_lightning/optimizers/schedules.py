"""Client learning rates as a function of the communication round."""

import math
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


def round_at(moment: int | float, total_rounds: int) -> int:
    """The last round before a moment of a run.

    Args:
        moment: That round itself (int), or a fraction of all rounds (float): ``floor(moment * total_rounds)``, safe
            against rounding.
        total_rounds: Number of planned rounds.
    """
    return moment if isinstance(moment, int) else int(moment * total_rounds + 1e-9)


def in_run(moment: int | float, *, ends: bool = False) -> bool:
    """Whether a moment (see :func:`round_at`) lies within a run.

    Args:
        moment: A round (int) or a fraction of all rounds (float).
        ends: Whether the start (round 0, fraction 0) and the end (fraction 1) count as within.
    """
    if isinstance(moment, int):
        return moment >= (0 if ends else 1)
    return 0 <= moment <= 1 if ends else 0 < moment < 1


def one_moment(
    owner: str, name: str, round_number: int | None, fraction: float | None, default: float
) -> int | float:
    """The moment that a pair of settings ``<name>_round`` and ``<name>_fraction`` gives together.

    Args:
        owner: Name of the class, for messages.
        name: What happens then, such as ``"freeze"``.
        round_number: A round >= 0, or None.
        fraction: A fraction of all rounds in [0, 1], or None.
        default: The fraction where neither is given.

    Raises:
        ConfigurationError: Both are given, or one is out of range.
    """
    setting = f"{owner}.{name}"
    if round_number is not None and fraction is not None:
        raise ConfigurationError(
            f"{setting}_round: {round_number} and {setting}_fraction: {fraction} both say when; give one of them"
        )
    if round_number is not None and not in_run(round_number, ends=True):
        raise ConfigurationError(f"{setting}_round: {round_number} must be a round number >= 0")
    if fraction is not None and not in_run(float(fraction), ends=True):
        raise ConfigurationError(f"{setting}_fraction: {fraction} must lie in [0, 1]")
    if round_number is not None:
        return round_number
    return default if fraction is None else float(fraction)
