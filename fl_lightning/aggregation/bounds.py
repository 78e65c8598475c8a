"""How many Byzantine clients a rule may be told to withstand."""

from fl_lightning.errors import ConfigurationError


def check_count(setting: str, f: int) -> None:
    """Refuse what is no number of clients.

    Args:
        setting: Name of the setting, such as ``"TrimmedMean.f"``.
        f: The number found.

    Raises:
        ConfigurationError: It is not a whole number of at least 0.
    """
    if isinstance(f, bool) or not isinstance(f, int) or f < 0:
        raise ConfigurationError(f"{setting}: {f!r} must be a whole number of at least 0")


def check_minority(setting: str, f: int, num_clients: int) -> None:
    """Refuse a number of Byzantine clients that is not a minority of the clients.

    Args:
        setting: Name of the setting, such as ``"TrimmedMean.f"``.
        f: The number found.
        num_clients: Clients in a round.

    Raises:
        ConfigurationError: f is not a whole number from 0, or at least half of the clients.
    """
    check_count(setting, f)
    if 2 * f >= num_clients:
        most = max((num_clients - 1) // 2, 0)
        raise ConfigurationError(
            f"{setting}: {f} must be less than half of a round's {num_clients} clients; use at most {most}, or at least "
            f"{2 * f + 1} clients in a round"
        )
