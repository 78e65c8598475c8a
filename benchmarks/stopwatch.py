"""Clocks, the spread of repeated measurements, and a description of the machine."""

import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch


def nothing() -> None:
    """Return at once: on a CPU all started work is done already."""


@dataclass
class Stopwatch:
    """Stopwatch for the wall and processor time of ``with`` blocks; several blocks add up.

    Attributes:
        wall: Seconds of wall time. Other programs on the machine lengthen it.
        cpu: Seconds of processor time, measured by ``cpu_clock``.
        cpu_clock: Function that returns the processor time so far. Default: the time of this
            process without its children.
        settle: Function that waits until all started work is done. It is called before the clocks
            are read. Default: no wait, as on a CPU.
    """

    wall: float = 0.0
    cpu: float = 0.0
    cpu_clock: Callable[[], float] = time.process_time
    settle: Callable[[], None] = nothing

    def start(self) -> None:
        """Start counting."""
        self.settle()
        self.cpu -= self.cpu_clock()
        self.wall -= time.perf_counter()

    def stop(self) -> None:
        """Stop counting."""
        self.settle()
        self.wall += time.perf_counter()
        self.cpu += self.cpu_clock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest value of repeated measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{_digits(self.median)} [{_digits(self.min)}, {_digits(self.max)}]"


def _digits(value: float) -> str:
    return (
        f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
    )


def machine(device: str = "cpu") -> dict[str, Any]:
    """Describe the machine: processor, cores, threads, versions, and for ``"cuda"`` the GPU."""
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    return {
        **gpu,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def peak_memory_mb() -> float:
    """Return the largest resident memory of this process so far, in MB."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    own = re.search(r"VmHWM:\s*(\d+) kB", status)
    if own:  # preferred: getrusage may also count the peak of the process that started this one
        return int(own[1]) * 1.024e-3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3 / 1.024)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
