"""Wall time of the stages of a round."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class RoundClock:
    """Clock of the wall time of each stage of a round, measured on the host.

    GPU work is asynchronous. A stage therefore includes the time to queue its GPU work, and the
    stage that first needs a result includes the wait for the GPU. ``--trainer.profiler`` measures
    GPU times.

    Attributes:
        seconds: Seconds of each stage since :meth:`start`. :meth:`stop` adds the stage ``other``:
            the time of the round outside all other stages.
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
        """Measure the duration of the block, and add it to the stage ``name``."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def stop(self) -> dict[str, float]:
        """Stop the clock, and return the durations of the round and of its stages in seconds.

        The keys are metric names.
        """
        total = time.perf_counter() - self._started
        self.seconds["other"] = total - sum(self.seconds.values())
        return {"time/round_s": total} | {f"time/{part}_s": spent for part, spent in self.seconds.items()}
