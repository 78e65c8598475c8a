"""What a run sends, by client and kind of state, and what it costs to wait for the server."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L

from fl_lightning import FederatedCallback
from fl_lightning.callbacks.observers.network_link import NetworkLink
from fl_lightning.console import format_bytes, in_words
from fl_lightning.methods import Drawing, Report, Rows, Table
from fl_lightning.pictures import communication_figure, has_communication
from fl_lightning.round import UpDown, add, total

if TYPE_CHECKING:
    from fl_lightning import FederatedModule


class CommunicationLedger(Report, FederatedCallback):
    """Keep the books of a run's communication, with any method: it only looks, and training is the same bit for bit.

    What counts is what the method sends under the policy of the round, and what it declares on top: momentum, control
    variates, statistics inside a forward pass. How often clients wait for the server counts by itself, because bytes are not
    what FedTAN's 3L + 1 exchanges a round cost, but time: a round takes as long as its slowest client, and a client as its
    link says. Left out are diagnostics, the models that personal evaluation would need, the one time that every client gets
    statistics which freeze, and what clients compute, unless the link knows the time of a local step. A centralised run sends
    nothing.

    Each round logs ``comm/simulated_s`` and totals since the first round that was booked: ``comm/total_upload_bytes``, ``comm/total_download_bytes``,
    ``comm/total_bytes_per_client`` (both ways, mean over all clients), ``comm/total_exchanges`` and
    ``comm/total_simulated_s``. At the end there are ``communication.png`` (accuracy against bytes, exchanges and time),
    ``communication.csv`` (by client; ``seconds`` is its own time, without waiting for others) and
    ``communication_by_kind.csv``.

    Args:
        link: Bandwidth, latency and speed of a client, such as ``{upload_mbps: 100, download_mbps: 100, latency_ms: 20}``.
            Default: a phone's, see :class:`~fl_lightning.callbacks.observers.network_link.NetworkLink`.

    Attributes:
        clients: Rounds, bytes up, bytes down, exchanges and seconds of each client so far, by its id.
        kinds: Bytes up and down of all clients together, by kind.
        exchanges: Exchanges of all rounds.
        seconds: Simulated time of all rounds.
        links: From which round on which link was assumed: one, unless a run was resumed with another.
    """

    paper = "(an observer: measurement only)"
    role = "observer"
    claims = ("weights_of_fedavg", "one_client_is_plain_training")

    def __init__(self, link: NetworkLink | None = None) -> None:
        self.link = link
        self._link = link or NetworkLink()
        self.clients: dict[int, tuple[int, int, int, int, float]]
        self.kinds: dict[str, UpDown]
        self.exchanges: int
        self.seconds: float
        self.links: list[tuple[int, str]]
        self._begin()

    # not on_round_end: other methods' are not all over by then, and torch's generator stays as it was
    def on_train_batch_end(  # type: ignore[override]  # rounds have one
        self, trainer: L.Trainer, pl_module: "FederatedModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Book the round."""
        if pl_module.round == 1:
            self._begin()  # also of a second fit
        if not self.links or self.links[-1][1] != str(self._link):
            self.links.append((pl_module.round, str(self._link)))
        traffic = pl_module.communication
        steps = dict(zip(traffic.clients, traffic.local_steps, strict=True))
        slowest = 0.0
        for client, (up, down) in traffic.by_client().items():
            takes_part = client in steps
            exchanges = traffic.exchanges if takes_part else 1
            own = self._link.seconds(up, down, exchanges, steps.get(client, 0))
            before = self.clients.get(client, (0, 0, 0, 0, 0.0))
            now = (int(takes_part), up, down, exchanges, own)
            self.clients[client] = tuple(map(sum, zip(before, now, strict=True)))  # type: ignore[assignment]  # five
            slowest = max(slowest, own)
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

    def figures(self, rows: Rows) -> Mapping[str, Drawing]:
        """``communication``: what accuracy costs."""
        if not has_communication(rows):
            return {}
        return {"communication": lambda title: communication_figure({"": rows}, self._in_words(), title)}

    def tables(self) -> Mapping[str, Table]:
        """``communication`` by client and ``communication_by_kind``."""
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
        """Bytes of a client in a round it takes part in, exchanges, and simulated time."""
        up, down = self._per_round()
        return {
            "upload_bytes_per_client_round": up,
            "download_bytes_per_client_round": down,
            "exchanges": self.exchanges,
            "simulated_seconds": self.seconds,
        }

    def result_lines(self) -> Mapping[str, str]:
        """The same in words."""
        up, down = self._per_round()
        first = self.links[0][0] if self.links else 1
        since = f" (from round {first} on)" if first > 1 else ""
        return {
            "a client's round": f"{format_bytes(up)} up, {format_bytes(down)} down (mean)",
            "exchanges": f"{self.exchanges:,}, one after the other{since}",
            "simulated time": f"{in_words(self.seconds)} ({self._in_words()})",
        }

    def state_dict(self) -> dict[str, Any]:
        """The books."""
        names = ("clients", "kinds", "exchanges", "seconds", "links")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the books of a checkpoint."""
        for name, value in state_dict.items():
            setattr(self, name, value)

    def _begin(self) -> None:
        self.clients, self.kinds, self.exchanges, self.seconds, self.links = {}, {}, 0, 0.0, []

    def _in_words(self) -> str:
        """The link, with the rounds from which one was assumed where that is not the whole run."""
        if not self.links or (len(self.links) == 1 and self.links[0][0] == 1):
            return str(self._link)
        return "; ".join(f"from round {first} on {link}" for first, link in self.links)

    def _per_round(self) -> tuple[float, float]:
        rounds = max(1, sum(numbers[0] for numbers in self.clients.values()))
        upload, download = total(self.kinds.values())
        return upload / rounds, download / rounds
