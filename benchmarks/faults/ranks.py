"""Kills of single ranks: the other ranks must end, and the run must resume exactly."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.faults.runs import configuration, is_whole, run_to_end, start, uninterrupted, wait_for
from benchmarks.process_tree import is_running, tree

_PATIENCE = 60.0  # seconds after a kill until the other ranks must have ended

_METHODS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "FixBN, local momentum": (
        ["FixBN", {"class_path": "MaintainedMomentum", "init_args": {"scope": "local"}}],
        {"client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.02, "momentum": 0.9}}},
    ),
    "FBN, trimmed mean": (["FBN"], {"aggregator": {"class_path": "TrimmedMean", "init_args": {"f": 1}}}),
}


def killed(kills: int, rounds: int, draw: random.Random, folder: Path) -> Counter[str]:
    """Kill single ranks of runs on two and three ranks; compare resumed and uninterrupted runs.

    Args:
        kills: Number of kills.
        rounds: Communication rounds of a run.
        draw: Random number generator of ranks and moments.
        folder: Folder for the runs; it must not exist.

    Returns:
        The number of kills of rank 0 and of other ranks, and the number of faults of each kind.
    """
    counts: Counter[str] = Counter()
    cells = [(name, ranks) for name in _METHODS for ranks in (2, 3)]
    for index, (name, ranks) in enumerate(cells):
        share = kills * (index + 1) // len(cells) - kills * index // len(cells)
        config = configuration(*_METHODS[name], "SequentialExecutor", ranks, rounds, 1)
        if share:
            counts += _killed(config, share, draw, folder / str(index))
    return counts


def _killed(config: dict[str, Any], kills: int, draw: random.Random, folder: Path) -> Counter[str]:
    rounds = config["trainer"]["max_epochs"]
    whole, _ = uninterrupted(config, folder)
    counts: Counter[str] = Counter()
    done = runs = 0
    while done < kills:
        runs += 1
        place = folder / str(runs)
        place.mkdir()
        while done < kills:
            process = start(place)
            wait_for(place, process, draw.randrange(1, rounds + 1))
            process.join(draw.uniform(0, 0.1))
            together = tree(process.pid or 0)
            if not process.is_alive() or len(together) < config["trainer"]["devices"]:
                process.join()  # the ranks are ending by themselves: start the next run
                break
            rank = draw.randrange(len(together))
            os.kill(together[rank], signal.SIGKILL)
            done += 1
            counts["of rank 0" if rank == 0 else "of another rank"] += 1
            until = time.monotonic() + _PATIENCE
            while any(map(is_running, together)) and time.monotonic() < until:
                process.join(0.05)
            counts["left a process behind"] += any(map(is_running, together))
            process.join(0)
            if process.exitcode == 0:  # the run claims to be complete, so it must have a result
                counts["ended well unfinished"] += not any(place.glob("runs/faults/*/result.json"))
                break
        run_to_end(place)
        counts["other bits"] += not is_whole(place, whole)
    return +counts
