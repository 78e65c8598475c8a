"""Figures of the benchmarks: speed-up over the naive loop, and cost against scale."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import label
from benchmarks.roster import BOUNDS
from benchmarks.scale import FACTORS
from fl_lightning.pictures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT_GREY,
    SKY,
    VERMILLION,
    legend_above,
    new_figure,
    paper_style,
    write_figure,
)

_SHADES = {"sequential": SKY, "vectorized": VERMILLION, "ranks": BLUE, "compiled": GREEN}
_MARKS = "osD^vP"
# white background of a number, so that no line crosses the number
_PAPER: Any = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def draw_speedups(path: Path, results: Sequence[dict[str, Any]], machine: str) -> None:
    """Draw the naive loop's wall time divided by each contender's, by workload and model.

    Args:
        path: The PNG file.
        results: Results of ``compare.compare``.
        machine: Description of the machine, for the title.
    """
    names = list(dict.fromkeys(name for result in results for name in result["speedup"]))
    labels = {name: label(name, result) for result in results for name in result["speedup"]}
    columns = min(3, len(results))
    lines = -(-len(results) // columns)
    with paper_style():
        title = [
            "How many times as fast as the naive FedAvg loop, by wall time: median, smallest, largest",
            "In colour the executors of fl_lightning, in grey other frameworks",
            *_remarks(names),
            machine,
        ]
        figure = new_figure(lines * (0.75 + 0.24 * len(names)), title)
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, result in zip(panels, results, strict=False):
            for row, name in enumerate(names):
                if name not in result["speedup"]:
                    continue
                speedup = result["speedup"][name]["wall"]
                middle = speedup["median"]
                spread = [[middle - speedup["min"]], [speedup["max"] - middle]]
                colour = _SHADES.get(name, LIGHT_GREY)
                bar: dict[str, Any] = {"color": colour}
                if name in BOUNDS:
                    bar = {"color": "white", "edgecolor": GREY}
                elif name == "ranks_bf16":
                    bar = {"color": "white", "edgecolor": BLUE, "hatch": "////"}
                axes.barh(row, middle, 0.7, xerr=spread, ecolor=BLACK, capsize=2, **bar)
                place, text = speedup["max"] + 0.04, f"{middle:.2f}"
                axes.text(place, row, text, va="center", fontsize=7, color=GREY, bbox=_PAPER)
            axes.axvline(1, color=GREY, linewidth=0.8, linestyle=":")
            axes.set_title(f"{result['workload']}, {result['model']}", fontsize=9)
            axes.set_yticks(range(len(names)), [labels[name] for name in names])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xlabel("naive / this")
        largest = max(row["wall"]["max"] for result in results for row in result["speedup"].values())
        figure.axes[0].set_xlim(0, 1.2 * largest)
        for unused in panels[len(results) :]:
            unused.set_visible(False)
    write_figure(path, figure)


def _remarks(names: Sequence[str]) -> list[str]:
    """Return lines of the title that explain outlined bars (bounds) and hatched bars (bfloat16)."""
    remarks = []
    if set(BOUNDS) & set(names):
        remarks.append("In outline forward and backward passes, or their convolutions, alone on all cores")
    if "ranks_bf16" in names:
        remarks.append("Hatched: passes in bfloat16, with fewer digits")
    return remarks


def draw_scale(path: Path, results: Sequence[dict[str, Any]], machine: str) -> None:
    """Draw the wall time per client step, in milliseconds, against each factor of scale.

    Args:
        path: The PNG file.
        results: Results of ``scale.scale``.
        machine: Description of the machine, for the title.
    """
    from matplotlib.ticker import LogLocator

    points = [point for result in results for point in result["points"]]
    factors = [factor for factor in FACTORS if any(point["factor"] == factor for point in points)]
    names = list(dict.fromkeys(name for point in points for name in point["ms_per_client_step"]))
    with paper_style():
        title = [
            "Cost against scale: wall time of a client step, one factor changed at a time around W1",
            machine,
        ]
        lines = -(-len(factors) // 2)
        figure = new_figure(2.1 * lines, title)
        panels = figure.subplots(lines, 2, squeeze=False).ravel()
        for axes, factor in zip(panels, factors, strict=False):
            here = [point for point in points if point["factor"] == factor]
            texts = list(dict.fromkeys(str(point["value"]) for point in here))
            for index, name in enumerate(names):
                found = [
                    (texts.index(str(point["value"])), point["ms_per_client_step"][name])
                    for point in here
                    if name in point["ms_per_client_step"]
                ]
                low = [ms["median"] - ms["min"] for _, ms in found]
                high = [ms["max"] - ms["median"] for _, ms in found]
                axes.errorbar(
                    [place for place, _ in found],
                    [ms["median"] for _, ms in found],
                    yerr=[low, high],
                    color=_SHADES.get(name, BLACK if name == "naive" else LIGHT_GREY),
                    marker=_MARKS[index % len(_MARKS)],
                    markersize=4,
                    linewidth=1,
                    capsize=2,
                    label=name if factor == factors[0] else None,
                )
            axes.set_xticks(range(len(texts)), texts)
            axes.set_xlabel(FACTORS[factor])
            axes.set_ylabel("ms per client step")
            if factor == "model":
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("{x:g}")
                axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            else:
                axes.set_ylim(bottom=0)
        for unused in panels[len(factors) :]:
            unused.set_visible(False)
        legend_above(figure.axes[0])
    write_figure(path, figure)
