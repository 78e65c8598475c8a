"""Figures of a study: learning curves, values by label, and heat maps."""

import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.studies.claims import difference
from fl_lightning.experiments.studies.found import Found, Group
from fl_lightning.experiments.studies.panels import (
    BAND,
    PUBLISHED,
    Grid,
    is_number,
    label_of,
    look_of,
    short,
    varied,
)
from fl_lightning.experiments.studies.tables import caption
from fl_lightning.files import write_text
from fl_lightning.pictures.series import Rows, Series, draw_curve, scale_values, series, with_gaps
from fl_lightning.pictures.style import SPLITS, literal, new_figure, paper_style
from fl_lightning.pictures.style import write_figure as write
from fl_lightning.round.directions import best_is
from fl_lightning.round.tasks import QUALITIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BYTES = {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "bytes"}


_FORMS = ("png", "pdf", "txt")
_NAME = re.compile(r"by_[\w-]+|heat_map|difference|curves|bytes")
"""Names of all figures of studies."""


class Picture(NamedTuple):
    """A figure that can be drawn.

    Attributes:
        name: Stem of the figure's files.
        caption: Caption in one sentence.
        draw: Function that takes the lines of the title and draws the figure.
    """

    name: str
    caption: str
    draw: Callable[[Sequence[str]], "Figure"]


def write_figures(folder: Path, found: Found, titles: bool = False) -> list[Path]:
    """Write the figures of a study as PNG and PDF, each with its caption in a text file.

    If a figure fails, the error is printed, and the other figures are drawn. Figures of earlier
    findings for which the study has no data any more are removed.

    Args:
        folder: Folder of the study.
        found: Findings of the study.
        titles: Whether pictures show the study's caption as their title (default False).

    Returns:
        The written files.
    """
    title, written, drawable = [caption(found)], list[Path](), pictures(found)
    for path in folder.glob("*.txt"):
        files = [path.with_suffix(f".{form}") for form in _FORMS]
        known = path.stem in (picture.name for picture in drawable)
        if _NAME.fullmatch(path.stem) and not known and all(file.is_file() for file in files):
            for file in files:
                file.unlink()
    for picture in drawable:
        try:
            figure = picture.draw(title if titles else [])
            for form in ("png", "pdf"):
                write(folder / f"{picture.name}.{form}", figure)
            words = f"{picture.caption[:1].upper()}{picture.caption[1:]}. {title[0]}"
            write_text(folder / f"{picture.name}.txt", words + "\n")
            written += [folder / f"{picture.name}.{form}" for form in _FORMS]
        except Exception as error:  # noqa: BLE001  # a failed figure must not end the study
            print(f"{picture.name} was not drawn: {type(error).__name__}: {error}", file=sys.stderr)
    return written


def pictures(found: Found) -> list[Picture]:
    """Return the figures for which the study has data.

    Args:
        found: Findings of a study. Learning curves are read from its run directories.
    """
    metric, axes = next(iter(found["metrics"].values())), varied(found)
    drawable = []
    if any(group["values"][next(iter(found["metrics"]))] for group in found["groups"]):
        for axis in axes:
            if len(axes) == 1 or all(map(is_number, found["axes"][axis])):
                words = f"{metric} by {short(axis, found['axes'])}: mean over seeds; bars from the smallest to the largest value"
                name = f"by_{re.sub(r'[^0-9A-Za-z_-]', '_', short(axis, found['axes']))}"
                drawable.append(Picture(name, words, partial(against_figure, found, axis)))
        drawable += _maps(found, "heat_map")
        if found.get("difference"):
            drawable += _maps(difference(found), "difference", signed=True)
    rows = read_rows(found)
    if (logged := _logged(found, rows)) is not None:
        band = "mean over seeds; band from the smallest to the largest value"
        words = f"{_in_words(logged)} over communication rounds: {band}"
        drawable.append(Picture("curves", words, partial(curves_figure, found, rows, logged)))
        sent = [
            (run["upload_bytes"] + run["download_bytes"]) / run["rounds"]
            for group in found["groups"]
            for run in group["runs"]
            if run.get("rounds")
        ]
        # if all runs send equally many bytes, these curves look like the curves over rounds
        if sent and max(sent) > 1.05 * min(sent):
            words = f"{_in_words(logged)} over the bytes sent and received by all clients: {band}"
            drawable.append(Picture("bytes", words, partial(curves_figure, found, rows, logged, cost=True)))
    return drawable


def _maps(found: Found, name: str, signed: bool = False) -> list[Picture]:
    """Return one heat map if at least two axes have several labels, else an empty list.

    The columns are the labels of the axis ``spread`` if possible, otherwise of the last axis. The
    rows are the labels of the longest remaining axis.
    """
    axes, metric = varied(found), next(iter(found["metrics"].values()))
    if len(axes) < 2:
        return []
    across = found["spread"] if found["spread"] in axes else axes[-1]
    down = max((axis for axis in axes if axis != across), key=lambda axis: len(found["axes"][axis]))
    words = f"{metric} by {short(down, found['axes'])} and {short(across, found['axes'])}: mean over seeds"
    return [Picture(name, words, partial(heat_figure, found, down, across, signed=signed))]


def read_rows(found: Found) -> dict[str, Rows]:
    """Read the rows of each existing ``metrics.jsonl``, keyed by run directory."""
    runs = [run for group in found["groups"] for run in group["runs"]]
    files = {str(Path(run["directory"])): Path(run["directory"]) / "metrics.jsonl" for run in runs}
    return {directory: read_metrics(file) for directory, file in files.items() if file.is_file()}


@paper_style()
def curves_figure(
    found: Found, rows: Mapping[str, Rows], metric: str, title: Sequence[str], *, cost: bool = False
) -> "Figure":
    """Draw a metric over communication rounds, with a curve for each label of one axis.

    Each combination of labels of the study's other axes has a panel.

    Args:
        found: Findings of a study.
        rows: Rows of ``metrics.jsonl``, keyed by run directory.
        metric: Name of the metric.
        title: Lines of the title.
        cost: Whether the horizontal axis shows bytes instead of rounds (default False).
    """
    grid = Grid(found, title)
    shown, seeds = list[Series](), list[int]()
    bands = [
        (axes, look, label, _band(groups[0], rows, metric, cost))
        for axes, look, label, groups in grid.curves()
    ]
    ends = [places[-1] for _, _, _, (places, _) in bands if len(places) and places[-1] > 0]
    unit = next((size for size in _BYTES if max(ends, default=0) >= 2 * size), 1.0) if cost else 1.0
    for axes, look, label, (places, values) in bands:
        if len(places):
            shown.append(draw_curve(axes, places / unit, values.mean(0), look, label))
            if len(values) > 1:
                seeds.append(len(values))
                low, high = with_gaps(values.min(0)), with_gaps(values.max(0))
                axes.fill_between(places / unit, low, high, color=look[0], alpha=BAND, linewidth=0)
                shown += [low[~np.isnan(low)], high[~np.isnan(high)]]
    every = np.concatenate([*shown, []])
    lowest, highest = every.min(initial=0), every.max(initial=0)
    for axes in grid.panels:
        if best_is(metric) != "min" and lowest >= 0 and highest <= 1:
            axes.set_ylim(0, min(1.15 * highest, 1.03) or 1.03)
        elif axes is grid.panels[0]:
            scale_values(axes, shown)
        if cost and ends and max(ends) >= 10 * min(ends):
            axes.set_xscale("log")
    across = f"sent and received, {_BYTES[unit]}" if cost else "communication round"
    return grid.finished(across, _in_words(metric), band=_range_in_words("band", seeds))


@paper_style()
def against_figure(found: Found, axis: str, title: Sequence[str]) -> "Figure":
    """Draw the study's first metric against the labels of one axis of the study.

    If the labels are numbers, lines join the values. Labels that are words have the colours and
    markers of the learning curves.

    Hollow markers show published values. The vertical axis does not always include 0.

    Args:
        found: Findings of a study.
        axis: Name of the study's axis.
        title: Lines of the title.
    """
    grid, labels = Grid(found, title, axis), found["axes"][axis]
    numeric = all(map(is_number, labels))
    labels = sorted(labels, key=float) if numeric else labels
    places = dict(zip(labels, map(float, labels) if numeric else range(len(labels)), strict=True))
    in_order = dict.fromkeys(group["labels"][axis] for group in found["groups"])
    looks = {label: look_of(number) for number, label in enumerate(in_order)}
    seeds: list[int] = []
    for axes, shared_look, label, groups in grid.curves():
        points = sorted((places[group["labels"][axis]], group["labels"][axis], group) for group in groups)
        series_of = [[point] for point in points] if not numeric else [points]
        for drawn in series_of:
            colour, line, marker = shared_look if numeric else looks[drawn[0][1]]
            done = [(x, values) for x, _, group in drawn if (values := _finite(group, found))]
            if done:
                means = [statistics.mean(values) for _, values in done]
                ranges = [(mean - min(x), max(x) - mean) for mean, (_, x) in zip(means, done, strict=True)]
                look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line}
                bars = np.transpose(ranges)
                seeds += [len(values) for _, values in done if len(values) > 1]
                caps = 3 * bool(bars.any())  # no caps if all bars have length 0
                name = label if numeric else "_"  # words are on the axis, not in the legend
                axes.errorbar([x for x, _ in done], means, bars, **look, capsize=caps, label=name)
            published = [(x, group["published"]) for x, _, group in drawn if group["published"] is not None]
            if published:
                look = {"color": colour, "markerfacecolor": "none", "markersize": 8, "label": PUBLISHED}
                axes.plot(*zip(*published, strict=True), marker, **look)
    # largest number of letters that fit into two neighbouring labels
    room = 150 / grid.columns / len(labels)
    crowded = not numeric and any(len(left) + len(right) > room for left, right in pairwise(labels))
    smallest = min((place for place in places.values() if place > 0), default=0)
    for axes in grid.panels:
        if numeric and places[labels[0]] >= 0 and 0 < 10 * smallest <= places[labels[-1]]:
            # a symlog axis can show 0; a log axis cannot
            axes.set_xscale("symlog", linthresh=smallest)
        elif not numeric:
            axes.set_xlim(-0.5, len(labels) - 0.5)
        turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axes.set_xticks([*places.values()], [*map(literal, labels)], **turned)
        axes.tick_params(axis="x", which="minor", length=0)
    across = short(axis, found["axes"]) if numeric or len(found["axes"]) > 1 else ""
    return grid.finished(across, _words(found), bars=_range_in_words("bar", seeds))


@paper_style()
def heat_figure(
    found: Found, down: str, across: str, title: Sequence[str], *, signed: bool = False
) -> "Figure":
    """Draw a heat map of the first metric over the labels of two axes.

    Each combination of labels of the study's other axes has a panel.

    Args:
        found: Findings of a study.
        down: Axis of the rows.
        across: Axis of the columns.
        title: Lines of the title.
        signed: Whether values are differences (default False). Positive and negative values then
            have different colours, and 0 is white.
    """
    rows, columns = found["axes"][down], found["axes"][across]
    panels: dict[str, Any] = {}
    for group in found["groups"]:
        others = [axis for axis in varied(found) if axis not in (down, across)]
        matrix = panels.setdefault(label_of(group, others), np.full((len(rows), len(columns)), np.nan))
        if values := _finite(group, found):
            place = rows.index(group["labels"][down]), columns.index(group["labels"][across])
            matrix[place] = statistics.mean(values)
    shown = [x for matrix in panels.values() for x in matrix[np.isfinite(matrix)]]
    lowest, highest = min(shown, default=0.0), max(shown, default=0.0)
    if signed:
        lowest, highest = -max(-lowest, highest), max(-lowest, highest)
    figure = new_figure((0.6 + 0.32 * len(rows)) * len(panels), title)
    for axes, (name, matrix) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True
    ):
        colours = "PuOr" if signed else "cividis"
        axes.pcolormesh(matrix, cmap=colours, vmin=lowest, vmax=highest, edgecolors="white", linewidth=1)
        for (row, column), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                dark = abs(value) > 0.6 * highest if signed else value < (lowest + highest) / 2
                look: dict[str, Any] = {"ha": "center", "va": "center", "color": "white" if dark else "black"}
                axes.text(column + 0.5, row + 0.5, f"{value:+.3f}" if signed else f"{value:.3f}", **look)
        axes.set_xticks(np.arange(len(columns)) + 0.5, [*map(literal, columns)])
        axes.set_yticks(np.arange(len(rows)) + 0.5, [*map(literal, rows)])
        axes.tick_params(length=0)
        axes.invert_yaxis()
        across_name, down_name = (literal(short(name, found["axes"])) for name in (across, down))
        axes.set(xlabel=across_name, ylabel=down_name)
        axes.set_title(", ".join(filter(None, [_words(found), literal(name)])), fontsize="medium")
    return figure


def _band(group: Group, rows: Mapping[str, Rows], metric: str, cost: bool) -> tuple[Series, Series]:
    """Return horizontal positions ``[points]`` and each seed's metric ``[seeds, points]``.

    The points are the rounds that all seeds have logged. Unfinished runs are used only if no run is
    finished.
    """
    if own_metric := group.get("metric"):
        metric = f"{metric.partition('/')[0]}/{own_metric.partition('/')[2]}"
    runs = [run for run in group["runs"] if run["phase"] == "done"] or group["runs"]
    logs = [log for run in runs if (log := rows.get(run["directory"]))]
    drawn = [(log, curve) for log in logs if (curve := dict(zip(*series(log, metric), strict=True)))]
    curves = [curve for _, curve in drawn]
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    places = np.array(rounds)
    if cost and curves:
        sent = []
        for log, _ in drawn:
            total, sums = 0.0, {}
            for row in log:
                total += row.get("comm/upload_bytes", 0.0) + row.get("comm/download_bytes", 0.0)
                sums[float(row["round"])] = total
            sent.append([sums[round] for round in rounds])
        places = np.mean(sent, axis=0)
    return places, np.array([[curve[round] for round in rounds] for curve in curves])


def _range_in_words(what: str, seeds: Sequence[int]) -> str:
    """Describe the range of a band or of bars, as in ``"band: min to max of 3 seeds"``.

    The text is ``""`` if ``seeds`` is empty.
    """
    counts = " to ".join(map(str, dict.fromkeys((min(seeds), max(seeds))))) if seeds else ""
    return f"{what}: min to max of {counts} seeds" if seeds else ""


def _logged(found: Found, rows: Mapping[str, Rows]) -> str | None:
    """Return the metric of the learning curves; None if no run has logged a suitable metric.

    Suitable metrics are the study's first metric and related metrics. The metric in most logs is
    chosen.
    """
    first = next(iter(found["metrics"]))
    related = [first.partition("/")[2], *QUALITIES, "loss"]
    names = [first, *(f"{split}/{name}" for name in related for split in ("val", "test"))]
    counts = {name: sum(any(name in row for row in log) for log in rows.values()) for name in names}
    return max(counts, key=counts.__getitem__) if any(counts.values()) else None


def _finite(group: Group, found: Found) -> list[float]:
    return [x for x in group["values"][next(iter(found["metrics"]))].values() if isfinite(x)]


def _words(found: Found) -> str:
    return literal(next(iter(found["metrics"].values())))


def _in_words(metric: str) -> str:
    """Return the name of a logged metric in words, such as ``"validation accuracy"``."""
    split, _, name = metric.partition("/")
    return f"{SPLITS[split][0].partition(':')[0]} {QUALITIES.get(name, name.replace('_', ' '))}"
