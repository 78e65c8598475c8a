"""What goes over the network in a round: bytes of each kind of state, and how often clients wait for the server."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Key = TypeVar("Key")

UpDown = tuple[int, int]
"""Bytes (or floats) that a client sends and receives: (upload, download)."""


@dataclass(frozen=True)
class Communication:
    """What the clients of one round send and receive.

    Attributes:
        clients: The round's cohort.
        local_steps: Local steps of each of its clients.
        each: Bytes of every client of the cohort, by kind: of state, or the method that sends them on top.
        beside: Bytes that single clients, in the cohort or not, send or receive beside the round, by method (or kind of
            frozen state) and client.
        exchanges: How often the round waits for an answer of the server: 1 for the averaged state, and what methods add.
    """

    clients: Sequence[int] = ()
    local_steps: Sequence[int] = ()
    each: Mapping[str, UpDown] = field(default_factory=dict)
    beside: Mapping[str, Mapping[int, UpDown]] = field(default_factory=dict)
    exchanges: int = 0

    def by_kind(self) -> dict[str, UpDown]:
        """Bytes of all clients together, by kind."""
        found: dict[str, UpDown] = {}
        for kind, (up, down) in self.each.items():
            add(found, kind, (up * len(self.clients), down * len(self.clients)))
        for kind, clients in self.beside.items():
            for pair in clients.values():
                add(found, kind, pair)
        return found

    def metrics(self) -> dict[str, float]:
        """Bytes of all clients together and exchanges, by the name of their metric."""
        upload, download = total(self.by_kind().values())
        return {
            "comm/upload_bytes": float(upload),
            "comm/download_bytes": float(download),
            "comm/exchanges": float(self.exchanges),
        }

    def by_client(self) -> dict[int, UpDown]:
        """Bytes of each client, the cohort's first."""
        own = total(self.each.values())
        found = dict.fromkeys(self.clients, own)
        for clients in self.beside.values():
            for client, pair in clients.items():
                add(found, client, pair)
        return found


def add(totals: dict[Key, UpDown], key: Key, pair: UpDown) -> None:
    """Add uploads and downloads to a total."""
    up, down = totals.get(key, (0, 0))
    totals[key] = up + pair[0], down + pair[1]


def total(pairs: Iterable[UpDown]) -> UpDown:
    """The sum of uploads and that of downloads."""
    found = list(pairs)
    return sum(up for up, _ in found), sum(down for _, down in found)
