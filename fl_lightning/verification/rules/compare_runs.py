"""Comparison of recorded runs."""

from collections.abc import Iterator
from typing import Any

from fl_lightning.verification.differences import (
    TOLERANCE,
    difference,
    largest_difference,
)
from fl_lightning.verification.observation import ObservedRun
from fl_lightning.verification.renumbering import (
    memory_apart,
)
from fl_lightning.verification.rules.registry import Violations


def differing_rounds(
    first: ObservedRun, second: ObservedRun, demand: str, compare_memory: Any = memory_apart
) -> Violations:
    """Yield how two runs differ by more than rounding errors in a round; return the largest difference.

    Args:
        first: A run.
        second: A run with the same rounds.
        demand: What must hold, for the message.
        compare_memory: Function that compares the method's memory in two rounds.
    """
    worst = 0.0
    for one, two in zip(first.rounds, second.rounds, strict=True):
        gaps = {
            "the server": largest_difference(one.server, two.server),
            "the method's memory": compare_memory(one, two),
        }
        for whose, (gap, place) in gaps.items():
            if not gap <= TOLERANCE:
                yield f"{demand}: {place} of {whose} differs by {gap:.2g} after {one}"
            worst = max(worst, gap)
    return f"distance {worst:.1g}"


def outcome(run: ObservedRun) -> dict[str, object]:
    """Return all that a run has computed: model, server optimizer, memory and metrics."""
    last = run.rounds[-1]
    return {
        "model": last.server,
        "server optimizer": run.trainer.optimizers[0].state_dict(),
        "state_dict": last.memory,
        "metrics": last.metrics,
    }


def unequal_runs(first: ObservedRun, second: ObservedRun, demand: str) -> Iterator[str]:
    """Yield how two runs differ, bit for bit."""
    if place := difference(outcome(first), outcome(second)):
        gap, name = largest_difference(first.rounds[-1].server, second.rounds[-1].server)
        yield f"{demand}: " + (f"model {name} differs by {gap:.2g}" if gap else f"{place} differs")
