"""What goes over the network in a round: bytes of each kind of state, and how often clients wait for the server."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fl_lightning.batch_norm.kinds import JOINT_LABELS
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.round.declarations import Declarations

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


def round_communication(
    cohort: Cohort, callbacks: Sequence[Declarations], holders: Collection[int] = ()
) -> Communication:
    """What a round sends under its policy, and what its callbacks declare on top.

    What is averaged or pooled goes both ways. What clients keep or the server resets is not sent, nor are counters. What is
    frozen every client receives once, in its first round after the freeze.

    Args:
        cohort: The round's clients, after their local steps.
        callbacks: The run's federated callbacks.
        holders: The clients that hold the frozen state already.
    """
    each: dict[str, UpDown] = {}
    beside: dict[str, dict[int, UpDown]] = {}
    newcomers = set(cohort.client_ids) - set(holders)
    for rows in (cohort.params, cohort.buffers):
        for name, block in rows.blocks.items():
            if not block.is_floating_point():
                continue
            label, sent = JOINT_LABELS.get(rows.layout[name].kind, ""), block.shape[1] * block.element_size()
            if cohort.treatment(name) in ("averaged", "pooled"):
                add(each, label, (sent, sent))
            elif cohort.treatment(name) == "frozen":
                for client in newcomers:
                    add(beside.setdefault(label, {}), client, (0, sent))
    size = next(iter(cohort.params.blocks.values())).element_size()
    exchanges = 1
    for callback in callbacks:
        method, (up, down) = type(callback).__name__, callback.extra_payload(cohort)
        if up or down:
            add(each, method, (size * up, size * down))
        for client, (up, down) in callback.extra_traffic(cohort).items():
            add(beside.setdefault(method, {}), client, (size * up, size * down))
        exchanges += callback.extra_exchanges(cohort)
    return Communication(cohort.client_ids, cohort.local_steps, each, beside, exchanges)


def skipped_communication(
    module: Any, told: Mapping[str, tuple[Mapping[int, tuple[int, int]], int]]
) -> Communication:
    """Count what clients send in a round that is skipped.

    Args:
        module: The federated module.
        told: What the callbacks' ``on_round_skipped`` have returned, by method.
    """
    size = next(p for p in module.model.parameters() if p.requires_grad).element_size()
    beside = {
        method: {client: (size * up, size * down) for client, (up, down) in traffic.items()}
        for method, (traffic, _) in told.items()
        if traffic
    }
    return Communication(beside=beside, exchanges=sum(exchanges for _, exchanges in told.values()))


def add(totals: dict[Key, UpDown], key: Key, pair: UpDown) -> None:
    """Add uploads and downloads to a total."""
    up, down = totals.get(key, (0, 0))
    totals[key] = up + pair[0], down + pair[1]


def total(pairs: Iterable[UpDown]) -> UpDown:
    """The sum of uploads and that of downloads."""
    found = list(pairs)
    return sum(up for up, _ in found), sum(down for _, down in found)
