"""Where the time of a round goes."""

import time


class RoundClock:
    """A clock that gives each stretch of a round to one of its parts.

    Wall time on the host: on a GPU, whose work is only queued, parts are those of the queueing, and the wait falls
    into the part that first needs a result. ``--trainer.profiler`` sees more.

    Attributes:
        seconds: Seconds of each part since :meth:`start`.
    """

    PARTS = ("data", "forward_backward", "optimizer", "callbacks", "aggregation", "other")

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a round."""
        self.seconds = dict.fromkeys(self.PARTS, 0.0)
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Give the time since the previous call to a part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds of all parts together."""
        return sum(self.seconds.values())
