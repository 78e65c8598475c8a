"""Measurement of a run's communication, in bytes and time."""

from collections.abc import Mapping
from typing import Any

import lightning as L

from fl_lightning import FederatedModule
from fl_lightning.callbacks.observers.network_link import NetworkLink
from fl_lightning.console import format_bytes, time_in_words
from fl_lightning.methods import Drawing, MetricRows, Observer, Report, Table
from fl_lightning.pictures import communication_figure, has_communication
from fl_lightning.round import UpDown, add, total


class CommunicationLedger(Report, Observer):
    """Observer of communication: bytes, exchanges, and their time over a network link.

    The ledger counts the bytes that clients and server send in each round. This includes the
    payload of methods, such as momentum, control variates and statistics inside a forward pass. The
    ledger also counts exchanges, in which the clients wait for the server. A FedTAN round with L BN
    layers, for example, has 3L + 1 exchanges. Exchanges cost mainly time, not bytes. Every client
    receives frozen statistics only once, and this download counts.

    The ledger also computes a simulated time for each round from the setting ``link``. A round
    takes as long as its slowest client. A centralised run sends no bytes. The ledger ignores:

    - Traffic of observers.
    - Models that clients would need for a personal evaluation.
    - Time for computation, unless ``link`` has a time per local step.

    Each round logs the simulated time ``comm/simulated_s`` and these totals over all counted
    rounds:

    - ``comm/total_upload_bytes`` and ``comm/total_download_bytes``.
    - ``comm/total_bytes_per_client``: Mean number of bytes of a client in both directions.
    - ``comm/total_exchanges``.
    - ``comm/total_simulated_s``.

    At the end of the run the ledger writes three files:

    - ``communication.png``: Accuracy against the cost of communication.
    - ``communication.csv``: One row per client. The column ``seconds`` excludes the time in which
      the client waits for other clients.
    - ``communication_by_kind.csv``: One row per kind of state.

    Args:
        link: Network link and speed of a client, such as
            ``{upload_mbps: 100, download_mbps: 100}``. Default: a phone, see
            :class:`~fl_lightning.callbacks.observers.network_link.NetworkLink`.

    Attributes:
        clients: Rounds, bytes up, bytes down, exchanges and seconds of each client, by client id.
        kinds: Bytes up and bytes down of all clients together, by kind of state.
        exchanges: Number of exchanges in all rounds.
        seconds: Simulated time of all rounds, in seconds.
        links: First round and description of each link. A run that is resumed with another link has
            several links.
    """

    saved = ("clients", "kinds", "exchanges", "seconds", "links")

    def __init__(self, link: NetworkLink | None = None) -> None:
        self.link = link
        self._link = link or NetworkLink()
        self._begin()

    # not on_round_end, because the on_round_end of other callbacks may run later
    def on_train_batch_end(  # type: ignore[override]  # narrows pl_module
        self, trainer: L.Trainer, pl_module: FederatedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the traffic and the simulated time of the round."""
        if pl_module.round == 1:
            self._begin()  # a second fit counts from 0
        if not self.links or self.links[-1][1] != str(self._link):
            self.links.append((pl_module.round, str(self._link)))
        traffic = pl_module.communication
        steps = dict(zip(traffic.clients, traffic.local_steps, strict=True))
        slowest = 0.0
        for client, (up, down) in traffic.by_client().items():
            takes_part = client in steps
            exchanges = traffic.exchanges if takes_part else 1
            seconds = self._link.seconds(up, down, exchanges, steps.get(client, 0))
            before = self.clients.get(client, (0, 0, 0, 0, 0.0))
            now = (int(takes_part), up, down, exchanges, seconds)
            self.clients[client] = tuple(map(sum, zip(before, now, strict=True)))  # type: ignore[assignment]  # a tuple of five
            slowest = max(slowest, seconds)
        for kind, pair in traffic.by_kind().items():
            add(self.kinds, kind, pair)
        self.exchanges += traffic.exchanges
        self.seconds += slowest
        upload, download = total(self.kinds.values())
        pl_module.log_numbers(
            {
                "comm/simulated_s": slowest,
                "comm/total_upload_bytes": float(upload),
                "comm/total_download_bytes": float(download),
                "comm/total_bytes_per_client": (upload + download) / pl_module.data.num_clients,
                "comm/total_exchanges": float(self.exchanges),
                "comm/total_simulated_s": self.seconds,
            }
        )

    def figures(self, rows: MetricRows) -> Mapping[str, Drawing]:
        """Return the figure ``communication``: accuracy against the cost of communication."""
        if not has_communication(rows):
            return {}
        return {"communication": lambda title: communication_figure({"": rows}, self._in_words(), title)}

    def tables(self) -> Mapping[str, Table]:
        """Return the tables ``communication`` (by client) and ``communication_by_kind``."""
        clients: list[list[float | str]] = [
            [client, *numbers] for client, numbers in sorted(self.clients.items())
        ]
        kinds: list[list[float | str]] = [[kind, *pair] for kind, pair in self.kinds.items()]
        sent = ["upload_bytes", "download_bytes"]
        return {
            "communication": Table(["client", "rounds", *sent, "exchanges", "seconds"], clients),
            "communication_by_kind": Table(["kind", *sent], kinds),
        }

    def result(self) -> Mapping[str, float]:
        """Return the mean bytes per client and round, the exchanges and the simulated time."""
        up, down = self._per_round()
        return {
            "upload_bytes_per_client_round": up,
            "download_bytes_per_client_round": down,
            "exchanges": self.exchanges,
            "simulated_seconds": self.seconds,
        }

    def result_lines(self) -> Mapping[str, str]:
        """Return the numbers of :meth:`result` as text with units."""
        up, down = self._per_round()
        first = self.links[0][0] if self.links else 1
        since = f" (from round {first} on)" if first > 1 else ""
        return {
            "a client's round": f"{format_bytes(up)} up, {format_bytes(down)} down (mean)",
            "exchanges": f"{self.exchanges:,}, one after the other{since}",
            "simulated time": f"{time_in_words(self.seconds)} ({self._in_words()})",
        }

    def _begin(self) -> None:
        self.clients: dict[int, tuple[int, int, int, int, float]] = {}
        self.kinds: dict[str, UpDown] = {}
        self.exchanges, self.seconds = 0, 0.0
        self.links: list[tuple[int, str]] = []

    def _in_words(self) -> str:
        """Return the link in words.

        If the link has changed, or was set after round 1, the text names the first round of each
        link.
        """
        if not self.links or (len(self.links) == 1 and self.links[0][0] == 1):
            return str(self._link)
        return "; ".join(f"from round {first} on {link}" for first, link in self.links)

    def _per_round(self) -> tuple[float, float]:
        rounds = max(1, sum(numbers[0] for numbers in self.clients.values()))
        upload, download = total(self.kinds.values())
        return upload / rounds, download / rounds
