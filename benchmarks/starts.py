"""``python -m benchmarks starts``: time the start of a study's cells.

The cells of a study start as forks of one process, or each cell starts as a new process. The whole
command is timed, including imports and checks. The two ways alternate. A cell trains a model with
BN or GN on scikit-learn's digits with ten local steps a round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.stopwatch import machine

_COMMAND = """
import sys
from functools import partial
from multiprocessing import forkserver
from fl_lightning.__main__ import main
from fl_lightning.experiments.studies.engines import local
local.LocalEngine = partial(local.LocalEngine, forks=sys.argv.pop(1) == "forks")
main()
forkserver._forkserver._stop()  # the time of a server counts once this process has waited for it
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: Arguments after ``starts``. Default: the process's arguments.

    Returns:
        The exit status 0.
    """
    parser = argparse.ArgumentParser("python -m benchmarks starts", description=__doc__)
    parser.add_argument("--cells", type=int, default=12, help="number of cells, even, 12")
    parser.add_argument("--rounds", type=int, default=10, help="communication rounds of a cell, 10")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="cells that run at a time, one per core",
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of repetitions, 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file as well")
    options = parser.parse_args(args)
    found = []
    for _ in range(options.repeats):
        for way in ("plain", "forks"):
            found.append(measure(way, options.cells, options.rounds, options.jobs))
            print(found[-1], file=sys.stderr, flush=True)
    print(
        "| cells start | study, s | study, CPU s | a cell beyond its rounds, s | its rounds, s |",
        "|---" * 5 + "|",
        sep="\n",
    )
    print(*lines(found), sep="\n")
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, torch {about['torch']}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: both ways, and their ratios within a repetition."""

    def spread(numbers: Sequence[float]) -> str:
        return f"{statistics.median(numbers):.3g} [{min(numbers):.3g}, {max(numbers):.3g}]"

    ways = {way: [one for one in found if one["way"] == way] for way in ("plain", "forks")}
    for way, words in (("plain", "each by itself"), ("forks", "as forks of one process")):
        columns = ("study_s", "study_cpu_s", "beyond_s", "rounds_s")
        yield f"| {words} | {' | '.join(spread([one[name] for one in ways[way]]) for name in columns)} |"
    pairs = [*zip(ways["plain"], ways["forks"], strict=True)]
    ratios = [
        spread([plain[name] / forks[name] for plain, forks in pairs])
        for name in ("study_s", "study_cpu_s", "beyond_s")
    ]
    yield f"| ratio | {' | '.join(ratios)} | |"


def measure(way: str, cells: int, rounds: int, jobs: int) -> dict[str, Any]:
    """Time a study.

    Args:
        way: ``"forks"``, or ``"plain"`` for a new process per cell.
        cells: Number of cells, even.
        rounds: Communication rounds of a cell.
        jobs: Number of cells that run at a time.

    Returns:
        A dict with ``way`` and these times in seconds.

        - ``study_s`` and ``study_cpu_s``: wall and CPU time of the command and all its processes.
        - ``rounds_s``: mean time that a cell spends in rounds.
        - ``beyond_s``: mean time from the start of a cell's process to its result, minus the
          rounds.
    """
    settings = {
        "trainer.max_epochs": rounds,
        "trainer.check_val_every_n_epoch": max(rounds // 4, 1),
        "model.local_steps": 10,
        "wandb.mode": "disabled",
    }
    study = {
        "title": "Starts",
        "axes": {"method": {"BN": {}, "GN": {"model.model.norm": "gn"}}},
        "scales": {"quick": {"base": "configs/digits_fedavg_bn.yaml", "seeds": [*range(cells // 2)]}},
        "settings": settings,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "starts.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
        command = [sys.executable, "-c", _COMMAND, way, "study", "starts.yaml", "--jobs", str(jobs)]
        place = str(Path(__file__).parents[1])
        paths = [place, *filter(None, [os.environ.get("PYTHONPATH")])]
        (Path(folder) / "configs").symlink_to(f"{place}/configs")
        before, started = os.times(), time.perf_counter()
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        seconds, after = time.perf_counter() - started, os.times()
        cpu = after.children_user - before.children_user + after.children_system - before.children_system
        results = [json.loads(path.read_text()) for path in Path(folder, "runs/cells").rglob("result.json")]
    if len(results) != cells:
        raise RuntimeError(f"{len(results)} of {cells} cells are finished; --cells must be even")
    trained = statistics.mean(result["train_seconds"] for result in results)
    whole = statistics.mean(result["process_seconds"] for result in results)
    times = {"study_s": seconds, "study_cpu_s": cpu, "beyond_s": whole - trained, "rounds_s": trained}
    return {"way": way, **times}
