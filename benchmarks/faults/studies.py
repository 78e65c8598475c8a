"""Kills of studies at random moments: of the study's process, of all processes, or of a cell."""

import os
import random
import signal
import sys
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults.contents import contents, same
from benchmarks.faults.runs import called, configuration, in_process
from benchmarks.process_tree import is_running, tree

VICTIMS = ("the study", "the study and its cells", "a cell")
"""What a kill may hit: the study's process, also all of its cells, or one cell."""

FILE = {
    "title": "Kills",
    "axes": {
        "method": {
            "BN": {},
            "FixBN": {"trainer.callbacks": ["FixBN"]},  # continues BN's run after half of the rounds
            "FedBN": {"trainer.callbacks": ["FedBN"]},
        }
    },
    "scales": {"quick": {"base": "base.yaml", "seeds": [0, 1]}},
}
"""The file of a study with six cells."""


def killed(kills: int, rounds: int, draw: random.Random, folder: Path) -> Counter[str]:
    """Kill a study at random moments, resume it, and compare with the uninterrupted study.

    Args:
        kills: Number of kills.
        rounds: Communication rounds of a cell.
        draw: Random number generator of moments and victims.
        folder: Folder for the studies; it must not exist.

    Returns:
        The number of kills by victim, the number of kills by finished cells (none, some or all),
        and the number of faults of each kind.
    """
    (folder / "whole").mkdir(parents=True)
    base = {
        key: x
        for key, x in configuration([], {}, "SequentialExecutor", 1, rounds, 1).items()
        if key != "name"
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    (folder / "study.yaml").write_text(yaml.safe_dump(FILE, sort_keys=False))
    started = time.monotonic()
    _run_to_end(folder / "whole")
    seconds = time.monotonic() - started
    whole = _finished(folder / "whole")
    counts: Counter[str] = Counter()
    done = studies = 0
    while done < kills:
        studies += 1
        place = folder / str(studies)
        place.mkdir()
        ended: dict[Path, int] = {}
        while done < kills:
            process = in_process(_study, str(place))
            process.join(draw.uniform(0, 0.8 * seconds))
            before = ended | _ends(place)
            if not process.is_alive() or not (who := _kill(process, draw)):
                process.join()
                break
            done += 1
            counts[f"of {who}"] += 1
            counts[_moment(len(before), len(whole))] += 1
            ended = before
        _run_to_end(place)
        again = _ends(place)
        counts["a finished cell trained again"] += len(again) != len(whole) or any(
            again[path] != at for path, at in ended.items()
        )
        counts["other bits"] += not same(_finished(place), whole)
    return +counts


def _study(place: str) -> None:
    called(place, ["study", "../study.yaml", "--jobs", "2"])


def _run_to_end(place: Path) -> None:
    process = in_process(_study, str(place))
    process.join()
    if process.exitcode != 0:
        sys.exit(f"the study of {place} does not end: {(place / 'log.txt').read_text()[-2000:]}")


def _kill(process: BaseProcess, draw: random.Random) -> str:
    """Kill a random victim of ``VICTIMS`` and return its name; return ``""`` if it does not run."""
    study, *cells = tree(process.pid or 0)
    who = draw.choice(VICTIMS)
    victims = {"the study": [study], "the study and its cells": [study, *cells]}.get(
        who, cells and [draw.choice(cells)]
    )
    if not victims or not process.is_alive():
        return ""
    for pid in victims:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    process.join()  # if a cell was killed, the study finishes the other cells
    return who


def _moment(ended: int, cells: int) -> str:
    if not ended:
        return "before any cell has ended"
    return "after some cells have ended" if ended < cells else "after all cells have ended"


def _ends(place: Path) -> dict[Path, int]:
    """Return the time in ns at which each cell's result was written, by the result's path."""
    return {path: path.stat().st_mtime_ns for path in place.glob("runs/cells/*/*/result.json")}


def _finished(place: Path) -> dict[str, Any]:
    """Return the contents of all finished cells by hash and seed, without their origins."""
    found = {path.parent.name.partition(".")[0]: contents(path.parent) for path in sorted(_ends(place))}
    for content in found.values():
        # If FixBN's cell starts without the run of BN, it trains the shared rounds itself. The
        # numbers are the same, but it also logs T* in these rounds.
        del content["fl_lightning"]["record"]["continued_from"]
        for row in content["metrics"]:
            row.pop("fixbn/freeze_round", None)
    return dict(sorted(found.items()))
