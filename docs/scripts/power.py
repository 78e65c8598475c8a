"""Simulate verdicts for the table of docs/verdicts.md: ``python docs/scripts/power.py``.

The script writes the table between the comments ``<!-- power -->`` and ``<!-- end of power -->``. A
simulated study has three methods, A, B and C. All cells have the same standard deviation. The
differences between the means of the methods are given in units of this standard deviation.
"""

from pathlib import Path

import numpy as np
from generated import replaced
from numpy.typing import NDArray
from scipy.stats import t

from fl_lightning.experiments.studies.verdicts import FAMILY_ERROR

PAGE = Path(__file__).parents[1] / "verdicts.md"
SEEDS = (3, 5, 10)
DIFFERENCES = (0.0, 1.0, 2.0, 3.0, 4.0)
STUDIES = 20_000


def decided(seeds: int, difference: float) -> tuple[float, float]:
    """Return two shares for simulated studies.

    The first is the share of claims that are decided correctly. The second is the share of studies
    with at least one wrong verdict.

    Args:
        seeds: Number of pairs of runs for each claim.
        difference: Difference between the means of A and B, and also between the means of B and C.
            The unit is the standard deviation of a cell.
    """
    cells = np.random.default_rng(0).normal(size=(STUDIES, 3, seeds)) + difference * np.arange(3)[:, None]
    pairs = np.stack([cells[:, 1] - cells[:, 0], cells[:, 2] - cells[:, 1], cells[:, 2] - cells[:, 0]], 1)
    ratio = pairs.mean(-1) / (pairs.std(-1, ddof=1) / seeds**0.5)
    p = 2 * t.sf(np.abs(ratio), seeds - 1)
    order = p.argsort(1)
    passed = np.take_along_axis(p, order, 1) <= FAMILY_ERROR / np.arange(3, 0, -1)
    rejected: NDArray[np.bool_] = np.empty_like(passed)
    np.put_along_axis(rejected, order, np.logical_and.accumulate(passed, 1), 1)
    right = rejected & (ratio > 0) & (difference > 0)
    return float(right.mean()), float((rejected & ~right).any(1).mean())


def table() -> str:
    """Return the table in Markdown. It has one row for each number of seeds."""
    head = " | ".join(f"{difference:g}" for difference in DIFFERENCES)
    lines = [f"| seeds | {head} | wrong |", "|---" * (len(DIFFERENCES) + 2) + "|"]
    for seeds in SEEDS:
        shares = [decided(seeds, difference) for difference in DIFFERENCES]
        right = " | ".join(
            "-" if not x else f"{share:.0%}" for x, (share, _) in zip(DIFFERENCES, shares, strict=True)
        )
        lines.append(f"| {seeds} | {right} | {max(wrong for _, wrong in shares):.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(replaced("power", PAGE.read_text(), table()))
