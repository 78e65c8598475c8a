"""Milestones: rounds, given as a number or as a fraction of the run."""

from fl_lightning.errors import ConfigurationError


def round_at(milestone: int | float, total_rounds: int) -> int:
    """Return the last round before a milestone.

    Args:
        milestone: The round itself (int), or a fraction of all rounds (float):
            ``floor(milestone * total_rounds)``, with a tolerance for rounding.
        total_rounds: Number of planned rounds.
    """
    return milestone if isinstance(milestone, int) else int(milestone * total_rounds + 1e-9)


def in_run(milestone: int | float, *, ends: bool = False) -> bool:
    """Return whether a milestone (see :func:`round_at`) is within a run.

    Args:
        milestone: A round (int) or a fraction of all rounds (float).
        ends: Whether the start (round 0, fraction 0) and the end (fraction 1) are within the run.
    """
    if isinstance(milestone, int):
        return milestone >= (0 if ends else 1)
    return 0 <= milestone <= 1 if ends else 0 < milestone < 1


def one_milestone(
    owner: str, name: str, round_number: int | None, fraction: float | None, default: float
) -> int | float:
    """Return the milestone that a setting ``<name>_round`` or ``<name>_fraction`` gives.

    Args:
        owner: Name of the class, for messages.
        name: Prefix of both settings, such as ``"freeze"``.
        round_number: A round >= 0, or None.
        fraction: A fraction of all rounds in [0, 1], or None.
        default: The fraction if both settings are None.

    Raises:
        ConfigurationError: Both settings are given, or a value is out of range.
    """
    setting = f"{owner}.{name}"
    if round_number is not None and fraction is not None:
        raise ConfigurationError(
            f"{setting}_round: {round_number} and {setting}_fraction: {fraction} are both set; set one of them to null"
        )
    if fraction is None:
        name, moment = "round", default if round_number is None else round_number
    else:
        name, moment = "fraction", float(fraction)
    if not in_run(moment, ends=True):
        raise ConfigurationError(f"{setting}_{name}: {moment} must be a round >= 0, or a fraction in [0, 1]")
    return moment
