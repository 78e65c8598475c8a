"""Studies killed at random moments: the study's process, all its processes, or one cell."""

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
"""Processes that a SIGKILL ends."""

FILE = {
    "title": "Kills",
    "axes": {
        "method": {
            "BN": {},
            "FixBN": {"trainer.callbacks": ["FixBN"]},  # starts from the first half of BN's rounds
            "FedBN": {"trainer.callbacks": ["FedBN"]},
        }
    },
    "scales": {"quick": {"base": "base.yaml", "seeds": [0, 1]}},
}
"""A study of six cells."""


def killed(kills: int, rounds: int, draw: random.Random, folder: Path) -> Counter[str]:
    """Kill a study at random moments, resume it, and compare with the uninterrupted study.

    Args:
        kills: Number of kills.
        rounds: Communication rounds of a cell.
        draw: Random number generator of moments and victims.
        folder: A new folder.

    Returns:
        Numbers of kills by victim and by finished cells (none, some, all), and of faults by kind.
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
    """Kill a study, all its processes or one cell; return the victim, empty if it does not run."""
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
    """Return the time when each cell's result was written, in nanoseconds, by path."""
    return {path: path.stat().st_mtime_ns for path in place.glob("runs/cells/*/*/result.json")}


def _finished(place: Path) -> dict[str, Any]:
    """Return the content of all finished cells by configuration and seed, without the origin of shared rounds."""
    found = {path.parent.name.partition(".")[0]: contents(path.parent) for path in sorted(_ends(place))}
    for content in found.values():
        # a cell whose parent was killed trains the shared rounds itself, with the same numbers and its own T*
        del content["fl_lightning"]["record"]["continued_from"]
        for row in content["metrics"]:
            row.pop("fixbn/freeze_round", None)
    return dict(sorted(found.items()))
