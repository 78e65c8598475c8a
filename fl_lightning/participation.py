"""Which clients take part in a communication round."""

from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import permutation


def check_participation(participation: int | float) -> None:
    """Refuse a participation that no federation could satisfy.

    Raises:
        ConfigurationError: A number below 1 or a fraction outside (0, 1].
    """
    valid = participation >= 1 if isinstance(participation, int) else 0 < participation <= 1
    if not valid:
        raise ConfigurationError(
            f"participation: {participation} must be a fraction in (0, 1] (0.1, 1.0) or a number of clients (1, 2, ...)"
        )


def cohort_size(num_clients: int, participation: int | float) -> int:
    """Number of clients in a round's cohort.

    Args:
        num_clients: Number of clients of the federation.
        participation: A number of clients (int), or a fraction of them in (0, 1] (float): rounded, at least 1.

    Raises:
        ConfigurationError: The number or fraction is out of range.
    """
    check_participation(participation)
    if isinstance(participation, float):
        return max(1, round(participation * num_clients))
    if participation > num_clients:
        raise ConfigurationError(
            f"participation: {participation} clients a round, but there are only {num_clients}; use at most that many or a "
            "fraction such as 0.1"
        )
    return participation


def sample_cohort(num_clients: int, size: int, seed: int, round_number: int) -> list[int]:
    """The cohort of a round: ``size`` clients drawn uniformly without replacement, in increasing order of their ids.

    A function of (seed, round) alone.
    """
    if size == num_clients:
        return list(range(num_clients))
    return sorted(permutation(num_clients, seed, "participation", round_number)[:size].tolist())
