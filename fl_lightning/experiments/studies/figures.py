"""Figures of a study: learning curves, values by label, and heat maps."""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fl_lightning.clients.tasks import QUALITIES, best_is
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.studies.axis_labels import is_number, labels_in_words, short, varied
from fl_lightning.experiments.studies.client_tables import ClientTable, client_tables
from fl_lightning.experiments.studies.figure_panels import BAND, PUBLISHED, Panels, look_of, range_in_words
from fl_lightning.experiments.studies.study_frame import Row, StudyFrame
from fl_lightning.experiments.studies.verdicts import paired_differences
from fl_lightning.pictures.series import MetricRows, Series, draw_curve, scale_values, series, with_gaps
from fl_lightning.pictures.style import SPLIT_LINES, legend_above, literal, new_figure, paper_style
from fl_lightning.pictures.style import write_figure as write

_BYTES = {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "bytes"}
_FORMS = ("png", "pdf")
_NAME = re.compile(r"by_[\w-]+|heat_map|difference|clients|curves|bytes")
"""Names of all figures of studies."""


class Picture(NamedTuple):
    """A figure that can be drawn.

    Attributes:
        name: Stem of the figure's files.
        caption: Caption in one sentence.
        draw: Function that draws the figure.
    """

    name: str
    caption: str
    draw: Callable[[], Figure]


def write_figures(folder: Path, results: StudyFrame) -> None:
    """Write the figures of a study as PNG and PDF.

    If a figure fails, the error is printed, and the other figures are drawn. Figures of earlier
    results for which the study has no data any more are removed.

    Args:
        folder: Folder of the study.
        results: Results of the study.
    """
    drawable = pictures(results)
    for path in folder.glob("*.pdf"):
        known = path.stem in (picture.name for picture in drawable)
        if _NAME.fullmatch(path.stem) and not known and path.with_suffix(".png").is_file():
            path.unlink()
            path.with_suffix(".png").unlink()
    for picture in drawable:
        try:
            figure = picture.draw()
            for form in _FORMS:
                write(folder / f"{picture.name}.{form}", figure)
        except Exception as error:  # noqa: BLE001  # a failed figure must not end the study
            print(f"{picture.name} was not drawn: {type(error).__name__}: {error}", file=sys.stderr)


def pictures(results: StudyFrame) -> list[Picture]:
    """Return the figures for which the study has data.

    Args:
        results: Results of a study. Learning curves are read from its run directories.
    """
    metric, axes, drawable = results.metrics[results.first], varied(results), list[Picture]()
    if (results.values["metric"] == results.first).any():
        for axis in axes:
            if len(axes) == 1 or all(map(is_number, results.axes[axis])):
                by = short(axis, results.axes)
                words = f"{metric} by {by}: mean over {results.repeats}; bars from the smallest to the largest value"
                name = f"by_{re.sub(r'[^0-9A-Za-z_-]', '_', by)}"
                drawable.append(Picture(name, words, partial(against_figure, results, axis)))
        drawable += _maps(results, "heat_map")
        if results.difference:
            drawable += _maps(paired_differences(results), "difference", signed=True)
    for table in client_tables(results)[:1]:
        drawable.append(Picture("clients", table.caption, partial(clients_figure, table)))
    files = {directory: Path(directory, "metrics.jsonl") for directory in results.cells["directory"]}
    logs = {directory: read_metrics(file) for directory, file in files.items() if file.is_file()}
    if (logged := _logged(results, logs)) is not None:
        band = f"mean over {results.repeats}; band from the smallest to the largest value"
        words = f"{_in_words(logged)} over communication rounds: {band}"
        drawable.append(Picture("curves", words, partial(curves_figure, results, logs, logged)))
        cells = results.cells.dropna(subset="rounds")
        cells = cells[cells["rounds"] != 0]
        sent = (cells["upload_bytes"] + cells["download_bytes"]) / cells["rounds"]
        # if all runs send equally many bytes, these curves look like the curves over rounds
        if len(sent) and sent.max() > 1.05 * sent.min():
            words = f"{_in_words(logged)} over the bytes sent and received by all clients: {band}"
            drawable.append(Picture("bytes", words, partial(curves_figure, results, logs, logged, cost=True)))
    return drawable


def _maps(results: StudyFrame, name: str, signed: bool = False) -> list[Picture]:
    """Return one heat map if at least two axes have several labels, else an empty list.

    The columns are the labels of the axis ``spread`` if possible, otherwise of the last axis. The
    rows are the labels of the longest remaining axis.
    """
    axes, metric = varied(results), results.metrics[results.first]
    if len(axes) < 2:
        return []
    across = results.spread if results.spread in axes else axes[-1]
    down = max((axis for axis in axes if axis != across), key=lambda axis: len(results.axes[axis]))
    words = f"{metric} by {short(down, results.axes)} and {short(across, results.axes)}: mean over {results.repeats}"
    return [Picture(name, words, partial(heat_figure, results, down, across, signed=signed))]


@paper_style()
def clients_figure(table: ClientTable) -> Figure:
    """Draw each client's value under each method, and below them the means.

    Args:
        table: Values of a metric by client.
    """
    rows = table.rows
    figure = new_figure(1 + 0.24 * len(rows))
    axes, places = figure.subplots(), np.arange(len(rows))
    for number, (name, values) in enumerate(table.values.items()):
        colour, _, marker = look_of(number)
        means = np.array([np.mean(values.get(row) or np.nan) for row in rows])
        shift = 0.7 * ((number + 0.5) / len(table.values) - 0.5)
        axes.plot(means, places + shift, marker, color=colour, markersize=5, label=literal(name))
    for place, row in enumerate(rows):
        if row in table.samples and place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color="0.95", linewidth=0)
    axes.axhline(len(table.samples) - 0.5, color="black", linewidth=0.8)
    axes.set_yticks(places, [*map(literal, rows.values())])
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel=literal(table.metric))
    legend_above(axes)
    return figure


@paper_style()
def curves_figure(
    results: StudyFrame, logs: Mapping[str, MetricRows], metric: str, *, cost: bool = False
) -> Figure:
    """Draw a metric over communication rounds, with a curve for each label of one axis.

    Each combination of labels of the study's other axes has a panel.

    Args:
        results: Results of a study.
        logs: Rows of ``metrics.jsonl``, keyed by run directory.
        metric: Name of the metric.
        cost: Whether the horizontal axis shows bytes instead of rounds (default False).
    """
    panels, shown, seeds = Panels(results), list[Series](), list[int]()
    bands = [
        (axes, look, label, _band(rows[0], logs, metric, cost)) for axes, look, label, rows in panels.curves()
    ]
    bands = [(*curve, band) for *curve, band in bands if len(band)]
    ends = [band.index[-1] for *_, band in bands if band.index[-1] > 0]
    unit = next((size for size in _BYTES if max(ends, default=0) >= 2 * size), 1.0) if cost else 1.0
    for axes, look, label, band in bands:
        places = band.index.to_numpy() / unit
        shown.append(draw_curve(axes, places, band.mean(axis=1, skipna=False).to_numpy(), look, label))
        if len(band.columns) > 1:
            seeds.append(len(band.columns))
            low, high = (with_gaps(band.agg(end, axis=1, skipna=False).to_numpy()) for end in ("min", "max"))
            axes.fill_between(places, low, high, color=look[0], alpha=BAND, linewidth=0)
            shown += [low[~np.isnan(low)], high[~np.isnan(high)]]
    # all panels share both scales
    scale_values(panels.axes[0], shown, share=best_is(metric) != "min")
    if cost and ends and max(ends) >= 10 * min(ends):
        panels.axes[0].set_xscale("log")
    across = f"sent and received, {_BYTES[unit]}" if cost else "communication round"
    return panels.finished(across, _in_words(metric), band=range_in_words("band", seeds))


@paper_style()
def against_figure(results: StudyFrame, axis: str) -> Figure:
    """Draw the study's first metric against the labels of one axis of the study.

    If the labels are numbers, lines join the values. Labels that are words have the colours and
    markers of the learning curves.

    Hollow markers show published values. The vertical axis does not always include 0.

    Args:
        results: Results of a study.
        axis: Name of the study's axis.
    """
    panels, labels = Panels(results, axis), results.axes[axis]
    numeric = all(map(is_number, labels))
    labels = sorted(labels, key=float) if numeric else labels
    places = dict(zip(labels, map(float, labels) if numeric else range(len(labels)), strict=True))
    looks = {label: look_of(number) for number, label in enumerate(results.cells.index.unique(axis))}
    seeds: list[int] = []
    for axes, shared_look, name, rows in panels.curves():
        values = [(row.labels[axis], _finite(row, results), row.cells["published"].iloc[0]) for row in rows]
        points = pd.DataFrame(
            [(places[label], label, len(x), x.mean(), x.min(), x.max(), ours) for label, x, ours in values],
            columns=["x", "label", "seeds", "mean", "min", "max", "published"],
        ).sort_values("x", kind="stable")
        for _, drawn in [(None, points)] if numeric else points.groupby("label", sort=False):
            colour, line, marker = shared_look if numeric else looks[drawn["label"].iloc[0]]
            done = drawn[drawn["seeds"] > 0]
            if len(done):
                bars = np.array([done["mean"] - done["min"], done["max"] - done["mean"]])
                seeds += [count for count in done["seeds"] if count > 1]
                look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line}
                # no caps if all bars have length 0; words are on the axis, not in the legend
                look |= {"capsize": 3 * bool(bars.any()), "label": name if numeric else "_"}
                axes.errorbar(done["x"].to_numpy(), done["mean"].to_numpy(), bars, **look)
            published = drawn.dropna(subset="published")
            if len(published):
                look = {"color": colour, "markerfacecolor": "none", "markersize": 8, "label": PUBLISHED}
                axes.plot(published["x"].to_numpy(), published["published"].to_numpy(), marker, **look)
    # largest number of letters that fit into two neighbouring labels
    room = 150 / panels.columns / len(labels)
    crowded = not numeric and any(len(left) + len(right) > room for left, right in pairwise(labels))
    smallest = min((place for place in places.values() if place > 0), default=0)
    for axes in panels.axes:
        if numeric and places[labels[0]] >= 0 and 0 < 10 * smallest <= places[labels[-1]]:
            # a symlog axis can show 0; a log axis cannot
            axes.set_xscale("symlog", linthresh=smallest)
        elif not numeric:
            axes.set_xlim(-0.5, len(labels) - 0.5)
        turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axes.set_xticks([*places.values()], [*map(literal, labels)], **turned)
        axes.tick_params(axis="x", which="minor", length=0)
    across = short(axis, results.axes) if numeric or len(results.axes) > 1 else ""
    return panels.finished(across, results.metrics[results.first], bars=range_in_words("bar", seeds))


@paper_style()
def heat_figure(results: StudyFrame, down: str, across: str, *, signed: bool = False) -> Figure:
    """Draw a heat map of the first metric over the labels of two axes.

    Each combination of labels of the study's other axes has a panel.

    Args:
        results: Results of a study.
        down: Axis of the rows.
        across: Axis of the columns.
        signed: Whether values are differences (default False). Positive and negative values then
            have different colours, and 0 is white.
    """
    others = [axis for axis in varied(results) if axis not in (down, across)]
    means = pd.DataFrame(
        [
            (
                labels_in_words(row.labels, others),
                row.labels[down],
                row.labels[across],
                _finite(row, results).mean(),
            )
            for row in results.rows
        ],
        columns=["panel", "down", "across", "mean"],
    )
    lowest, highest = (0.0, 0.0) if means["mean"].isna().all() else (means["mean"].min(), means["mean"].max())
    if signed:
        lowest, highest = -max(-lowest, highest), max(-lowest, highest)
    rows, columns = results.axes[down], results.axes[across]
    panels = [*means.groupby("panel", sort=False)]
    figure = new_figure((0.6 + 0.32 * len(rows)) * len(panels))
    for axes, (name, panel) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        table = panel.pivot(index="down", columns="across", values="mean")
        matrix = table.reindex(rows, columns=columns).to_numpy()
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
        across_name, down_name = (literal(short(axis, results.axes)) for axis in (across, down))
        axes.set(xlabel=across_name, ylabel=down_name)
        words = filter(None, [results.metrics[results.first], name])
        axes.set_title(literal(", ".join(words)), fontsize="medium")
    return figure


def _band(row: Row, logs: Mapping[str, MetricRows], metric: str, cost: bool) -> pd.DataFrame:
    """Return each seed's metric, with a row for each round that all seeds have logged.

    The index is the round, or the number of bytes. Unfinished runs are used only if no run is
    finished.
    """
    if row.metric:
        metric = f"{metric.partition('/')[0]}/{row.metric.partition('/')[2]}"
    cells = row.cells if row.done.empty else row.done
    known = [logs[x] for x in cells["directory"] if any(metric in line for line in logs.get(x, ()))]
    if not known:
        return pd.DataFrame()
    curves = [pd.Series(dict(zip(*series(log, metric), strict=True))) for log in known]
    band = pd.concat(curves, axis=1, join="inner").sort_index()
    if cost:
        sent = ["comm/upload_bytes", "comm/download_bytes"]
        lines = [pd.DataFrame(log).set_index("round").reindex(columns=sent).fillna(0) for log in known]
        sums = pd.concat([line.sum(axis=1).cumsum() for line in lines], axis=1, join="inner")
        band.index = pd.Index(sums.loc[band.index].mean(axis=1))
    return band


def _logged(results: StudyFrame, logs: Mapping[str, MetricRows]) -> str | None:
    """Return the metric of the learning curves; None if no run has logged a suitable metric.

    Suitable metrics are the study's first metric and related metrics. The metric in most logs is
    chosen.
    """
    related = [results.first.partition("/")[2], *QUALITIES, "loss"]
    names = [results.first, *(f"{split}/{name}" for name in related for split in ("val", "test"))]
    counts = {name: sum(any(name in row for row in log) for log in logs.values()) for name in names}
    return max(counts, key=counts.__getitem__) if any(counts.values()) else None


def _finite(row: Row, results: StudyFrame) -> pd.Series:
    values = row.of(results.first).astype(float)
    return values[[isfinite(value) for value in values]]


def _in_words(metric: str) -> str:
    split, _, name = metric.partition("/")
    if split not in SPLIT_LINES:
        return metric  # the name that a LightningModule has logged
    return f"{SPLIT_LINES[split][0].partition(':')[0]} {QUALITIES.get(name, name.replace('_', ' '))}"
