"""Wall time of the stages of a round."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class RoundClock:
    """Clock for the wall time of each stage of a round.

    GPU work is asynchronous. If a stage needs a result of the GPU, the waiting time belongs to this
    stage. ``--trainer.profiler`` measures GPU times.

    Attributes:
        seconds: Seconds of each stage in this round. The stage ``other`` is the rest of the round.
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
        """Add the duration of the ``with`` block to the stage ``name``."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def stop(self) -> dict[str, float]:
        """Stop the clock. Return the seconds of the round and of its stages by metric name."""
        total = time.perf_counter() - self._started
        self.seconds["other"] = total - sum(self.seconds.values())
        return {"time/round_s": total} | {f"time/{part}_s": spent for part, spent in self.seconds.items()}
