"""Choice of the clients that never train."""

from collections.abc import Sequence

from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.randomness import permutation

HeldOut = int | float | Sequence[str | int]
"""Clients that never train: their number, their fraction in [0, 1), or their names."""


def clients_in_order(held_out: HeldOut, names: Sequence[str], count: int, seed: int) -> tuple[list[int], int]:
    """Choose the clients that never train.

    Args:
        held_out: The setting. A number or fraction is drawn at random, and depends on the seed.
        names: Names of all clients; empty if they have no names.
        count: Number of all clients.
        seed: Seed of the data.

    Returns:
        The numbers of all clients, those that never train last, and the number of the latter.

    Raises:
        ConfigurationError: A name is unknown, or no client would train.
    """
    if isinstance(held_out, int | float):
        number = held_out if isinstance(held_out, int) else round(held_out * count) if held_out < 1 else -1
        if held_out and not 0 < number < count:
            raise ConfigurationError(
                f"held_out={held_out} of {count} clients is no client or leaves none to train; use a number from 1 to {count - 1}, a "
                "fraction below 1, or names"
            )
        chosen = set(permutation(count, seed, "held-out clients")[:number].tolist())
    else:
        asked = [*map(str, held_out)]  # in YAML, a name such as 10 is a number
        for name in asked:
            if name not in names:
                known = (
                    f"{nearest(name, names)}; names are {', '.join(names)}"
                    if names
                    else ", as the clients have no names"
                )
                raise ConfigurationError(f"held_out: there is no client {name!r}{known}")
        chosen = {client for client, name in enumerate(names) if name in asked}
        if len(chosen) == count:
            raise ConfigurationError(f"held_out names all {count} clients; leave some to train")
    return sorted(range(count), key=lambda client: (client in chosen, client)), len(chosen)
