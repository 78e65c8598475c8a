"""Processor time and memory of a process and all its descendants, from Linux's ``/proc``."""

import os
import re
import time
from pathlib import Path

_PROC = Path("/proc")


def cpu_seconds() -> float:
    """Return the processor seconds of this process and its descendants, also ended ones."""
    ended = os.times()
    living = sum(_cpu_seconds(pid) for pid in tree(os.getpid())[1:])
    return time.process_time() + ended.children_user + ended.children_system + living


def pss_mb(root: int) -> float:
    """Return the proportional set size (PSS) of a process and its descendants in MB."""
    return sum(_pss_mb(pid) for pid in tree(root))


def running() -> set[int]:
    """Return the process ids of this process's descendants that have not ended."""
    return {pid for pid in tree(os.getpid())[1:] if is_running(pid)}


def is_running(pid: int) -> bool:
    """Return whether a process has not ended."""
    return _fields(pid)[:1] not in ([], ["Z"])


def tree(root: int) -> list[int]:
    """Return the ids of a process and all its descendants, the process first."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        fields = _fields(int(folder.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [root]
    for pid in found:  # the list grows in the loop, so that children of children are visited too
        found += children.get(pid, [])
    return found


def _fields(pid: int) -> list[str]:
    """Return the fields after the name in ``/proc/PID/stat``; empty if the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds(pid: int) -> float:
    # fields 11 to 14: user and system time of the process and of its ended children
    return sum(map(int, _fields(pid)[11:15])) / os.sysconf("SC_CLK_TCK")


def _pss_mb(pid: int) -> float:
    try:
        found = re.search(r"^Pss:\s*(\d+) kB", (_PROC / str(pid) / "smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found[1]) * 1.024e-3 if found else 0.0
