"""What accuracy costs, as a figure: bytes, exchanges with the server, simulated time."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.pictures.series import Series, can_be_drawn
from fl_lightning.pictures.style import (
    BLACK,
    BLUE,
    GREY,
    SKY,
    VERMILLION,
    drawable,
    legend_above,
    new_figure,
    paper_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
"""Rows of ``metrics.jsonl``."""

_QUALITY = {
    "val/accuracy": "validation\naccuracy",
    "test/accuracy": "test\naccuracy",
    "val/loss": "validation\nloss",
    "test/loss": "test\nloss",
}
_BYTES: Mapping[float, str] = {1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "bytes"}
_TIMES: Mapping[float, str] = {86400.0: "days", 3600.0: "h", 60.0: "min", 1.0: "s"}
_PANELS: dict[str, tuple[str, Mapping[float, str]]] = {
    "comm/total_bytes_per_client": ("sent and received by a client, {unit}", _BYTES),
    "comm/total_exchanges": ("exchanges with the server, one after the other", {1.0: ""}),
    "comm/total_simulated_s": ("simulated time, {unit} (clients: {link})", _TIMES),
}
_LOOKS = (
    (VERMILLION, "-", "o"),
    (BLUE, "--", "s"),
    ("#009E73", "-", "D"),
    (BLACK, "-.", "^"),
    ("#CC79A7", "--", "v"),
    ("#E69F00", "-", "P"),
    (SKY, "-.", "X"),
    (GREY, ":", "*"),
)
"""Colours of Okabe and Ito with a line and a marker each."""


def has_communication(rows: Rows) -> bool:
    """Whether rows have what :func:`communication_figure` draws."""
    return _quality(rows) is not None and any(name in row for row in rows for name in _PANELS)


@paper_style()
def communication_figure(runs: Mapping[str, Rows], link: str, title: Sequence[str]) -> "Figure":
    """Accuracy (or, where there is none, loss) against bytes, against exchanges and against simulated time.

    Of several runs the axes of the costs are logarithmic; the initial model, which has cost nothing, is then left out.

    Args:
        runs: Rows of each run by its label; the label of a single run is not shown.
        link: The link behind the simulated time, in words.
        title: Lines of the title.
    """
    several = len(runs) > 1
    figure = new_figure(5.4 if several else 4.6, title)
    quality = next(name for rows in runs.values() if (name := _quality(rows)) is not None)
    panels: list[Axes] = list(figure.subplots(len(_PANELS), sharey=True))
    for axes, (cost, (label, units)) in zip(panels, _PANELS.items(), strict=True):
        curves = {name: _curve(rows, cost, quality) for name, rows in runs.items()}
        ends = [costs[-1] for costs, _ in curves.values() if len(costs) and costs[-1] > 0]
        scale = next((size for size in units if ends and max(ends) >= 2 * size), 1)
        for (name, (costs, values)), look in zip(curves.items(), _cycle(len(curves)), strict=True):
            _draw(axes, costs / scale, values, look, name, log=several)
        axes.set_xlabel(label.format(unit=units[scale], link=link) + (" (log scale)" if several else ""))
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.set_ylabel(_QUALITY[quality])
    if quality.endswith("accuracy"):
        panels[0].set_ylim(0, 1.02)
    if several:
        legend_above(panels[0])
    return figure


def _quality(rows: Rows) -> str | None:
    return next((name for name in _QUALITY if any(name in row for row in rows)), None)


def _curve(rows: Rows, cost: str, quality: str) -> tuple[Series, Series]:
    """Costs and values of the evaluated rounds; the initial model, in row 0, has cost nothing."""
    found = [
        (float(row.get(cost, 0.0)), float(row[quality]))
        for row in rows
        if quality in row and (cost in row or row["round"] == 0)
    ]
    costs, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return costs, values


def _cycle(count: int) -> list[tuple[str, str, str]]:
    return [_LOOKS[index % len(_LOOKS)] for index in range(count)]


def _draw(
    axes: "Axes", costs: Series, values: Series, look: tuple[str, str, str], label: str, *, log: bool
) -> None:
    colour, line, marker = look
    shown = can_be_drawn(values) & ((costs > 0) | (not log))
    axes.plot(
        costs[shown],
        values[shown],
        line,
        color=colour,
        marker=marker,
        markersize=3.5,
        markevery=max(1, int(shown.sum()) // 12),
        linewidth=1.3,
        label=drawable(label),
    )
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
