"""Numbers of a run over its rounds as arrays, and as curves with honest gaps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, float]]
"""Rows of ``metrics.jsonl``."""

Series = NDArray[np.float64]

MAX_POINTS = 500
"""Of more values than this a curve shows means of consecutive ones."""

_LARGEST = 1e30  # what is larger has diverged, and no axis can show it


def series(rows: Rows, name: str) -> tuple[Series, Series]:
    """The rounds that have a metric, and its values."""
    found = [(float(row["round"]), float(row[name])) for row in rows if name in row]
    rounds, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return rounds, values


def frozen_from(rows: Rows) -> int | None:
    """The first round with frozen BN, as the newest row knows it; None where no method has set or found one."""
    found = [int(row["fixbn/freeze_round"]) + 1 for row in rows if "fixbn/freeze_round" in row]
    return found[-1] if found else None


def with_gaps(values: Series) -> Series:
    """The values, with NaN for all that no axis can show."""
    return np.where(np.abs(values) <= _LARGEST, values, np.nan)


def draw_curve(
    axes: "Axes", places: Series, values: Series, look: tuple[str, str, str], label: str
) -> Series:
    """Draw a curve with gaps, and crosses at the upper edge, where values are not finite (or above 1e30).

    Args:
        axes: Where to draw.
        places: Where the values stand on the x-axis.
        values: The values.
        look: Colour, line and marker.
        label: What the legend says; a part behind a colon is left out beside the crosses.

    Returns:
        The values of the curve, without its gaps.
    """
    colour, line, marker = look
    values = with_gaps(values)
    width = -(-len(values) // MAX_POINTS)
    if width > 1:
        label += f" (means of {width})"
        starts = np.arange(0, len(values), width)
        sizes = np.diff(starts, append=len(values))
        places, values = np.add.reduceat(places, starts) / sizes, np.add.reduceat(values, starts) / sizes
    every = -(-len(values) // 20) or 1
    axes.plot(places, values, line, color=colour, marker=marker, markevery=every, label=label)
    gaps = np.isnan(values)
    if gaps.any():
        edge, upwards = np.full(gaps.sum(), 0.97), axes.get_xaxis_transform()
        text = f"{label.partition(':')[0]}: not finite"
        axes.plot(places[gaps], edge, "x", color=colour, transform=upwards, label=text)
    return values[~gaps]


def scale_values(axes: "Axes", drawn: Sequence[Series], reach: float = 0.0) -> None:
    """A logarithmic y-axis where no value is negative and the others span decades; it ends in a 0 where there is one.

    Args:
        axes: Whose scale it is.
        drawn: The values of each curve.
        reach: What the axis reaches to at least if it is logarithmic.
    """
    values = np.concatenate([*drawn, []])
    positive = values[values > 0]
    if not len(positive) or values.min() < 0:
        return
    highest = max(positive.max(), reach)
    smallest = max(positive.min(), 1e-12 * highest)
    if highest <= 50 * smallest:
        return
    if values.min() > 0:
        axes.set_yscale("log")
    else:
        foot = 10 ** np.floor(np.log10(smallest))
        axes.set_yscale("symlog", linthresh=foot)
        axes.locator_params(axis="y", numticks=5)
        axes.set_ylim(bottom=-0.3 * foot)
    axes.set_ylim(top=2 * highest)
    axes.set_ylabel(axes.get_ylabel() + "\n(log)")
