"""Simple model of a client's network link, from which the duration of a round follows."""

import math
from dataclasses import dataclass, fields

from fl_lightning.errors import check_number
from fl_lightning.recorded import Recorded


@dataclass(frozen=True)
class NetworkLink(Recorded):
    """Network link and speed of a client.

    A round takes ``exchanges x latency + bytes / bandwidth + local steps x seconds per step``.

    The defaults are assumptions for a phone on a mobile network: 0.25 MB/s up, 0.75 MB/s down, and
    50 ms for a round trip. Set other values for clinics or data centres.

    Args:
        upload_mbps: Upload bandwidth in Mbit/s (10^6 bits per second).
        download_mbps: Download bandwidth in Mbit/s.
        latency_ms: Round-trip time in milliseconds, as shown by ``ping``: the time of an exchange
            without data.
        seconds_per_local_step: Time of a local step in seconds. With 0, computation takes no time.

    Raises:
        ConfigurationError: A number is out of range.

    Example:
        >>> NetworkLink().seconds(upload=1_000_000, download=1_000_000, exchanges=1)
        5.383333333333333
    """

    upload_mbps: float = 2.0
    download_mbps: float = 6.0
    latency_ms: float = 50.0
    seconds_per_local_step: float = 0.0

    def __post_init__(self) -> None:
        for setting in fields(self):
            least = {"above": 0.0} if setting.name.endswith("mbps") else {"least": 0.0}
            name, value = f"NetworkLink.{setting.name}", getattr(self, setting.name)
            check_number(name, value, f", such as {setting.default}", **least, below=math.inf)

    def seconds(self, upload: int, download: int, exchanges: int, local_steps: int = 0) -> float:
        """Return the seconds that a client needs for a round.

        Args:
            upload: Bytes that the client sends.
            download: Bytes that the client receives.
            exchanges: Number of consecutive exchanges with the server.
            local_steps: Number of local steps.
        """
        transfer = 8e-6 * (upload / self.upload_mbps + download / self.download_mbps)
        return exchanges * self.latency_ms / 1000 + transfer + local_steps * self.seconds_per_local_step

    def __str__(self) -> str:
        """Return the link as text, such as ``"2 Mbit/s up, 6 down, 50 ms round trip"``."""
        step = f", {self.seconds_per_local_step:g} s a local step" if self.seconds_per_local_step else ""
        link = f"{self.upload_mbps:g} Mbit/s up, {self.download_mbps:g} down"
        return f"{link}, {self.latency_ms:g} ms round trip{step}"
