"""Which clients take part in a communication round."""

from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import permutation


def cohort_size(num_clients: int, participation: int | float) -> int:
    """Number of clients in a round's cohort.

    Args:
        num_clients: Number of clients of the federation.
        participation: A number of clients (int), or a fraction of them in (0, 1] (float): rounded, at least 1.

    Raises:
        ConfigurationError: The number or fraction is out of range.
    """
    if isinstance(participation, int):
        if not 1 <= participation <= num_clients:
            raise ConfigurationError(
                f"participation: {participation} asks for that many clients a round, but there are {num_clients}; use "
                f"a number in 1..{num_clients} or a fraction such as 0.1 (1.0 for all)"
            )
        return participation
    if not 0 < participation <= 1:
        raise ConfigurationError(f"participation: {participation} is a fraction and must lie in (0, 1]")
    return max(1, round(participation * num_clients))


def sample_cohort(num_clients: int, size: int, seed: int, round_number: int) -> list[int]:
    """The cohort of a round: ``size`` clients drawn uniformly without replacement, in increasing order of their ids.

    A function of (seed, round) alone.
    """
    if size == num_clients:
        return list(range(num_clients))
    return sorted(permutation(num_clients, seed, "participation", round_number)[:size].tolist())
