"""The wall time of a round, by stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class RoundClock:
    """A clock of the host's wall time, by stage of a round.

    GPU work is asynchronous: a stage includes the time to queue its GPU work. The wait for the GPU
    belongs to the stage that first needs a result. ``--trainer.profiler`` gives GPU times.

    Attributes:
        seconds: Seconds of each stage since :meth:`start`; :meth:`stop` sets ``other``.
    """

    PARTS = ("data", "forward_backward", "optimizer", "callbacks", "gather", "aggregation", "other")

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the clock of a round."""
        self.seconds = dict.fromkeys(self.PARTS, 0.0)
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to the stage ``name``."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def stop(self) -> dict[str, float]:
        """Stop the clock, and return the seconds of round and stages, as ``time/round_s``."""
        total = time.perf_counter() - self._started
        self.seconds["other"] = total - sum(self.seconds.values())
        return {"time/round_s": total} | {f"time/{part}_s": spent for part, spent in self.seconds.items()}
