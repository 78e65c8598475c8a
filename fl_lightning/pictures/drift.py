"""What Batch Normalization does to a run, as figures: statistics and gradients over the rounds, whole and by layer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.pictures.series import Series, can_be_drawn, means, series
from fl_lightning.pictures.style import (
    BLACK,
    BLUE,
    LIGHT_GREY,
    SKY,
    VERMILLION,
    count_on,
    drawable,
    legend_above,
    new_figure,
    paper_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ByLayer = Mapping[str, Mapping[int, Mapping[str, float]]]
"""``values[quantity][round][layer]``."""

_MAX_POINTS = 250  # of more values a panel shows means of consecutive ones
_MAX_LABELS = 30  # of more layers a heat map names every second, third, ...

# what an axis shows, what it reaches to at least if it is logarithmic (None: never), and its curves: metric, label, colour, line
_PANELS: tuple[tuple[str, float | None, tuple[tuple[str, str, str, str], ...]], ...] = (
    (
        "BN statistics:\nL1 norm",
        0.0,
        (
            ("bn/local_deviation", "clients' first batches: distance to the server's", VERMILLION, "-"),
            ("bn/global_change", "the server's running ones: change in a round", BLUE, "--"),
        ),
    ),
    (
        "BN statistics:\nvariance",
        0.0,
        (("bn/window_variance", "of a client's first batches over rounds, mean of clients", BLUE, "-"),),
    ),
    (
        "training loss",
        None,
        (("train/loss", "of the clients' own models before aggregation, mean", BLACK, "-"),),
    ),
    (
        "gradient deviation,\nrelative",
        1.0,
        (
            ("bn/gradient_deviation", "all parameters, clients' mean against their union batch", BLACK, "-"),
            ("bn/gradient_deviation_affine", "BN's gamma and beta", VERMILLION, "--"),
            ("bn/gradient_deviation_weights", "all others", SKY, ":"),
        ),
    ),
    (
        "BN statistics:\nrelative bias",
        0.0,
        (
            ("bn/mean_bias", "running means against a pooled pass over all training data", BLUE, "-"),
            ("bn/var_bias", "running variances likewise", VERMILLION, "--"),
        ),
    ),
    (
        "accuracy\ndifference",
        None,
        (
            ("bn/train_eval_gap", "running statistics minus those of the evaluation batch", BLUE, "-"),
            ("bn/recalibration_gap", "running statistics minus those of the pooled pass", VERMILLION, "--"),
        ),
    ),
)
MAPS = {
    "local_deviation_mean": "clients' batch means: distance from the server's running ones, per channel",
    "local_deviation_var": "clients' batch variances: distance from the server's running ones, per channel",
    "gradient_deviation": "clients' mean gradient: distance from their union batch's, relative",
}
"""The quantities that have a heat map, and what it says."""


def has_drift(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is anything measured for :func:`drift_figure`."""
    return any(key.startswith("bn/") for row in rows for key in row)


@paper_style()
def drift_figure(
    rows: Sequence[Mapping[str, Any]], frozen_round: int | None, title: Sequence[str]
) -> "Figure":
    """Change of statistics, their variance, loss, gradient deviation, bias and gap, each over communication rounds.

    After Figure 3 of Zhong et al., arXiv 2303.06530. What was not measured has no panel.

    Args:
        rows: Rows of ``metrics.jsonl``.
        frozen_round: The first round with frozen statistics, marked by a line; None for none.
        title: Lines of the title.
    """
    panels = [panel for panel in _PANELS if any(name in row for row in rows for name, *_ in panel[2])]
    figure = new_figure(1.45 * len(panels) + 0.2, title)
    last = max(float(row["round"]) for row in rows)
    stack = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, reach, curves) in zip(stack, panels, strict=True):
        if frozen_round is not None and frozen_round > 1:
            label = f"statistics frozen from round {frozen_round:,}" if axes is stack[0] else "_"
            axes.axvline(
                frozen_round - 0.5, color=LIGHT_GREY, linestyle="-.", linewidth=1.2, zorder=0, label=label
            )
        found = [(series(rows, metric), label, look) for metric, label, *look in curves]
        _draw_curves(axes, [curve for curve in found if len(curve[0][0])], reach)
        axes.set_ylabel(name + ("\n(log)" if axes.get_yscale() == "log" else ""))
        legend_above(axes)
    stack[-1].set(xlim=(0, max(last, 1)), xlabel="communication round")
    count_on(stack[-1].xaxis)
    figure.align_ylabels()
    return figure


def _draw_curves(
    axes: "Axes",
    curves: Sequence[tuple[tuple[Series, Series], str, Sequence[Any]]],
    reach: float | None,
) -> None:
    """Lines; on a logarithmic axis zeros are triangles at its foot, values that no axis can show are left out."""
    from matplotlib.ticker import NullFormatter

    drawn = np.concatenate([values[can_be_drawn(values)] for (_, values), *_ in curves] or [np.empty(0)])
    positive = drawn[drawn > 0]
    log = reach is not None and len(positive) > 0 and max(positive.max(), reach) > 10 * positive.min()
    for (rounds, values), label, (colour, line) in curves:
        width = -(-len(rounds) // _MAX_POINTS)
        where, shown = means(rounds, values, width)
        good = can_be_drawn(shown) & ((shown > 0) | (not log))
        marker = "." if len(where) <= 40 else None
        text = label + (f", means of {width}" if width > 1 else "")
        axes.plot(where, np.where(good, shown, np.nan), line, color=colour, label=text, marker=marker)
        zeros = rounds[values == 0] if log else rounds[:0]
        if len(zeros):
            feet = zeros[:: max(1, len(zeros) // 20)]
            axes.plot(
                feet,
                np.full(len(feet), 0.03),
                transform=axes.get_xaxis_transform(),
                color=colour,
                marker="v",
                linestyle="none",
                markersize=4,
                label="_",
            )
            axes.plot([], [], color=colour, marker="v", linestyle="none", label="exactly 0")
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())  # its labels would overlap
        axes.set_ylim(top=max(axes.get_ylim()[1], 2 * (reach or 0)))
    elif len(drawn) and drawn.min() >= 0:
        axes.set_ylim(0, 1.08 * drawn.max() or 1)


@paper_style()
def layers_figure(values: ByLayer, labels: Mapping[str, str], title: Sequence[str]) -> "Figure":
    """Heat maps of layer by round: where in the model statistics and gradients differ, and when.

    Args:
        values: What was measured, by quantity, round and layer.
        labels: What to call each layer, by qualified name, from the first to the last.
        title: Lines of the title.
    """
    maps = [
        (*_grid(values[quantity], labels), text, 1.0 if quantity == "gradient_deviation" else 0.0)
        for quantity, text in MAPS.items()
        if values.get(quantity)
    ]
    heights = [0.55 + 0.17 * min(max(len(names), 3), 45) for _, names, *_ in maps]
    figure = new_figure(sum(heights) + 0.3, title)
    last = max(rounds[-1] for rounds, *_ in maps)
    every = figure.subplots(len(maps), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (rounds, names, cells, text, reach) in zip(every, maps, strict=True):
        _draw_map(figure, axes, rounds, names, cells, reach)
        axes.set_title(text, loc="left", fontsize=8.5)
        axes.set_xlim(right=max(last + 0.5, 1.5))
    every[-1].set_xlabel("communication round")
    return figure


def _grid(
    by_round: Mapping[int, Mapping[str, float]], labels: Mapping[str, str]
) -> tuple[list[int], list[str], NDArray[np.float64]]:
    """Rounds, the labels of the layers that were measured, and their values ``[layers, rounds]``."""
    rounds = sorted(by_round)
    names = [name for name in labels if any(name in by_round[number] for number in rounds)]
    cells = [[by_round[number].get(name, np.nan) for number in rounds] for name in names]
    return rounds, [labels[name] for name in names], np.array(cells)


def _draw_map(
    figure: "Figure",
    axes: "Axes",
    rounds: Sequence[int],
    names: Sequence[str],
    cells: NDArray[np.float64],
    reach: float,
) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import NullFormatter

    good = cells[can_be_drawn(cells)]
    positive = good[good > 0]
    highest = max(positive.max(initial=0), reach) or 1.0
    log = len(positive) > 0 and highest > 20 * positive.min()
    norm = LogNorm(positive.min(), highest) if log else Normalize(0, highest)
    colours = colormaps["viridis"].with_extremes(bad="white", under="0.75")
    # a cell reaches half-way to its neighbours in time
    middles = (np.array(rounds[1:]) + np.array(rounds[:-1])) / 2
    edges = np.concatenate([[rounds[0] - 0.5], middles, [rounds[-1] + 0.5]])
    # zeros have no logarithm: below every colour
    shown = np.where(cells == 0, np.nextafter(0, 1), cells) if log else cells
    image = axes.pcolormesh(
        edges,
        np.arange(len(names) + 1),
        np.where(can_be_drawn(cells), shown, np.nan),
        cmap=colours,
        norm=norm,
    )
    zeros = log and bool((cells == 0).any())
    label = "log scale" + (", grey: 0" if zeros else "") if log else ""
    bar = figure.colorbar(
        image, ax=axes, pad=0.01, aspect=12, label=label, extend="min" if zeros else "neither"
    )
    bar.minorformatter = NullFormatter()  # its labels would overlap
    every = -(-len(names) // _MAX_LABELS)
    places = range(0, len(names), every)
    size = 7 if len(places) < 20 else 6
    axes.set_yticks(
        [place + 0.5 for place in places],
        [drawable(names[i]) for i in places],
        parse_math=False,
        fontsize=size,
    )
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    count_on(axes.xaxis)
