"""``python -m benchmarks faults``: kill runs at random moments, damage their checkpoints, and see what is lost.

A killed run is started again with the same command (``--ckpt_path auto``) until it ends. It must then hold what the
uninterrupted run holds, bit for bit: every row of its metrics but for times, weights, optimizers, what methods remember.
A damaged checkpoint must be refused in one line, or load as what it was.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import yaml

from fl_lightning.errors import ConfigurationError
from fl_lightning.run_directory.checkpoint_io import load_run
from fl_lightning.run_directory.metrics import read_metrics

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
"""Callbacks and settings of the module, by name."""

EXECUTORS: dict[str, tuple[str, int]] = {
    "sequential": ("SequentialExecutor", 1),
    "vectorized": ("VectorizedExecutor", 1),
    "two ranks": ("SequentialExecutor", 2),
}
"""Executors and numbers of ranks, by name."""

_PROCESSES = multiprocessing.get_context("forkserver")


def main(args: Sequence[str]) -> int:
    """Run the command.

    Args:
        args: Arguments after ``faults``.

    Returns:
        The exit status: 0 where nothing was lost or wrong, 1 otherwise.
    """
    parser = argparse.ArgumentParser("python -m benchmarks faults", description=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    add(
        "--kills",
        type=int,
        default=108,
        help="kills of all runs together, 108: six of each cell of the table",
    )
    add("--damages", type=int, default=3000, help="damaged copies of a checkpoint, 3000")
    add("--rounds", type=int, default=40, help="communication rounds of a run, 40")
    add("--configurations", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    add("--executors", nargs="+", choices=list(EXECUTORS), default=list(EXECUTORS))
    add("--seed", type=int, default=0, help="of the moments and the damage")
    add("--json", type=Path, help="write the counts to this file as well")
    options = parser.parse_args(args)
    _PROCESSES.set_forkserver_preload(["fl_lightning.cli.command_line", "datamodules", "callbacks"])
    cells = [(name, executor) for name in options.configurations for executor in options.executors]
    kills: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, executor) in enumerate(cells):
            share = options.kills * (index + 1) // len(cells) - options.kills * index // len(cells)
            draw = random.Random(f"{options.seed} {name} {executor}")
            place = Path(folder, str(index))
            kills[f"{name}; {executor}"] = found = _killed(name, executor, share, options.rounds, draw, place)
            print(f"{name}; {executor}: {_in_words(found)}", flush=True)
        damaged = _damaged(_last(Path(folder, "0", "whole")), options.damages, random.Random(options.seed))
    print(f"damaged checkpoints: {_in_words(damaged)}")
    counts = sum(kills.values(), Counter[str]())
    print(f"all kills: {_in_words(counts)}")
    if options.json is not None:
        found_all = {"kills": kills, "damages": damaged, "rounds": options.rounds, "seed": options.seed}
        options.json.write_text(json.dumps(found_all, indent=1) + "\n")
    return int(bool(counts["other bits"] or counts["did not end"] or damaged["loaded as other numbers"]))


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items()) or "none"


def _killed(
    name: str, executor: str, kills: int, rounds: int, draw: random.Random, folder: Path
) -> Counter[str]:
    """Kill runs of a cell at random moments, let them end, and compare them with one that nobody killed."""
    (callbacks, settings), (computed_by, ranks) = CONFIGURATIONS[name], EXECUTORS[executor]
    config = {
        "name": "faults",
        "trainer": {"max_epochs": rounds, "check_val_every_n_epoch": 5, "accelerator": "cpu", "devices": ranks, "callbacks": callbacks},
        "model": {
            "model": {"class_path": "LeNet"},
            "client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.05}},
            "local_steps": 2,
            "executor": {"class_path": computed_by},
            **settings,
        },
        "data": {
            "class_path": "Digits",
            "init_args": {
                "num_clients": 5, "batch_size": 10, "max_examples": 300, "val_fraction": 0.2,
                "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 1.0}},
            },
        },
        "checkpoint": {"every_n_rounds": draw.choice([1, 7])},
    }  # fmt: skip
    (folder / "whole").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    started = time.monotonic()
    _run_to_end(folder / "whole")
    seconds = time.monotonic() - started
    counts: Counter[str] = Counter()
    runs = 0
    while counts.total() < kills:
        runs += 1
        place = folder / str(runs)
        place.mkdir()
        while counts.total() < kills:
            process = _start(place)
            if draw.random() < 0.25:  # at any moment, most of which are imports
                process.join(draw.uniform(0, seconds))
            else:
                _wait_for(place, process, draw.randrange(1, rounds + 2))
                process.join(draw.uniform(0, 0.1))
            if not process.is_alive():
                break
            process.kill()
            process.join()
            counts[_moment(place, rounds)] += 1
        _run_to_end(place)
        saved = list(place.glob("runs/faults/*/checkpoints/last.ckpt"))
        if len(saved) != 1 or not same(_contents(place), _contents(folder / "whole")):
            counts["other bits"] += 1
    return counts


def _wait_for(place: Path, process: BaseProcess, lines: int) -> None:
    """Wait until a run has written so many lines of metrics, or has ended."""
    while process.is_alive() and _written(place) < lines:
        time.sleep(0.002)


def _written(place: Path) -> int:
    files = place.glob("runs/faults/*/metrics.jsonl")
    return max((path.read_bytes().count(b"\n") for path in files), default=0)


def _moment(place: Path, rounds: int) -> str:
    """When a run was killed, by what it had written."""
    written = _written(place)
    if written <= 1:
        return "before the end of round 1"
    return "in later rounds" if written <= rounds else "after the last round"


def _start(place: Path) -> BaseProcess:
    process = _PROCESSES.Process(target=_fit, args=(str(place),))
    process.start()
    return process


def _fit(place: str) -> None:
    from fl_lightning.cli import main as run

    os.setpgrp()
    os.chdir(place)
    torch.set_num_threads(1)
    with Path("log.txt").open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        run(["fit", "--config", "../config.yaml", "--ckpt_path", "auto", "--threads", "1"])


def _run_to_end(place: Path) -> None:
    process = _start(place)
    process.join()
    if process.exitcode != 0:
        sys.exit(f"a run of {place} does not end: {(place / 'log.txt').read_text()[-2000:]}")


def _last(place: Path) -> Path:
    return next(place.glob("runs/faults/*/checkpoints/last.ckpt"))


def _contents(place: Path) -> dict[str, Any]:
    """What a finished run holds, without times."""
    attempt = _last(place).parents[1]
    checkpoint = load_run(_last(place))
    record = checkpoint["fl_lightning"]["record"]
    del record["seconds"]
    record["row"] = _without_times(record["row"])
    result = json.loads((attempt / "result.json").read_text())
    names = ("state_dict", "callbacks", "optimizer_states", "fl_lightning", "global_step")
    return {name: checkpoint[name] for name in names} | {
        "metrics": [_without_times(line) for line in read_metrics(attempt / "metrics.jsonl")],
        "result": {
            name: result[name] for name in ("samples", "val/accuracy", "test/accuracy", "class_accuracy")
        },
    }


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("time/")}


def same(first: Any, second: Any) -> bool:
    """Whether two trees of tensors and plain values are equal bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def _damaged(path: Path, damages: int, draw: random.Random) -> Counter[str]:
    """Overwrite, cut or shift bytes of a checkpoint, and load it."""
    whole, intact = path.read_bytes(), load_run(path)
    counts: Counter[str] = Counter()
    for _ in range(damages):
        content = bytearray(whole)
        # the directory of the archive is its end, and short: half of the damage goes there
        first = len(whole) - 3000 if draw.random() < 0.5 else 0
        place = draw.randrange(max(first, 0), len(whole))
        kind = draw.choice(["a bit", "bytes", "a cut", "a gap"])
        if kind == "a bit":
            content[place] ^= 1 << draw.randrange(8)
        elif kind == "bytes":
            content[place : place + 16] = draw.randbytes(len(content[place : place + 16]))
        elif kind == "a cut":
            del content[place:]
        else:
            del content[place : place + draw.randrange(1, 64)]
        path.write_bytes(content)
        try:
            loaded = load_run(path)
        except ConfigurationError:
            counts["refused in one line"] += 1
            continue
        counts["loaded as they were" if same(loaded, intact) else "loaded as other numbers"] += 1
    path.write_bytes(whole)
    return counts
