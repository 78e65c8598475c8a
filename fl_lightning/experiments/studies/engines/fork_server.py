"""Process from which the local engine forks cells. Only this process and its forks import this module.

The server runs no computation, because a computation could start threads. A fork of a process with
threads can hang. If ``OMP_NUM_THREADS`` is above 1, OpenBLAS starts threads, but it ends them
before a fork.
"""

import gc
import os
import sys
from importlib import import_module

from fl_lightning.experiments.run_directory.source import provenance

os.setpgid(0, 0)  # signals to the study's group, such as Ctrl-C, do not reach the server
import_module("matplotlib.backends.backend_agg")
provenance({})  # forks keep the versions of the imported files
gc.freeze()  # garbage collection writes to shared memory, and each write copies a page


def _written(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


_IMPORTED = {
    path: _written(path)
    for path in [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    if path
}


def is_current() -> bool:
    """Return whether all imported files are unchanged."""
    return all(_written(path) == state for path, state in _IMPORTED.items())
