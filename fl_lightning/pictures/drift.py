"""Figures of BN statistics and gradients over the rounds, for the whole model and per layer."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fl_lightning.pictures.series import (
    MetricRows,
    Series,
    draw_curve,
    frozen_from,
    scale_values,
    series,
    with_gaps,
)
from fl_lightning.pictures.style import (
    BLACK,
    BLUE,
    DRIFT,
    LAYERS,
    LIGHT_GREY,
    VERMILLION,
    legend_above,
    literal,
    new_figure,
    paper_style,
)

ByLayer = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Measured values, indexed as ``values[quantity][round][layer]``."""

_LOOKS = ((BLUE, "-", "."), (VERMILLION, "--", "."), (BLACK, ":", "."))
_REACH = {
    "bn/gradient_deviation": 1.0,
    "gradient_deviation": 1.0,
}  # a metric's axis always includes this value, so that rounding errors look small


def has_drift(rows: MetricRows) -> bool:
    """Return whether the rows have the metrics that :func:`drift_figure` needs."""
    return any(key.startswith("bn/") for row in rows for key in row)


@paper_style()
def drift_figure(rows: MetricRows, title: Sequence[str]) -> Figure:
    """Draw the measurements of BN over the rounds, with a panel for each measured quantity.

    The quantities include the change, variance and bias of statistics, the gradient deviation, and
    the gap between training and evaluation.

    The figure follows Figure 3 of Zhong et al., arXiv 2303.06530. Each panel's heading says how to
    read the panel. A vertical line marks the first round with frozen BN.
    """
    measured = {name for row in rows for name in row}
    panels = [panel for panel in DRIFT if measured & panel.curves.keys()]
    figure = new_figure(1.6 * len(panels) + 0.2, title)
    stack = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    last, frozen = max(float(row["round"]) for row in rows), frozen_from(rows)
    for axes, (name, curves, heading, zero) in zip(stack, panels, strict=True):
        axes.set_ylabel(name)
        if zero:
            axes.axhline(0, color=LIGHT_GREY, linewidth=0.8, zorder=0, label="_")
        if frozen is not None and 1 < frozen <= last:
            label = f"BN frozen from round {frozen:,}" if axes is stack[0] else "_"
            axes.axvline(frozen - 0.5, color=LIGHT_GREY, linestyle="-.", zorder=0, label=label)
        drawn = [
            draw_curve(axes, *series(rows, metric), look, label)
            for (metric, label), look in zip(curves.items(), _LOOKS, strict=False)
            if metric in measured
        ]
        scale_values(axes, drawn, max(_REACH.get(metric, 0.0) for metric in curves))
        legend_above(axes, heading)
    stack[-1].set(xlim=(0, max(last, 1)), xlabel="communication round")
    stack[-1].locator_params(axis="x", integer=True)
    figure.align_ylabels()
    return figure


@paper_style()
def layers_figure(values: ByLayer, title: Sequence[str]) -> Figure:
    """Draw a heat map for each quantity that ``LAYERS`` lists.

    In a heat map, each row is a layer, and each column is a round.
    """
    maps = {quantity: _grid(values[quantity]) for quantity in LAYERS if values.get(quantity)}
    heights = [0.55 + 0.17 * max(len(names), 3) for _, names, _ in maps.values()]
    figure = new_figure(sum(heights) + 0.3, title)
    stack = figure.subplots(len(maps), squeeze=False, height_ratios=heights)[:, 0]
    last = max(rounds[-1] for rounds, *_ in maps.values())
    for axes, (quantity, (rounds, names, cells)) in zip(stack, maps.items(), strict=True):
        _draw_map(axes, rounds, cells, _REACH.get(quantity, 0.0))
        axes.set_yticks(range(len(names)), [literal(name) for name in names], fontsize=7)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_title(LAYERS[quantity], loc="left", fontsize=8.5)
        axes.set_xlim(right=max(last + 0.5, 1.5))
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    stack[-1].set_xlabel("communication round")
    return figure


def _grid(by_round: Mapping[int, Mapping[str, float]]) -> tuple[list[int], list[str], Series]:
    """Return the rounds, the measured layers, and the values in the shape ``[layers, rounds]``."""
    rounds = sorted(by_round)
    names = list(dict.fromkeys(name for number in rounds for name in by_round[number]))
    cells = [[by_round[number].get(name, np.nan) for number in rounds] for name in names]
    return rounds, names, np.array(cells)


def _draw_map(axes: Axes, rounds: Sequence[int], cells: Series, reach: float) -> None:
    """Draw a heat map, in which missing values are white.

    If the largest value is more than 20 times the smallest, the scale is logarithmic. Zeros are
    then white, too.
    """
    shown = with_gaps(cells)
    positive = shown[shown > 0]
    highest = max(positive.max(initial=0), reach) or 1.0
    log = len(positive) > 0 and highest > 20 * positive.min()
    norm = LogNorm(positive.min(), highest) if log else Normalize(0, highest)
    # the edges of a cell lie halfway to the previous round and to the next round
    middles = (np.array(rounds[1:]) + np.array(rounds[:-1])) / 2
    edges = np.concatenate([[rounds[0] - 0.5], middles, [rounds[-1] + 0.5]])
    image = axes.pcolormesh(edges, np.arange(len(cells) + 1) - 0.5, shown, norm=norm)
    label = "log scale" + (", white: 0 or none" if (shown == 0).any() else "") if log else ""
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=12, label=label)
    bar.minorformatter = NullFormatter()  # minor tick labels would overlap
