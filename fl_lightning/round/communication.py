"""Network traffic of a round: bytes, and exchanges with the server."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fl_lightning.batch_norm.kinds import JOINT_LABELS
from fl_lightning.cohort.cohort import Cohort

Key = TypeVar("Key")

UpDown = tuple[int, int]
"""Pair (upload, download): the number of bytes or floats that a client sends and receives."""


@dataclass
class Communication:
    """Bytes that clients send and receive in one round.

    Attributes:
        clients: The round's cohort.
        local_steps: Number of local steps of each client of the cohort.
        exchanges: Number of times that all clients wait for the server. The averaged state needs
            one exchange, and methods may need more.
        sent: Bytes that each client sends and receives. The outer keys are names of kinds of state
            and of methods, the inner keys are client ids. The clients need not be in the cohort.
    """

    clients: Sequence[int] = ()
    local_steps: Sequence[int] = ()
    exchanges: int = 0
    sent: dict[str, dict[int, UpDown]] = field(default_factory=dict)

    def count(self, kind: str, traffic: Mapping[int, UpDown], size: int = 1) -> None:
        """Add the traffic of clients, in units of ``size`` bytes."""
        for client, (up, down) in traffic.items():
            add(self.sent.setdefault(kind, {}), client, (size * up, size * down))

    def by_kind(self) -> dict[str, UpDown]:
        """Return the bytes of all clients by name of a kind of state or method."""
        return {kind: total(clients.values()) for kind, clients in self.sent.items()}

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
        totals = dict.fromkeys(self.clients, (0, 0))
        for clients in self.sent.values():
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


def round_communication(
    cohort: Cohort,
    callbacks: Iterable[Any],
    holding: Callable[[str], Collection[int]] = lambda _: (),
) -> Communication:
    """Return the traffic of a round: the model's state, and additional traffic of methods.

    Averaged and pooled state is sent in both directions. Local state and counters are not sent.
    Frozen and discarded state is sent to a client if its value is new to the client. Frozen state is
    sent in the client's first round after the freeze. Discarded state is sent in the client's first
    round, and after each change at the server.

    Args:
        cohort: The round's clients, after their local steps.
        callbacks: The run's methods, which declare additional traffic.
        holding: Function that takes a version of a block (``Cohort.versions``) and returns the
            clients that already have this version. Default: no clients.
    """
    communication = Communication(cohort.client_ids, cohort.local_steps, exchanges=1)
    for rows in (cohort.params, cohort.buffers):
        for name, block in rows.blocks.items():
            if not block.is_floating_point():
                continue
            label, sent = JOINT_LABELS.get(rows.layout[name].kind, ""), block.shape[1] * block.element_size()
            if cohort.treatment(name) in ("averaged", "pooled"):
                communication.count(label, dict.fromkeys(cohort.client_ids, (sent, sent)))
            elif name in cohort.versions:
                receivers = set(cohort.client_ids) - set(holding(cohort.versions[name]))
                communication.count(label, dict.fromkeys(receivers, (0, sent)))
    size = next(iter(cohort.params.blocks.values())).element_size()
    for callback in callbacks:
        method, payload = type(callback).__name__, callback.extra_payload(cohort)
        if any(payload):
            communication.count(method, dict.fromkeys(cohort.client_ids, payload), size)
        communication.count(method, callback.extra_traffic(cohort), size)
        communication.exchanges += callback.extra_exchanges(cohort)
    return communication
