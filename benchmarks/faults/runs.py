"""Kills of runs at random moments; a killed run is started again until it ends."""

import contextlib
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.faults.contents import contents, same

_MOMENTUM = {"class_path": "SGD", "init_args": {"lr": 0.02, "momentum": 0.9}}
_ADAM = {"class_path": "Adam", "init_args": {"lr": 0.005}}

CONFIGURATIONS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "FedAvg, 2 of 5 clients": ([], {"participation": 2}),
    "FixBN, local momentum, FedAvgM": (
        ["FixBN", {"class_path": "MaintainedMomentum", "init_args": {"scope": "local"}}],
        {"client_optimizer": _MOMENTUM, "server_optimizer": _MOMENTUM | {"init_args": {"lr": 1.0, "momentum": 0.5}}},
    ),
    "FedBN, Adam kept globally": (
        ["FedBN", {"class_path": "MaintainedMomentum", "init_args": {"scope": "global"}}],
        {"client_optimizer": _ADAM, "participation": 3},
    ),
    "SCAFFOLD, FedAdam, local epochs": (
        ["SCAFFOLD"],
        {"local_steps": None, "local_epochs": 1, "server_optimizer": {"class_path": "FedAdam", "init_args": {"lr": 0.01}}},
    ),
    "FBN, trimmed mean": (
        ["FBN"],
        {"aggregator": {"class_path": "TrimmedMean", "init_args": {"f": 1}}},
    ),
    "T* by the window, 4 of 5 clients": (
        [{"class_path": "SlidingWindowFixBN", "init_args": {"window": 4, "threshold": 1e3}}],
        {"participation": 4},
    ),
}  # fmt: skip
"""Configurations by name: the run's callbacks, and settings of the module."""

EXECUTORS: dict[str, tuple[str, int]] = {
    "sequential": ("SequentialExecutor", 1),
    "vectorized": ("VectorizedExecutor", 1),
    "two ranks": ("SequentialExecutor", 2),
}
"""Ways to compute a run, by name: class of the executor and number of ranks."""


def configuration(
    callbacks: list[Any], settings: dict[str, Any], executor: str, ranks: int, rounds: int, every: int
) -> dict[str, Any]:
    """Return the configuration of a run.

    Args:
        callbacks: The run's callbacks.
        settings: Settings of the module beyond the common ones.
        executor: Class of the executor.
        ranks: Number of ranks.
        rounds: Number of communication rounds.
        every: Rounds between two checkpoints.
    """
    return {
        "name": "faults",
        "trainer": {"max_epochs": rounds, "check_val_every_n_epoch": 5, "accelerator": "cpu", "devices": ranks, "callbacks": callbacks},
        "model": {
            "model": {"class_path": "LeNet"},
            "client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.05}},
            "local_steps": 2,
            "executor": {"class_path": executor},
            **settings,
        },
        "data": {
            "class_path": "Digits",
            "init_args": {
                "num_clients": 5, "batch_size": 10, "max_examples": 300, "val_fraction": 0.2,
                "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 1.0}},
            },
        },
        "checkpoint": {"every_n_rounds": every},
    }  # fmt: skip


def killed(
    name: str, executor: str, kills: int, rounds: int, draw: random.Random, folder: Path
) -> Counter[str]:
    """Kill runs at random moments, resume them, and compare them with an uninterrupted run.

    Args:
        name: A name of ``CONFIGURATIONS``.
        executor: A name of ``EXECUTORS``.
        kills: Number of kills.
        rounds: Communication rounds of a run.
        draw: Random number generator of the moments.
        folder: Folder for the runs; it must not exist.

    Returns:
        The number of kills by moment, and the number of runs with ``other bits``.
    """
    (callbacks, settings), (computed_by, ranks) = CONFIGURATIONS[name], EXECUTORS[executor]
    config = configuration(callbacks, settings, computed_by, ranks, rounds, draw.choice([1, 7]))
    whole, seconds = uninterrupted(config, folder)
    counts: Counter[str] = Counter()
    runs = 0
    while counts.total() < kills:
        runs += 1
        place = folder / str(runs)
        place.mkdir()
        while counts.total() < kills:
            process = start(place)
            if draw.random() < 0.25:  # any moment of the process, most of them during imports
                process.join(draw.uniform(0, seconds))
            else:
                wait_for(place, process, draw.randrange(1, rounds + 2))
                process.join(draw.uniform(0, 0.1))
            if not process.is_alive():
                break
            process.kill()
            process.join()
            counts[moment(place, rounds)] += 1
        run_to_end(place)
        counts["other bits"] += not is_whole(place, whole)
    return +counts


def uninterrupted(config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], float]:
    """Write a configuration to a new folder and run it once.

    Returns:
        The run's content (see :func:`~benchmarks.faults.contents.contents`) and its seconds.
    """
    (folder / "whole").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    started = time.monotonic()
    run_to_end(folder / "whole")
    seconds = time.monotonic() - started
    return contents(_saved(folder / "whole")[0]), seconds


def is_whole(place: Path, whole: dict[str, Any]) -> bool:
    """Return whether a folder has exactly one run, and the run's content equals ``whole``."""
    saved = _saved(place)
    return len(saved) == 1 and same(contents(saved[0]), whole)


def wait_for(place: Path, process: BaseProcess, lines: int) -> None:
    """Wait until a run has written ``lines`` lines of metrics, or has ended."""
    while process.is_alive() and _written(place) < lines:
        time.sleep(0.002)


def moment(place: Path, rounds: int) -> str:
    """Return in words when the run of a folder was killed, from its lines of metrics."""
    written = _written(place)
    if written <= 1:
        return "before the end of round 1"
    return "in later rounds" if written <= rounds else "after the last round"


def start(place: Path) -> BaseProcess:
    """Start or resume the run of a folder in a new process."""
    return in_process(_fit, str(place))


def in_process(function: Callable[[str], None], argument: str) -> BaseProcess:
    """Call a function in a new process that has already imported the package."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["fl_lightning.cli.command_line"])
    process = processes.Process(target=function, args=(argument,))
    process.start()
    return process


def called(place: str, arguments: Sequence[str]) -> None:
    """Call the command line in this process, with a folder as working directory.

    Output is appended to ``log.txt`` in the folder.

    Args:
        place: The folder.
        arguments: Arguments of the command line.
    """
    from fl_lightning.__main__ import main as run

    os.setpgrp()
    os.chdir(place)
    torch.set_num_threads(1)
    with Path("log.txt").open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        run(arguments)


def run_to_end(place: Path) -> None:
    """Run or resume the run of a folder to its end; exit if the run fails."""
    process = start(place)
    process.join()
    if process.exitcode != 0:
        sys.exit(f"a run of {place} does not end: {(place / 'log.txt').read_text()[-2000:]}")


def _fit(place: str) -> None:
    called(place, ["fit", "--config", "../config.yaml", "--ckpt_path", "auto", "--threads", "1"])


def _written(place: Path) -> int:
    files = place.glob("runs/faults/*/metrics.jsonl")
    return max((path.read_bytes().count(b"\n") for path in files), default=0)


def _saved(place: Path) -> list[Path]:
    return [path.parents[1] for path in place.glob("runs/faults/*/checkpoints/last.ckpt")]
