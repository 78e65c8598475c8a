"""``python -m benchmarks``: time communication rounds against a naive loop, and aggregation rules against ByzFL."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks import aggregation, compare, overhead
from benchmarks.stopwatch import Spread, machine, peak_memory_mb
from benchmarks.workloads import BATCH_SIZE, MODELS, WORKLOADS

_DESCRIPTION = """\
Times communication rounds on one thread: a naive FedAvg loop and this framework with each executor, in turn.

  compare      (default) whole rounds, ms per client step and how many times as fast as the naive loop
  overhead     the framework's own time: rounds minus forward + backward, augmentation and optimizer arithmetic
  aggregation  the robust aggregation rules instead, against byzfl where it is installed: ms with the better of 1 and 2
               threads at 10 and 100 clients (--rules, --columns), and the memory of ours (--memory-columns)

Workloads: W1 10 clients, 20 local steps; W2 10 of 100 clients, 20 local steps; W3 5 clients, 1 local step.
Models: tiny (270k parameters, almost no compute) and resnet20. Numbers are "median [smallest, largest]".
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"benchmarks: {message}\n")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Arguments without the program's name; those of the process when None.
    """
    options = _parse(args)
    torch.set_num_threads(1)
    if options.command == "aggregation":
        sizes = options.columns, options.memory_columns
        results = [aggregation.compare(options.rules, *sizes, options.repeats, _say)]
        lines = aggregation.table(results[0])
    else:
        command = {"compare": compare.compare, "overhead": overhead.overhead}[options.command]
        results = [
            command(workload, model, options.images, options.repeats, options.rounds, _say)
            for model in options.models
            for workload in options.workloads
        ]
        lines = {"compare": compare.table, "overhead": overhead.table}[options.command](results)
    about: dict[str, Any] = {
        "command": options.command,
        "machine": machine(),
        "peak_memory_mb": peak_memory_mb(),
    }
    print("\n".join(lines))
    print(_machine_line(about))
    if options.json:
        options.json.write_text(json.dumps({**about, "results": results}, default=_plain, indent=1) + "\n")


def _parse(args: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        "python -m benchmarks", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", nargs="?", default="compare", choices=["compare", "overhead", "aggregation"]
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["W1", "W3"], help="W1 W3")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="tiny resnet20 (overhead: tiny)")
    parser.add_argument("--repeats", type=int, help="repetitions, 3 unless given (overhead: 7)")
    parser.add_argument(
        "--rounds", type=int, help="rounds in a repetition, by default 1 for W1 and W2, 100 for W3"
    )
    parser.add_argument(
        "--images", type=int, default=50_000, help="training images of all clients, 50000 as CIFAR-10"
    )
    parser.add_argument(
        "--rules", nargs="+", choices=list(aggregation.RULES), default=list(aggregation.RULES), help="all"
    )
    parser.add_argument(
        "--columns", type=int, default=270_000, help="columns of the rows, 270000 as ResNet-20"
    )
    parser.add_argument(
        "--memory-columns", type=int, default=1_000_000, help="likewise where memory is measured, 1000000"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file as well")
    options = parser.parse_args(args)
    is_overhead = options.command == "overhead"
    options.models = options.models or (["tiny"] if is_overhead else list(MODELS))
    options.repeats = (7 if is_overhead else 3) if options.repeats is None else options.repeats
    for name in ("repeats", "rounds", "columns", "memory_columns"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name.replace('_', '-')}: {value} must be at least 1")
    needed = BATCH_SIZE * max(WORKLOADS[name].num_clients for name in options.workloads)
    if options.images < needed:
        parser.error(
            f"argument --images: {options.images} do not fill a batch of {BATCH_SIZE} for every client; use at least {needed}"
        )
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: no folder {options.json.absolute().parent}; make it first")
    return options


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _machine_line(about: dict[str, Any]) -> str:
    on = about["machine"]
    threads = f"{on['threads']} thread" + ("s" if on["threads"] != 1 else "")
    return (
        f"{on['cpu']}, {on['cores']} cores, {threads}, Python {on['python']}, torch {on['torch']}; "
        f"peak memory {about['peak_memory_mb']:.0f} MB"
    )


def _plain(value: object) -> dict[str, Any]:
    assert isinstance(value, Spread)
    return dataclasses.asdict(value)


if __name__ == "__main__":
    main()
