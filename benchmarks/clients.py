"""``python -m benchmarks clients``: start-up, time of a round and memory by number of clients.

Each client has 20 random images, stored as one writer in the file layout of LEAF. A round has 10
clients with 5 local steps on batches of 20. The model is LeNet with BN. Each run is a complete
``python -m fl_lightning fit`` with metrics, checkpoints and test.
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

import numpy as np
import yaml

from fl_lightning.experiments.run_directory.metrics_log import read_metrics

METHODS: dict[str, list[Any]] = {
    "FedAvg": [],
    "FedBN": [{"class_path": "FedBN", "init_args": {"evaluate_clients": 1}}],
    "MaintainedMomentum": ["MaintainedMomentum"],
    "SCAFFOLD": ["SCAFFOLD"],
}
"""Callbacks by method. FedAvg keeps no state of clients. The others keep BN layers, momentum or
control variates."""

_IMAGES = 20  # training images of a client


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: Arguments after ``clients``. Default: the process's arguments.

    Returns:
        The exit status 0.
    """
    parser = argparse.ArgumentParser("python -m benchmarks clients", description=__doc__)
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000, 3500])
    parser.add_argument(
        "--rounds", nargs="+", type=int, default=[50], help="for each number of clients, or one for all"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file as well")
    options = parser.parse_args(args)
    rounds = options.rounds if len(options.rounds) > 1 else options.rounds * len(options.clients)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for clients, count in zip(options.clients, rounds, strict=True):
            data = Path(folder) / f"writers-{clients}"
            write_writers(data, clients)
            for method in options.methods:
                # the first run reads the files and builds the cache for later runs
                name = f"{method}, first start" if method == options.methods[0] else method
                found.append(measure(Path(folder), data, method, count) | {"clients": clients, "run": name})
                print(next(lines(found[-1:])), file=sys.stderr, flush=True)
            again = measure(Path(folder), data, options.methods[0], count)
            found.append(again | {"clients": clients, "run": options.methods[0]})
    header = "| clients | rounds | | start-up, s | ms per round: first half | second half | peak memory, MB | kept in files, MB |"
    print(header, "|---" * 8 + "|", *lines(found), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the results."""
    for one in found:
        halves = " | ".join(f"{1000 * seconds:.0f}" for seconds in one["round_s"])
        yield (
            f"| {one['clients']:,} | {one['rounds']} | {one['run']} | {one['start_s']:.1f} | {halves} | {one['peak_mb']:.0f} | "
            f"{one['files_mb']:.0f} |"
        )


def write_writers(folder: Path, count: int) -> None:
    """Write random images in the file layout of LEAF, 100 writers to a file.

    Args:
        folder: Folder of the files.
        count: Number of writers.
    """
    draw = np.random.default_rng(0)
    for split, images in (("train", _IMAGES), ("test", 2)):
        (folder / split).mkdir(parents=True)
        for start in range(0, count, 100):
            users = [f"f{writer:04d}" for writer in range(start, min(start + 100, count))]
            pixels = draw.integers(0, 2, (len(users), images, 784))
            labels = draw.integers(0, 62, (len(users), images))
            content = {
                user: {"x": x.tolist(), "y": y.tolist()}
                for user, x, y in zip(users, pixels, labels, strict=True)
            }
            record = {"users": users, "num_samples": [images] * len(users), "user_data": content}
            (folder / split / f"{start}.json").write_text(json.dumps(record))


def measure(folder: Path, data: Path, method: str, rounds: int) -> dict[str, Any]:
    """Measure start-up, rounds and peak memory of a run.

    Args:
        folder: Folder for the run's files.
        data: Folder with the clients' images.
        method: A name of ``METHODS``.
        rounds: Number of communication rounds.

    Returns:
        A dict with these keys.

        - ``rounds``: the number of rounds.
        - ``start_s``: seconds from the start of the command to round 1.
        - ``round_s``: two medians of the seconds of a round, for the first and for the second half
          of the run, without round 1.
        - ``peak_mb``: peak resident memory in MB.
        - ``files_mb``: size in MB of the clients' state in files.
    """
    settings = {
        "trainer": {
            "max_epochs": rounds,
            "accelerator": "cpu",
            "callbacks": METHODS[method],
            "check_val_every_n_epoch": rounds,
        },
        "model": {
            "model": {"class_path": "LeNet", "init_args": {"norm": "bn"}},
            "client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.01, "momentum": 0.9}},
            "local_steps": 5,
            "participation": 10,
        },
        "data": {
            "class_path": "FEMNIST",
            "init_args": {
                "data_dir": str(data),
                "partition": "Natural",
                "batch_size": 20,
                "val_fraction": 0.0,
            },
        },
        "wandb": {"mode": "disabled"},
        "name": "clients",
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    with tempfile.TemporaryDirectory(dir=folder) as root:
        command = [sys.executable, "-m", "fl_lightning", "fit", "--config", str(config), "--run_root", root]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = next(
                (time.perf_counter() for line in process.stdout if line.startswith("round ")), started
            )
            process.stdout.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            raise RuntimeError(f"the run of {method} has failed, see above")
        (metrics,) = Path(root).rglob("metrics.jsonl")
        rows = [row for row in read_metrics(metrics) if row["round"] > 0]
        begun, *seconds = [row["time/round_s"] for row in rows]
        half = len(seconds) // 2
        kept = sum(path.stat().st_size for path in Path(root).rglob("memory/*/now/*.pt"))
    return {
        "rounds": rounds,
        "start_s": first - begun - started,
        "round_s": [statistics.median(seconds[:half]), statistics.median(seconds[half:])],
        "peak_mb": used.ru_maxrss / 1024,
        "files_mb": kept / 1e6,
    }
