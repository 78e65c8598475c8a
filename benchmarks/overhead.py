"""The framework's own time: rounds minus passes, augmentation and optimizer arithmetic."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.compare import CLOCKS
from benchmarks.contenders import EXECUTORS, Framework, NaiveLoop
from benchmarks.floors import Floors
from benchmarks.inside import compute_watched
from benchmarks.recipe import make_model
from benchmarks.stopwatch import Spread, Stopwatch
from benchmarks.workloads import WORKLOADS, SyntheticImages

PARTS = ("forward + backward", "augmentation", "optimizer")

RUN = 100
"""Rounds of the run with which the check of the first steps is compared."""

SINGLE_PROCESS = ("sequential", "vectorized")
"""Executors that run in one process, so that ``PARTS`` can be timed alone."""


def overhead(
    workload_name: str,
    model_name: str,
    num_images: int,
    repeats: int,
    rounds: int | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time whole rounds of the naive loop and of the framework, and each of ``PARTS`` alone.

    Args:
        workload_name: A name of ``WORKLOADS``.
        model_name: A name of ``MODELS``.
        num_images: Training images of all clients together.
        repeats: Number of repetitions.
        rounds: Rounds of each measurement. Default: the workload's ``rounds``.
        say: Function that prints a line of progress.

    Returns:
        A dict with the settings and spreads. ``naive[clock]`` is the naive loop's time in ms per
        client step. ``executors[name][clock][key]`` has these keys:

        - ``total`` and each of ``PARTS``: ms per client step.
        - ``own``: ``total`` minus the parts, which are timed alone.
        - ``own, inside``: ``total`` minus the parts, which are timed inside the rounds of a second
          run.
        - ``own / naive`` and ``inside / naive``: these two times divided by the naive loop's time.
        - ``inside / naive, strict``: the same as ``inside / naive``, but the reset of the client
          optimizers' state and the server optimizer's step count as own time.
        - ``Trainer per round``: ms per round outside ``training_step``.
        - ``first steps``: ms of the check of a run's first steps.
        - ``first steps / run``: the share of this check in the time of a run of 100 rounds.
    """
    workload = WORKLOADS[workload_name]
    rounds = rounds or workload.rounds
    say(f"{workload_name} {model_name}: {num_images:,} images over {workload.num_clients} clients")
    data = SyntheticImages(num_images, workload.num_clients)
    data.setup("fit")
    naive = NaiveLoop(workload, make_model(model_name), data)
    frameworks = {
        name: Framework(workload, make_model(model_name), data, EXECUTORS[name]()) for name in SINGLE_PROCESS
    }
    floors = Floors(workload, make_model(model_name), data)
    naive.run(1)
    for framework in frameworks.values():
        framework.run(1)
    steps = rounds * workload.client_steps
    naive_times: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
    rows: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {clock: [] for clock in CLOCKS} for name in SINGLE_PROCESS
    }
    for repetition in range(1, repeats + 1):
        watch = naive.run(rounds).total
        for clock in CLOCKS:
            naive_times[clock].append(1000 * getattr(watch, clock) / steps)
        for name, framework in frameworks.items():
            timing = framework.run(rounds)
            parts = (
                floors.forward_backward(name, rounds),
                floors.augmentation(rounds),
                floors.optimizer(rounds),
            )
            for clock in CLOCKS:
                row = _row(timing.total, parts, clock, steps)
                row["own / naive"] = row["own"] / naive_times[clock][-1]
                outside = getattr(timing.total, clock) - getattr(timing.in_rounds, clock)
                row["Trainer per round"] = 1000 * outside / rounds
                rows[name][clock].append(row)
            check = framework.first_steps()
            for clock in CLOCKS:
                row, seconds = rows[name][clock][-1], getattr(check, clock)
                row["first steps"] = 1000 * seconds
                row["first steps / run"] = seconds / (seconds + RUN * getattr(timing.total, clock) / rounds)
            with compute_watched() as inside:
                whole = framework.run(rounds).total
            for clock in CLOCKS:
                row = rows[name][clock][-1]
                own = getattr(whole, clock) - getattr(inside.steps, clock)
                row["own, inside"] = 1000 * (own - getattr(inside.once_a_round, clock)) / steps
                row["inside / naive"] = row["own, inside"] / naive_times[clock][-1]
                row["inside / naive, strict"] = 1000 * own / steps / naive_times[clock][-1]
            newest = rows[name]["cpu"][-1]
            say(
                f"  {repetition}/{repeats} {name:<10} own {newest['own']:.3f}, inside {newest['own, inside']:.3f} CPU-ms, "
                f"naive {naive_times['cpu'][-1]:.2f}"
            )
    return {
        "workload": workload_name,
        "model": model_name,
        "repeats": repeats,
        "rounds": rounds,
        "naive": {clock: Spread.of(values) for clock, values in naive_times.items()},
        "executors": {
            name: {
                clock: {key: Spread.of([row[key] for row in measured]) for key in measured[0]}
                for clock, measured in clocks.items()
            }
            for name, clocks in rows.items()
        },
    }


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the processor times."""
    own = ("own", "own / naive", "own, inside", "inside / naive", "inside / naive, strict")
    columns = ("total", *PARTS, *own, "Trainer per round", "first steps", "first steps / run")
    yield f"| workload | model | executor | naive | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 4) + "|"
    for result in results:
        for name, clocks in result["executors"].items():
            cells = [str(clocks["cpu"][column]) for column in columns]
            naive = result["naive"]["cpu"]
            yield f"| {result['workload']} | {result['model']} | {name} | {naive} | {' | '.join(cells)} |"


def _row(total: Stopwatch, parts: tuple[Stopwatch, ...], clock: str, steps: int) -> dict[str, float]:
    row = {"total": getattr(total, clock)}
    row |= {name: getattr(part, clock) for name, part in zip(PARTS, parts, strict=True)}
    row["own"] = row["total"] - sum(row[name] for name in PARTS)
    return {key: 1000 * seconds / steps for key, seconds in row.items()}
