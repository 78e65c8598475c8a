"""Search for the factor with which an attack does the most harm."""

from collections.abc import Callable
from typing import Literal

Search = Literal["fixed", "byzfl"]


def search(harm: Callable[[float], float]) -> float:
    """Return the tried factor that does the most harm.

    The returned factor does at least as much harm as the factor 0. This is the heuristic of the
    ByzFL library. It evaluates 20 factors, and starts with 0. The first step to a larger factor is
    10. The step doubles as long as the harm increases. After that, each step is 0.8 times the
    previous step.

    Args:
        harm: Function that returns the harm of a factor, such as the distance between the aggregate
            and the honest mean.
    """
    best, most, step, growing = 0.0, harm(0.0), 10.0, True
    for _ in range(19):
        new = harm(best + step)
        better = new > most
        if better:
            best, most = best + step, new
        growing &= better
        step *= 2 if growing else 0.8
    return best
