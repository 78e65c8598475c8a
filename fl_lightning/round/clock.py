"""Where the time of a round goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class RoundClock:
    """A clock that gives each stretch of a round to one of its parts.

    Wall time on the host: on a GPU, whose work is only queued, parts are those of the queueing, and the wait falls
    into the part that first needs a result. ``--trainer.profiler`` sees more.

    Attributes:
        seconds: Seconds of each part since :meth:`start`; ``other`` is what :meth:`stop` finds beside them.
    """

    PARTS = ("data", "forward_backward", "optimizer", "callbacks", "gather", "aggregation", "other")

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a round."""
        self.seconds = dict.fromkeys(self.PARTS, 0.0)
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Give the time of the block to a part."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def stop(self) -> dict[str, float]:
        """End the round: what no part has got is ``other``.

        Returns:
            Seconds of the whole round and of each part by the name of their metric, such as ``"time/round_s"``.
        """
        total = time.perf_counter() - self._started
        self.seconds["other"] = total - sum(self.seconds.values())
        return {"time/round_s": total} | {f"time/{part}_s": spent for part, spent in self.seconds.items()}
