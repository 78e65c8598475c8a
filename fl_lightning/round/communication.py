"""The network traffic of a round: bytes of each kind of state, and synchronous exchanges."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Key = TypeVar("Key")

UpDown = tuple[int, int]
"""Bytes (or floats) that a client sends and receives: (upload, download)."""


@dataclass(frozen=True)
class Communication:
    """The bytes that the clients of one round send and receive.

    Attributes:
        clients: The round's cohort.
        local_steps: Local steps of each client of the cohort.
        each: Bytes that every client of the cohort sends and receives, by kind of state or method.
        beside: Further bytes of single clients, in the cohort or not, by method or kind and client.
        exchanges: Synchronous exchanges: 1 for the averaged state plus the methods' exchanges.
    """

    clients: Sequence[int] = ()
    local_steps: Sequence[int] = ()
    each: Mapping[str, UpDown] = field(default_factory=dict)
    beside: Mapping[str, Mapping[int, UpDown]] = field(default_factory=dict)
    exchanges: int = 0

    def by_kind(self) -> dict[str, UpDown]:
        """Return the total bytes of all clients, by kind."""
        totals: dict[str, UpDown] = {}
        for kind, (up, down) in self.each.items():
            add(totals, kind, (up * len(self.clients), down * len(self.clients)))
        for kind, clients in self.beside.items():
            for pair in clients.values():
                add(totals, kind, pair)
        return totals

    def metrics(self) -> dict[str, float]:
        """Return the total bytes of all clients, and the number of exchanges, by metric."""
        upload, download = total(self.by_kind().values())
        return {
            "comm/upload_bytes": float(upload),
            "comm/download_bytes": float(download),
            "comm/exchanges": float(self.exchanges),
        }

    def by_client(self) -> dict[int, UpDown]:
        """Return the bytes of each client, the cohort's clients first."""
        totals = dict.fromkeys(self.clients, total(self.each.values()))
        for clients in self.beside.values():
            for client, pair in clients.items():
                add(totals, client, pair)
        return totals


def add(totals: dict[Key, UpDown], key: Key, pair: UpDown) -> None:
    """Add uploads and downloads to a total."""
    up, down = totals.get(key, (0, 0))
    totals[key] = up + pair[0], down + pair[1]


def total(pairs: Iterable[UpDown]) -> UpDown:
    """Return the sum of uploads and the sum of downloads."""
    listed = list(pairs)
    return sum(up for up, _ in listed), sum(down for _, down in listed)
