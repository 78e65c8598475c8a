"""Number of CPU cores that a process may use. This module does not import PyTorch."""

import os
from math import ceil
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores_of_a_run() -> int:
    """Return the number of cores that a run may use.

    This is :func:`usable_cores`, or ``OMP_NUM_THREADS`` if that number is smaller.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(usable_cores(), int(threads)) if threads.isdecimal() and int(threads) else usable_cores()


def usable_cores() -> int:
    """Return the number of cores that this process may use.

    The CPU affinity of the process and the CPU quota of its cgroup limit this number.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(allowed, ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # without a quota, the file is missing or contains "max"
        return allowed
