"""Options of the command ``python -m benchmarks``."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks import aggregation
from benchmarks.contenders import GRAPHS
from benchmarks.recipe import BATCH_SIZE, MODELS
from benchmarks.roster import FRAMEWORKS, NAMES, ON_CUDA, present
from benchmarks.scale import FACTORS
from benchmarks.workloads import WORKLOADS

_COMMANDS = ("compare", "overhead", "aggregation", "memory", "scale", "gpu", "chart")

_DESCRIPTION = """\
Times communication rounds. The contenders run in turn: a naive FedAvg loop, this framework with each executor, and
other frameworks.

  compare      (default) Whole rounds: ms per client step, and the speed relative to the naive loop. A contender with
               one process uses the better number of threads. Some names are no contenders, but lower bounds:
               "compute" is forward and backward passes alone on all cores, "convolutions" only the convolutions of
               these passes, and "compute_compiled" the same passes with torch.compile. "ranks_bf16" computes in
               bfloat16. --device cuda runs on a GPU.
  memory       Peak memory of all processes of a contender together, minus the memory of its imports.
  scale        Cost per client step while clients, participation, local steps or the model grow, on one thread.
  overhead     The framework's own time: rounds minus forward and backward passes, augmentation and optimizer
               arithmetic. "strict" also counts the reset of the client optimizers and the server's step as its own.
  aggregation  Robust aggregation rules. Time at 10 and 100 clients with the better of 1 and 2 threads, compared with
               byzfl if byzfl is installed (--rules, --columns), and memory of our rules (--memory-columns).
  gpu          On a CUDA device: W1 against the naive loop; seconds of 128 epochs over 50,000 images with 5 clients
               and E=100, extrapolated from a few rounds; time per sample of E=1 divided by that of E=100.
  chart        Draw the results that compare or scale have written (--results) to a picture (--picture).

Workloads: W1 has 10 clients and 20 local steps; W2 10 of 100 clients and 20 local steps; W3 5 clients and 1 local step.
Models: "tiny" has 270k parameters and almost no computation.
Other frameworks need the extra "bench": pfl, fluke, byzfl, flower.
Numbers are "median [smallest, largest]".
"""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "models": {"overhead": ["tiny"], "memory": ["resnet20"], "scale": ["tiny"], "gpu": ["resnet20"]},
    "contenders": {
        "scale": ["naive", "sequential", "ranks"],
        "memory": list(FRAMEWORKS),
        "gpu": list(ON_CUDA[1:]),
    },
    "repeats": {"overhead": 7},
    "device": {"gpu": "cuda"},
}

_ABLE = {"memory": FRAMEWORKS, "scale": FRAMEWORKS, "gpu": ON_CUDA[1:]}
"""Accepted contenders, for commands that do not accept all contenders."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"benchmarks: {message}\n")


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check a command line; options that are not given get the command's defaults."""
    parser = _parser()
    options = parser.parse_args(args)
    able = ON_CUDA if options.device == "cuda" else NAMES
    everywhere = {"models": ["tiny", "resnet20"], "contenders": list(able), "repeats": 3, "device": "cpu"}
    for name, usual in everywhere.items():
        if getattr(options, name) is None:
            setattr(options, name, _DEFAULTS[name].get(options.command, usual))
    _check(parser, options)
    if options.device == "cuda":
        options.threads = [1]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "python -m benchmarks", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cores = os.cpu_count() or 1
    add("command", nargs="?", default="compare", choices=_COMMANDS)
    add("--workloads", nargs="+", choices=list(WORKLOADS), default=["W1", "W3"], help="W1 W3")
    add(
        "--models",
        nargs="+",
        choices=list(MODELS),
        help="tiny resnet20 (overhead, scale: tiny; memory, gpu: resnet20)",
    )
    add("--contenders", nargs="+", choices=[*NAMES, *GRAPHS], help="all (scale: naive sequential ranks)")
    add(
        "--device",
        choices=["cpu", "cuda"],
        help="device of the rounds, cpu (gpu: cuda); on cuda with one thread",
    )
    threads = [count for count in (1, 2) if count <= cores]
    add("--threads", nargs="+", type=int, default=threads, help="threads to try, 1 2; tables show the better")
    add("--repeats", type=int, help="repetitions, 3 (overhead: 7)")
    add(
        "--rounds",
        type=int,
        help="rounds in a repetition, 1 for W1 and W2, 100 for W3 (memory: 2; gpu: 10)",
    )
    add("--images", type=int, default=50_000, help="training images of all clients, 50000")
    add(
        "--factors",
        nargs="+",
        choices=list(FACTORS),
        default=list(FACTORS),
        help="factors that grow in scale, all",
    )
    add("--budget", type=float, default=60.0, help="scale: most seconds for a contender at a point, 60")
    add("--rules", nargs="+", choices=list(aggregation.RULES), default=list(aggregation.RULES), help="all")
    add("--columns", type=int, default=270_000, help="numbers that a client sends, 270000 (ResNet-20)")
    add("--memory-columns", type=int, default=1_000_000, help="the same for the memory of rules, 1000000")
    add("--json", type=Path, metavar="FILE", help="write the results to this file as well")
    add(
        "--results",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files to draw with chart, written by --json of one command",
    )
    add("--picture", type=Path, metavar="FILE", help="PNG file that chart writes")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("repeats", "rounds", "columns", "memory_columns"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name.replace('_', '-')}: {value} must be at least 1")
    for count in options.threads:
        if not 1 <= count <= (os.cpu_count() or 1):
            parser.error(
                f"argument --threads: {count} is not from 1 to the {os.cpu_count()} cores of this machine"
            )
    for name in options.contenders:
        able = _ABLE.get(options.command, (*NAMES, *GRAPHS) if options.device == "cuda" else NAMES)
        if name not in able:
            parser.error(f"argument --contenders: {options.command} cannot run {name}; use {', '.join(able)}")
    if options.device == "cuda" and options.command not in ("compare", "gpu"):
        parser.error(
            f"argument --device: {options.command} runs on the CPU only; cuda is for compare and gpu"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"argument --device: cuda is not available; torch {torch.__version__} finds no CUDA device, use cpu"
        )
    missing = [name for name in options.contenders if not present(name)]
    if options.command == "scale" and missing:
        parser.error(
            f"argument --contenders: {missing[0]} is not installed; pip install 'fl_lightning[bench]' installs it"
        )
    if options.budget <= 0:
        parser.error(f"argument --budget: {options.budget} must be above 0 seconds")
    clients = max(WORKLOADS[name].num_clients for name in options.workloads)
    clients = 1000 if options.command == "scale" and "clients" in options.factors else clients
    needed = BATCH_SIZE * clients
    if options.images < needed:
        parser.error(
            f"argument --images: {options.images} are too few for a batch of {BATCH_SIZE} for every client; use at least {needed}"
        )
    for name in ("json", "picture"):
        path = getattr(options, name)
        if path and not path.absolute().parent.is_dir():
            parser.error(f"argument --{name}: there is no folder {path.absolute().parent}; create it first")
    if options.command == "chart":
        _check_chart(parser, options)


def _check_chart(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.results or not options.picture:
        parser.error("chart needs --results FILE and --picture FILE, such as benchmarks/whole_rounds.png")
    commands = set()
    for path in options.results:
        try:
            commands.add(json.loads(path.read_text())["command"])
        except (OSError, ValueError, KeyError, TypeError):
            parser.error(f"argument --results: {path} is no file of --json; write one with compare or scale")
    if commands not in ({"compare"}, {"scale"}):
        parser.error(
            f"argument --results: files of {', '.join(sorted(commands))}; give files of only one command, compare or scale"
        )
