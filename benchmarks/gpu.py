"""Timings on a CUDA device: W1 against the naive loop, a full run, and single local steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.compare import compare
from benchmarks.recipe import BATCH_SIZE
from benchmarks.roster import enter
from benchmarks.stopwatch import Spread
from benchmarks.workloads import SyntheticImages, Workload

EPOCHS, TRAINING_IMAGES = 128, 50_000

FULL = Workload(num_clients=5, cohort_size=5, local_steps=100, rounds=10)
"""The federation of a full run: five clients, as in the BN papers' runs on CIFAR-10."""

ROUNDS_OF_A_RUN = EPOCHS * TRAINING_IMAGES // (FULL.client_steps * BATCH_SIZE)


def gpu(
    model_name: str,
    executors: Sequence[str],
    num_images: int,
    repeats: int,
    rounds: int | None,
    say: Callable[[str], None],
    device: str = "cuda",
) -> dict[str, Any]:
    """Time the framework's executors and the naive loop on a device.

    The time of a full run is extrapolated from some of its rounds. The extrapolation also
    multiplies work that a ``fit`` does only once after its clock has started. Runs have no
    evaluation, logger or checkpoints.

    Args:
        model_name: A name of ``recipe.MODELS``.
        executors: Names of ``roster.ON_CUDA`` without the naive loop.
        num_images: Training images of all clients together.
        repeats: Number of repetitions.
        rounds: Rounds of each measurement. With one local step a round, 100 times as many rounds
            are run. Default: 10.
        say: Function that prints a line of progress.
        device: ``"cuda"``, or ``"cpu"`` for a trial.

    Returns:
        A dict with the settings and these keys.

        - ``w1``: the result of ``compare.compare`` on workload W1.
        - ``full_run[executor]``: spread of the seconds for 128 epochs over 50,000 images,
          extrapolated from the measured rounds.
        - ``single_steps[executor]``: spread of a ratio, the time per sample with one local step a
          round divided by the time per sample with 100 local steps.
    """
    rounds = rounds or FULL.rounds
    w1 = compare("W1", model_name, executors, [1], num_images, repeats, rounds, say, device)
    data = SyntheticImages(num_images, FULL.num_clients)
    data.setup("fit")
    sides = {"E=100": FULL, "E=1": replace(FULL, local_steps=1)}
    contenders = {
        (name, side): enter(name, workload, model_name, data, device)
        for name in executors
        for side, workload in sides.items()
    }
    for contender in contenders.values():
        contender.run(1)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in contenders}
    for repetition in range(1, repeats + 1):
        for (name, side), contender in contenders.items():
            # both sides take the same number of client steps
            taken = contender.run(rounds * FULL.local_steps // sides[side].local_steps).total.wall
            seconds[name, side].append(taken)
            say(
                f"  {repetition}/{repeats} {name:<10} {side:<5} {1000 * taken / (rounds * FULL.client_steps):8.2f} ms per client step"
            )
    full = {name: seconds[name, "E=100"] for name in executors}
    single = {name: seconds[name, "E=1"] for name in executors}
    return {
        "model": model_name,
        "device": device,
        "repeats": repeats,
        "rounds": rounds,
        "w1": w1,
        "full_run": {
            name: Spread.of([each * ROUNDS_OF_A_RUN / rounds for each in full[name]]) for name in executors
        },
        "single_steps": {
            name: Spread.of([one / many for one, many in zip(single[name], full[name], strict=True)])
            for name in executors
        },
    }


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the results."""
    measured = results[0]["rounds"]
    columns = (
        "W1: naive / this",
        f"{EPOCHS} epochs, s (5 clients, E=100; from {measured} of {ROUNDS_OF_A_RUN} rounds)",
        "time per sample, E=1 / E=100",
    )
    yield f"| device | model | executor | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 3) + "|"
    for result in results:
        for name, run in result["full_run"].items():
            cells = [str(result["w1"]["speedup"][name]["wall"]), str(run), str(result["single_steps"][name])]
            yield f"| {result['device']} | {result['model']} | {name} | {' | '.join(cells)} |"
