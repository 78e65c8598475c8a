"""Network traffic of a round: bytes, and exchanges with the server."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Key = TypeVar("Key")

UpDown = tuple[int, int]
"""Pair (upload, download): the number of bytes or floats that a client sends and receives."""


@dataclass(frozen=True)
class Communication:
    """Bytes that clients send and receive in one round.

    Attributes:
        clients: The round's cohort.
        local_steps: Number of local steps of each client of the cohort.
        each: Bytes that every client of the cohort sends and receives. The keys are names of kinds
            of state and of methods.
        beside: Additional bytes of single clients. The outer keys are names of kinds of state and
            of methods, the inner keys are client ids. The clients need not be in the cohort.
        exchanges: Number of times that all clients wait for the server. The averaged state needs
            one exchange, and methods may need more.
    """

    clients: Sequence[int] = ()
    local_steps: Sequence[int] = ()
    each: Mapping[str, UpDown] = field(default_factory=dict)
    beside: Mapping[str, Mapping[int, UpDown]] = field(default_factory=dict)
    exchanges: int = 0

    def by_kind(self) -> dict[str, UpDown]:
        """Return the total bytes of all clients for each kind of state and each method."""
        totals: dict[str, UpDown] = {}
        for kind, (up, down) in self.each.items():
            add(totals, kind, (up * len(self.clients), down * len(self.clients)))
        for kind, clients in self.beside.items():
            for pair in clients.values():
                add(totals, kind, pair)
        return totals

    def metrics(self) -> dict[str, float]:
        """Return the total bytes and the number of exchanges by metric name."""
        upload, download = total(self.by_kind().values())
        return {
            "comm/upload_bytes": float(upload),
            "comm/download_bytes": float(download),
            "comm/exchanges": float(self.exchanges),
        }

    def by_client(self) -> dict[int, UpDown]:
        """Return the bytes that each client sends and receives.

        The clients of the cohort come first.
        """
        totals = dict.fromkeys(self.clients, total(self.each.values()))
        for clients in self.beside.values():
            for client, pair in clients.items():
                add(totals, client, pair)
        return totals


def add(totals: dict[Key, UpDown], key: Key, pair: UpDown) -> None:
    """Add an upload and a download to the totals under a key."""
    up, down = totals.get(key, (0, 0))
    totals[key] = up + pair[0], down + pair[1]


def total(pairs: Iterable[UpDown]) -> UpDown:
    """Return the total upload and the total download."""
    listed = list(pairs)
    return sum(up for up, _ in listed), sum(down for _, down in listed)
