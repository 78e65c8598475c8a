"""Milestones: rounds that are given as a number or as a fraction of all rounds."""

from fl_lightning.errors import ConfigurationError


def round_at(milestone: int | float, total_rounds: int) -> int:
    """Convert a milestone to the number of a round.

    Args:
        milestone: The number of the round (int), or a fraction of all rounds (float). A fraction
            gives the round ``floor(milestone * total_rounds)``, up to rounding errors.
        total_rounds: Number of planned rounds.
    """
    return milestone if isinstance(milestone, int) else int(milestone * total_rounds + 1e-9)


def check_milestone(setting: str, milestone: int | float, *, ends: bool = False) -> None:
    """Check that a milestone lies within a run.

    Args:
        setting: Name of the setting, such as ``"FixBN.freeze_round"``.
        milestone: A round (int) or a fraction of all rounds (float), see :func:`round_at`.
        ends: Whether the start of the run (round 0 or fraction 0) and the end (fraction 1) are
            allowed.

    Raises:
        ConfigurationError: The milestone is out of range.
    """
    first, fractions = (0, "[0, 1]") if ends else (1, "(0, 1)")
    if isinstance(milestone, int):
        is_valid = milestone >= first
    else:
        is_valid = 0 <= milestone <= 1 if ends else 0 < milestone < 1
    if not is_valid:
        raise ConfigurationError(
            f"{setting}: {milestone} must be a round >= {first}, or a fraction in {fractions}"
        )
