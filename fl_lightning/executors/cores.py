"""How many cores a run may use."""

import os
from math import ceil
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that this process may use: those it may run on, at most what a container's quota of processor time amounts to."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(allowed, ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or no quota, which is "max"
        return allowed


def cores_of_a_run() -> int:
    """What ``OMP_NUM_THREADS`` says, at most :func:`usable_cores`."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(usable_cores(), int(told)) if told.isdecimal() and int(told) else usable_cores()
