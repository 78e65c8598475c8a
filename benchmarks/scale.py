"""Cost against scale: timings in which one factor of workload W1 is changed at a time."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.contenders import Contender
from benchmarks.roster import enter
from benchmarks.stopwatch import Spread
from benchmarks.workloads import WORKLOADS, SyntheticImages, Workload

FACTORS = {
    "clients": "clients, all of them in each round",
    "participation": "clients in a round, of 100",
    "local_steps": "local steps E",
    "model": "model",
}
"""The factors, with their names in tables and figures."""

_BASE = WORKLOADS["W1"]
_FEDERATIONS: dict[str, dict[int, Workload]] = {
    "clients": {n: replace(_BASE, num_clients=n, cohort_size=n) for n in (5, 10, 50, 100, 500, 1000)},
    "participation": {n: replace(_BASE, num_clients=100, cohort_size=n) for n in (1, 10, 50, 100)},
    "local_steps": {steps: replace(_BASE, local_steps=steps) for steps in (1, 5, 20, 100, 500, 2500)},
}
_MODELS = ("lenet", "resnet8", "resnet20", "resnet32", "resnet18")


def scale(
    factors: Sequence[str],
    model_name: str,
    names: Sequence[str],
    num_images: int,
    repeats: int,
    budget: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time contenders on one thread while the federation or the model grows.

    Each point is a workload with a model. Short rounds are repeated, so that every measurement has
    about as many client steps as a round of W1.

    A contender skips a point, and all further points of the factor, if the measurement would take
    longer than the budget. The estimate uses the contender's last point with the same model. For
    the first point of a model, one local step of each client is timed instead.

    Args:
        factors: Names of ``FACTORS``.
        model_name: The model of all factors but ``"model"``, a name of ``recipe.MODELS``.
        names: Names of ``roster.NAMES``.
        num_images: Training images of all clients together.
        repeats: Number of repetitions; contenders alternate.
        budget: Seconds that a contender's measurements at one point may take.
        say: Function that prints a line of progress.

    Returns:
        A dict with the settings and ``points``. A point has ``factor``, ``value``, ``model`` and
        ``ms_per_client_step[contender]``, the spread of the wall time. Contenders over the budget
        are missing there.
    """
    points = []
    known: dict[tuple[str, str], float] = {}  # seconds per client step by (contender, model)
    for factor in factors:
        left = list(names)
        for value, workload, model in _points(factor, model_name):
            data = SyntheticImages(num_images, workload.num_clients)
            data.setup("fit")
            taken: dict[str, list[float]] = {}
            contenders = {}
            for name in list(left):
                if (name, model) not in known:
                    one_step = replace(workload, local_steps=1)
                    known[name, model] = _seconds_per_step(enter(name, one_step, model, data), one_step, 1)
                expected = known[name, model] * workload.client_steps * _rounds(workload) * repeats
                if expected > budget:
                    left.remove(name)
                    say(f"  {factor} {value} {name:<10} would take about {expected:,.0f} s: left out")
                else:
                    contenders[name] = enter(name, workload, model, data)
                    taken[name] = []
            for _ in range(repeats):
                for name, contender in contenders.items():
                    taken[name].append(1000 * _seconds_per_step(contender, workload, _rounds(workload)))
            spreads = {name: Spread.of(measured) for name, measured in taken.items()}
            for name, spread in spreads.items():
                known[name, model] = spread.median / 1000
                say(f"  {factor} {value} {name:<10} {spread} ms per client step")
            points.append({"factor": factor, "value": value, "model": model, "ms_per_client_step": spreads})
            contenders.clear()
            gc.collect()  # a Trainer and its data are in a reference cycle
            if not left:
                break
    return {
        "model": model_name,
        "repeats": repeats,
        "budget": budget,
        "contenders": list(names),
        "points": points,
    }


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: milliseconds of wall time per client step."""
    names = results[0]["contenders"]
    yield f"| what changes | | model | {' | '.join(f'{name}, ms' for name in names)} |"
    yield "|---" * (len(names) + 3) + "|"
    for result in results:
        for point in result["points"]:
            cells = [str(point["ms_per_client_step"].get(name, "over budget")) for name in names]
            yield f"| {FACTORS[point['factor']]} | {point['value']} | {point['model']} | {' | '.join(cells)} |"


def _points(factor: str, model_name: str) -> Iterator[tuple[int | str, Workload, str]]:
    if factor == "model":
        yield from ((model, _BASE, model) for model in _MODELS)
    else:
        yield from ((value, workload, model_name) for value, workload in _FEDERATIONS[factor].items())


def _rounds(workload: Workload) -> int:
    """Return the number of rounds that have about as many client steps as one round of W1."""
    return max(1, _BASE.client_steps // workload.client_steps)


def _seconds_per_step(contender: Contender, workload: Workload, rounds: int) -> float:
    torch.set_num_threads(1)
    return contender.run(rounds).total.wall / (rounds * workload.client_steps)
