"""Failures of honest clients: dropouts and stragglers."""

from collections.abc import Callable, Mapping
from typing import Any

from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import derive_seed
from fl_lightning.recorded import Recorded


class ClientFailures(Recorded):
    """Dropouts and stragglers among the clients of each round.

    Failures depend only on seed, round and client. A client that drops out takes no local steps and
    exchanges no data. The aggregation weights of all other clients sum to 1. A dropout does not
    change state that a method has stored for the client.

    Args:
        dropout: Probability in [0, 1] that a sampled client drops out. A number applies to all
            clients. A mapping has probabilities by client id, and missing ids have probability 0.
        schedule: Absences by client id, as pairs ``[first round, last round]``. Rounds count from
            1, and the last round is included.
        stragglers: Probability in [0, 1] that a client takes fewer local steps in a round, as a
            number or a mapping. The number of steps is drawn uniformly from 1 to the client's full
            number (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", 5.2).

    Raises:
        ConfigurationError: A probability is out of range, an absence is not a pair of rounds, or a
            client id is not a number.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> failures = ClientFailures(schedule={0: [[1, 2]]})  # client 0 is absent in rounds 1 and 2
        >>> state = train(small_cnn(), blobs(), rounds=2, failures=failures)
    """

    def __init__(
        self,
        # keys of type Any: with int, jsonargparse would convert the key 1.5 to 1
        dropout: float | dict[Any, float] = 0.0,
        schedule: dict[Any, list[list[int]]] | None = None,
        stragglers: float | dict[Any, float] = 0.0,
    ) -> None:
        probability = "a probability in [0, 1]"
        self.dropout = _by_client("dropout", dropout, _is_probability, probability)
        self.stragglers = _by_client("stragglers", stragglers, _is_probability, probability)
        absences = "[first round, last round] by client id, such as {7: [[3, 5]]}"
        if not isinstance(schedule, Mapping | None):
            raise ConfigurationError(f"ClientFailures.schedule: {schedule} must be {absences}")
        self.schedule = schedule and _by_client("schedule", schedule, _are_absences, absences)

    def check(self, num_clients: int) -> None:
        """Check the client ids in the settings.

        Raises:
            ConfigurationError: A setting names a client that does not exist.
        """
        for setting in ("dropout", "schedule", "stragglers"):
            given = getattr(self, setting)
            for client in given if isinstance(given, Mapping) else ():
                if not 0 <= client < num_clients:
                    raise ConfigurationError(
                        f"ClientFailures.{setting}: there is no client {client}; there are clients 0 to {num_clients - 1}"
                    )

    def reports(self, client_id: int, seed: int, round_number: int) -> bool:
        """Return whether a sampled client takes part in a round, that is, does not drop out."""
        absences = (self.schedule or {}).get(client_id, [])
        if any(first <= round_number <= last for first, last in absences):
            return False
        return not _happens(self.dropout, client_id, seed, "dropped out", round_number)

    def steps(self, full: int, client_id: int, seed: int, round_number: int) -> int:
        """Return a client's number of local steps in a round, at most ``full``."""
        if not _happens(self.stragglers, client_id, seed, "straggler", round_number):
            return full
        return 1 + derive_seed(seed, "steps of a straggler", round_number, client_id) % full


def _by_client(setting: str, given: Any, is_valid: Callable[[Any], bool], words: str) -> Any:
    """Check a setting of all clients or by client, and convert clients' ids, which may be strings."""
    by_client = given if isinstance(given, Mapping) else {}
    for client in by_client:
        if type(client) is not int and not str(client).isdecimal():
            raise ConfigurationError(
                f"ClientFailures.{setting}: {client!r} must be a client's number, such as 7"
            )
    for value in by_client.values() if isinstance(given, Mapping) else [given]:
        if not is_valid(value):
            raise ConfigurationError(f"ClientFailures.{setting}: {value} must be {words}")
    return {int(client): value for client, value in given.items()} if isinstance(given, Mapping) else given


def _is_probability(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _are_absences(value: Any) -> bool:
    try:
        return all(type(x) is int for pair in value for x in pair) and all(1 <= x <= y for x, y in value)
    except (TypeError, ValueError):
        return False


def _happens(
    probability: float | Mapping[int, float], client_id: int, seed: int, what: str, round_number: int
) -> bool:
    share = probability.get(client_id, 0.0) if isinstance(probability, Mapping) else probability
    return derive_seed(seed, what, round_number, client_id) < share * 2**63
