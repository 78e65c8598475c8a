"""The factor of an attack that harms most: searches over one number."""

from collections.abc import Callable
from typing import Literal

Search = Literal["fixed", "byzfl", "grid"]

GRID = [step / 20 for step in range(101)]
"""The factors of ``grid``: 0, 0.05, ..., 5."""


def search(harm: Callable[[float], float], how: Search) -> float:
    """The factor with the greatest harm that a search finds; never one that harms less than 0 does.

    Args:
        harm: What a factor does to the server, such as the distance between the aggregate and the honest mean.
        how: ``"byzfl"``: 20 evaluations from 0 upwards, as in the ByzFL library: steps double from 10 while each is better; after
            the first failure each is 0.8 of the one before, better or not. A heuristic. ``"grid"``: all of :data:`GRID`.
    """
    if how == "grid":
        return max(GRID, key=harm)
    best, most, step, growing = 0.0, harm(0.0), 10.0, True
    for _ in range(19):
        found = harm(best + step)
        better = found > most
        if better:
            best, most = best + step, found
        growing &= better
        step *= 2 if growing else 0.8
    return best
