"""Timing of whole rounds: the naive loop, this framework's executors and other frameworks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.contenders import COMPILED, OURS, Contender
from benchmarks.recipe import BATCH_SIZE
from benchmarks.roster import (
    MULTI_PROCESS,
    NAMES,
    ON_CUDA,
    PEERS,
    bound_of,
    enter,
    present,
    version,
)
from benchmarks.stopwatch import Spread
from benchmarks.workloads import WORKLOADS, SyntheticImages

CLOCKS = ("wall", "cpu")


def compare(
    workload_name: str,
    model_name: str,
    names: Sequence[str],
    threads: Sequence[int],
    num_images: int,
    repeats: int,
    rounds: int | None,
    say: Callable[[str], None],
    device: str = "cpu",
) -> dict[str, Any]:
    """Time contenders on a workload with a model.

    - Each repetition runs all contenders in turn. Ratios are computed within a repetition, so that
      both of their times are long if the machine is slow for a while.
    - Before the first repetition, a contender runs a warm-up round that is not timed, if its rounds
      are short or compile.
    - A contender with one process runs with each number of threads. The number with the smallest
      median wall time is reported. A number that takes more than four times as long as another
      number in the first repetition is not run again.

    Args:
        workload_name: A name of ``WORKLOADS``.
        model_name: A name of ``recipe.MODELS``.
        names: Names of ``roster.NAMES``; the naive loop always runs, and first.
        threads: Numbers of threads to try.
        num_images: Training images of all clients together.
        repeats: Number of repetitions.
        rounds: Rounds of each contender in a repetition. Default: the workload's ``rounds``.
        say: Function that prints a line of progress.
        device: ``"cpu"`` or ``"cuda"``; on ``"cuda"`` contenders outside ``roster.ON_CUDA`` are
            left out.

    Returns:
        A dict with the settings and these keys. The values of the first four keys are spreads.

        - ``ms_per_client_step[contender][clock]``: milliseconds per client step.
        - ``speedup[contender][clock]``: the naive loop's time divided by the contender's.
        - ``ahead[executor][other]``: the other contender's wall time divided by the executor's.
        - ``compute_share[executor]``: the wall time of the executor's bound (``roster.bound_of``)
          divided by the executor's; only for bounds among the contenders.
        - ``ms``: all measurements, by contender and clock.
        - ``threads``: the reported number of threads of each contender.
        - ``versions``: the versions of the other frameworks.
        - ``missing``: the frameworks that are not installed.
    """
    workload = WORKLOADS[workload_name]
    rounds = rounds or workload.rounds
    say(f"{workload_name} {model_name}: {num_images:,} images over {workload.num_clients} clients")
    able = [name for name in names if name in (NAMES if device == "cpu" else ON_CUDA)]
    if able != list(names):
        say(f"  not on {device}, left out: {', '.join(name for name in names if name not in able)}")
    data = SyntheticImages(num_images, workload.num_clients)
    data.setup("fit")
    running = ["naive", *(name for name in able if name != "naive" and present(name))]
    contenders = {name: enter(name, workload, model_name, data, device) for name in running}
    variants = [(name, count) for name in running for count in ([1] if name in MULTI_PROCESS else threads)]
    before = torch.get_num_threads()
    try:
        short = model_name == "tiny" or workload.client_steps < 50 or device == "cuda"
        for name, count in variants:
            if short or name in COMPILED:
                _run(contenders[name], 1, count)
        taken = _alternate(contenders, variants, repeats, rounds, rounds * workload.client_steps, say)
    finally:
        torch.set_num_threads(before)
    walls = {variant: Spread.of(clocks["wall"]).median for variant, clocks in taken.items()}
    best = {
        name: min((walls[variant], variant[1]) for variant in variants if variant[0] == name)[1]
        for name in running
    }
    ms = {name: taken[name, count] for name, count in best.items()}
    return {
        "workload": workload_name,
        "model": model_name,
        "device": device,
        "repeats": repeats,
        "rounds": rounds,
        "threads": best,
        "versions": {name: version(name) for name in running if name in PEERS},
        "missing": [name for name in able if not present(name)],
        "ms": ms,
        "ms_per_client_step": {
            name: {clock: Spread.of(values) for clock, values in clocks.items()}
            for name, clocks in ms.items()
        },
        "speedup": {
            name: {clock: Spread.of(_ratios(ms["naive"][clock], ms[name][clock])) for clock in CLOCKS}
            for name in running[1:]
        },
        "ahead": {
            own: {
                other: Spread.of(_ratios(ms[other]["wall"], ms[own]["wall"]))
                for other in running
                if other == "naive" or other in PEERS
            }
            for own in running
            if own in OURS
        },
        "compute_share": {
            own: Spread.of(_ratios(ms[bound_of(own)]["wall"], ms[own]["wall"]))
            for own in running
            if own in OURS and bound_of(own) in running
        },
    }


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, and of a second table if other frameworks were timed."""
    columns = [
        "wall ms per client step",
        "naive / this",
        "samples/s",
        "CPU ms per client step",
        "samples per CPU second",
    ]
    with_compute = any(result["compute_share"] for result in results)
    if with_compute:
        columns.append("forward + backward on all cores / this")
    yield f"| workload | model | | threads | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 4) + "|"
    for result in results:
        start = f"| {result['workload']} | {result['model']} |"
        for name, clocks in result["ms_per_client_step"].items():
            ms = result["ms"][name]
            cells = [
                label(name, result),
                "1 a process" if name in MULTI_PROCESS else str(result["threads"][name]),
                str(clocks["wall"]),
                str(result["speedup"][name]["wall"]) if name in result["speedup"] else "1",
                str(_rate(ms["wall"])),
                str(clocks["cpu"]),
                str(_rate(ms["cpu"])),
            ]
            if with_compute:
                cells.append(str(result["compute_share"].get(name, "-")))
            yield f"{start} {' | '.join(cells)} |"
        for name in result["missing"]:
            yield f"{start} {name} | not installed{' |' * len(columns)} |"
    if any(result["versions"] for result in results):
        yield from _ahead_table(results)


def label(name: str, result: dict[str, Any]) -> str:
    """Return a contender's name; for another framework, add the version."""
    return f"{name} {result['versions'][name]}" if name in result["versions"] else name


def _ahead_table(results: list[dict[str, Any]]) -> Iterator[str]:
    others = list(
        dict.fromkeys(other for result in results for row in result["ahead"].values() for other in row)
    )
    yield ""
    yield f"| workload | model | wall time of ... / ours | {' | '.join(others)} |"
    yield "|---" * (len(others) + 3) + "|"
    for result in results:
        for own, row in result["ahead"].items():
            cells = [str(row.get(other, "-")) for other in others]
            yield f"| {result['workload']} | {result['model']} | {own} | {' | '.join(cells)} |"


def _alternate(
    contenders: dict[str, Contender],
    variants: Sequence[tuple[str, int]],
    repeats: int,
    rounds: int,
    steps: int,
    say: Callable[[str], None],
) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Return ms per client step of all repetitions, by (contender, threads) and by clock."""
    taken: dict[tuple[str, int], dict[str, list[float]]]
    taken = {variant: {clock: [] for clock in CLOCKS} for variant in variants}
    for repetition in range(1, repeats + 1):
        for (name, count), clocks in taken.items():
            if repetition > 1 and clocks["wall"][0] > 4 * min(_first(taken, name)):
                continue  # on a busy machine the threads mostly wait for each other
            watch = _run(contenders[name], rounds, count)
            for clock in CLOCKS:
                clocks[clock].append(1000 * getattr(watch, clock) / steps)
            of = f"{name}, {count} thread{'s' if count > 1 else ''}"
            say(f"  {repetition}/{repeats} {of:<22} {clocks['wall'][-1]:8.2f} ms per client step")
    return taken


def _first(taken: dict[tuple[str, int], dict[str, list[float]]], name: str) -> list[float]:
    """Return a contender's wall times in the first repetition, one for each number of threads."""
    return [clocks["wall"][0] for (each, _), clocks in taken.items() if each == name]


def _run(contender: Contender, rounds: int, threads: int) -> Any:
    torch.set_num_threads(threads)
    return contender.run(rounds).total


def _rate(milliseconds: Sequence[float]) -> Spread:
    """Return the spread of samples per second, from milliseconds per client step."""
    return Spread.of([1000 * BATCH_SIZE / each for each in milliseconds])


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [above / below for above, below in zip(numerators, denominators, strict=True)]
