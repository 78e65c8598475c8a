"""Figure of accuracy against communication, in bytes, exchanges and simulated time."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.figure import Figure

from fl_lightning.clients.tasks import QUALITIES
from fl_lightning.pictures.series import MetricRows, Series, draw_curve
from fl_lightning.pictures.style import (
    COST_AXES,
    LOOKS,
    SPLIT_LINES,
    legend_above,
    literal,
    new_figure,
    paper_style,
)


def has_communication(rows: MetricRows) -> bool:
    """Return whether the rows have the metrics that :func:`communication_figure` needs."""
    return _quality(rows) is not None and any(name in row for row in rows for name in COST_AXES)


@paper_style()
def communication_figure(runs: Mapping[str, MetricRows], link: str, title: Sequence[str]) -> Figure:
    """Draw accuracy against bytes, exchanges and simulated time. Without accuracy, draw the loss.

    For several runs, the horizontal axes are logarithmic. The initial model is then omitted, since
    its cost is 0.

    Args:
        runs: Rows of each run, keyed by the run's label. The label of a single run is not shown.
        link: Description of the network link for which the time is simulated.
        title: Lines of the title.
    """
    several = len(runs) > 1
    figure = new_figure(5.4 if several else 4.6, title)
    quality = next(name for rows in runs.values() if (name := _quality(rows)) is not None)
    split, _, metric = quality.partition("/")
    panels = figure.subplots(len(COST_AXES), sharey=True)
    for axes, (cost, (label, units)) in zip(panels, COST_AXES.items(), strict=True):
        curves = {name: _curve(rows, cost, quality, log=several) for name, rows in runs.items()}
        dearest = max((costs[-1] for costs, _ in curves.values() if len(costs)), default=0.0)
        scale = next((size for size in units if dearest >= 2 * size), 1.0)
        for (name, (costs, values)), look in zip(curves.items(), cycle(LOOKS), strict=False):
            draw_curve(axes, costs / scale, values, look, literal(name))
        if several:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(label.format(unit=units[scale], link=link) + (" (log scale)" if several else ""))
        axes.set_ylabel(f"{SPLIT_LINES[split][0]}\n{QUALITIES.get(metric, metric)}")
        axes.grid(color="0.9")
    if metric in QUALITIES:
        panels[0].set_ylim(0, 1.02)
    if several:
        legend_above(panels[0])
    return figure


def _quality(rows: MetricRows) -> str | None:
    names = [f"{split}/{name}" for name in (*QUALITIES, "loss") for split in ("val", "test")]
    return next((name for name in names if any(name in row for row in rows)), None)


def _curve(rows: MetricRows, cost: str, quality: str, *, log: bool) -> tuple[Series, Series]:
    """Return the cost and the quality of the model after each evaluated round.

    If ``log`` is True, the cost is drawn on a logarithmic axis. The initial model is then omitted,
    since its cost is 0.
    """
    pairs = [
        (float(row.get(cost, 0.0)), float(row[quality]))
        for row in rows
        if quality in row and (cost in row or row["round"] == 0)
    ]
    costs, values = np.array([pair for pair in pairs if pair[0] > 0 or not log]).reshape(-1, 2).T
    return costs, values
