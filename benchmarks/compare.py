"""Whole rounds: the naive loop and the framework with each executor, in turn."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.contenders import EXECUTORS, Framework, NaiveLoop
from benchmarks.stopwatch import Spread
from benchmarks.workloads import WORKLOADS, SyntheticImages, make_model

CLOCKS = ("wall", "cpu")


def compare(
    workload_name: str,
    model_name: str,
    num_images: int,
    repeats: int,
    rounds: int | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time all contenders on a workload with a model, alternating.

    Each repetition runs naive, sequential, vectorized; a ratio is taken within a repetition, so what slows the machine
    for a while slows both of its sides. One round of each beforehand is not counted, unless a round is long.

    Args:
        workload_name: A name of ``WORKLOADS``.
        model_name: A name of ``MODELS``.
        num_images: Training images of all clients together.
        repeats: Number of repetitions.
        rounds: Rounds of each contender in a repetition; None for the workload's own.
        say: Told about the progress.

    Returns:
        Spreads: ``ms_per_client_step[contender][clock]`` and, as the naive loop's time divided by a contender's,
        ``speedup[contender][clock]``.
    """
    workload = WORKLOADS[workload_name]
    rounds = rounds or workload.rounds
    say(f"{workload_name} {model_name}: {num_images:,} images over {workload.num_clients} clients")
    data = SyntheticImages(num_images, workload.num_clients)
    data.setup("fit")
    contenders: dict[str, NaiveLoop | Framework] = {
        "naive": NaiveLoop(workload, make_model(model_name), data)
    }
    for name, executor in EXECUTORS.items():
        contenders[name] = Framework(workload, make_model(model_name), data, executor())
    if model_name == "tiny" or workload.client_steps < 50:
        for contender in contenders.values():
            contender.run(1)
    times: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in CLOCKS} for name in contenders}
    for repetition in range(1, repeats + 1):
        for name, contender in contenders.items():
            watch = contender.run(rounds).total
            for clock in CLOCKS:
                times[name][clock].append(1000 * getattr(watch, clock) / (rounds * workload.client_steps))
            say(f"  {repetition}/{repeats} {name:<10} {times[name]['wall'][-1]:8.2f} ms per client step")
    return {
        "workload": workload_name,
        "model": model_name,
        "repeats": repeats,
        "rounds": rounds,
        "ms_per_client_step": {
            name: {clock: Spread.of(values) for clock, values in clocks.items()}
            for name, clocks in times.items()
        },
        "speedup": {
            name: {clock: Spread.of(_ratios(times["naive"][clock], times[name][clock])) for clock in CLOCKS}
            for name in EXECUTORS
        },
    }


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """The results as the lines of a Markdown table."""
    yield "| workload | model | | CPU ms per client step | naive / this | wall ms per client step | naive / this |"
    yield "|---" * 7 + "|"
    for result in results:
        for name, clocks in result["ms_per_client_step"].items():
            speedups = result["speedup"].get(name, {"cpu": "1", "wall": "1"})
            cells = [f"{clocks[clock]} | {speedups[clock]}" for clock in ("cpu", "wall")]
            yield f"| {result['workload']} | {result['model']} | {name} | {' | '.join(cells)} |"


def _ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    return [above / below for above, below in zip(numerators, denominators, strict=True)]
