"""Searches for the most harmful factor of an attack."""

from collections.abc import Callable
from typing import Literal

Search = Literal["fixed", "byzfl", "grid"]

GRID = [step / 20 for step in range(101)]
"""The factors of ``grid``: 0, 0.05, ..., 5."""


def search(harm: Callable[[float], float], how: Search) -> float:
    """Return the factor with the greatest harm found, at least the harm of the factor 0.

    Args:
        harm: Harm of a factor, such as the distance between the aggregate and the honest mean.
        how: ``"grid"``: all of :data:`GRID`. ``"byzfl"``: the heuristic of the ByzFL library, 20
            evaluations from 0 upwards. The step starts at 10 and doubles until a step does not
            increase the harm; then each step is 0.8 times the previous one.
    """
    if how == "grid":
        return max(GRID, key=harm)
    best, most, step, growing = 0.0, harm(0.0), 10.0, True
    for _ in range(19):
        new = harm(best + step)
        better = new > most
        if better:
            best, most = best + step, new
        growing &= better
        step *= 2 if growing else 0.8
    return best
