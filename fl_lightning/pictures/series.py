"""Metrics of a run as arrays, and curves of metrics over the rounds."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

MetricRows = Sequence[Mapping[str, float]]
"""Rows of ``metrics.jsonl``."""

Series = NDArray[np.float64]

MAX_POINTS = 500
"""Maximum number of points of a curve. In a longer series, groups of points are averaged."""

_LARGEST = 1e30  # matplotlib cannot draw larger values; such values occur if training diverges


def series(rows: MetricRows, name: str) -> tuple[Series, Series]:
    """Return the rounds in which the metric ``name`` was logged, and the metric's values."""
    pairs = [(float(row["round"]), float(row[name])) for row in rows if name in row]
    rounds, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return rounds, values


def frozen_from(rows: MetricRows) -> int | None:
    """Return the first round with frozen BN, which is T* + 1; None if no row contains T*.

    Methods log T* under a name that ends with ``/freeze_round``. If rows contain different T*, the
    last row counts.
    """
    starts = [int(row[name]) + 1 for row in rows for name in row if name.endswith("/freeze_round")]
    return starts[-1] if starts else None


def with_gaps(values: Series) -> Series:
    """Replace values that are above 1e30 or not finite by NaN."""
    return np.where(np.abs(values) <= _LARGEST, values, np.nan)


def draw_curve(axes: Axes, places: Series, values: Series, look: tuple[str, str, str], label: str) -> Series:
    """Draw a curve and return its finite values.

    The curve has a gap at each value that is above 1e30 or not finite. A cross at the upper edge
    marks the gap.

    Args:
        axes: Panel of the curve.
        places: Horizontal positions.
        values: Values at the horizontal positions.
        look: Colour, line style and marker.
        label: Label of the curve. The part before a colon also labels the crosses.
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


def scale_values(axes: Axes, drawn: Sequence[Series], reach: float = 0.0, share: bool = False) -> None:
    """Make the y-axis logarithmic if the largest value is more than 50 times the smallest.

    Values of 0 do not count as the smallest, but are shown. If a value is negative, the axis stays
    linear.

    Args:
        axes: Panel of the curves.
        drawn: Values of each curve.
        reach: Value that a logarithmic axis includes in any case (default 0).
        share: Whether the axis of values in [0, 1], such as accuracies, starts at 0 and is linear
            (default False).
    """
    values = np.concatenate([*drawn, []])
    if share and values.min(initial=0) >= 0 and values.max(initial=0) <= 1:
        axes.set_ylim(0, min(1.15 * values.max(initial=0), 1.03) or 1.03)
        return
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
