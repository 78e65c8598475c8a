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


def in_run(milestone: int | float, *, ends: bool = False) -> bool:
    """Return whether a milestone lies within a run.

    Args:
        milestone: A round (int) or a fraction of all rounds (float), see :func:`round_at`.
        ends: Whether the start of the run (round 0 or fraction 0) and the end (fraction 1) are
            allowed.
    """
    if isinstance(milestone, int):
        return milestone >= (0 if ends else 1)
    return 0 <= milestone <= 1 if ends else 0 < milestone < 1


def one_milestone(
    owner: str, name: str, round_number: int | None, fraction: float | None, default: float
) -> int | float:
    """Combine the settings ``<name>_round`` and ``<name>_fraction`` into one milestone.

    Args:
        owner: Name of the class that has the settings, for messages.
        name: Prefix of both settings, such as ``"freeze"``.
        round_number: Value of ``<name>_round``: a round, at least 0, or None.
        fraction: Value of ``<name>_fraction``: a fraction of all rounds in [0, 1], or None.
        default: Fraction that is used if both settings are None.

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
