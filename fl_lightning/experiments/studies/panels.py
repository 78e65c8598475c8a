"""Panels of a study's figures.

The axes of a study, such as the method, have labels. Each label of one axis has a curve. Each
combination of labels of the other axes has a panel.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from fl_lightning.experiments.studies.found import Found, Group
from fl_lightning.pictures.style import GREY, LOOKS, literal, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PUBLISHED = "published"
"""Text in a figure's legend for values that a paper has published."""

BAND = 0.18
"""Opacity of a band that shows the range of values over seeds."""


class Grid:
    """A figure with several panels of curves.

    Each label of one axis of the study has a curve. Each combination of labels of the other axes
    has a panel.

    Args:
        found: Findings of a study.
        title: Lines of the title.
        along: Axis of the study that is drawn horizontally, or None (default).

    Attributes:
        panels: Matplotlib axes of each panel.
        columns: Number of panels in a row.
    """

    def __init__(self, found: Found, title: Sequence[str], along: str | None = None) -> None:
        line = compared(found, along)
        others = [axis for axis in varied(found) if axis not in (*line, along)]
        self._groups: dict[str, dict[str, list[Group]]] = {}
        for group in found["groups"]:
            panel = self._groups.setdefault(label_of(group, others), {})
            panel.setdefault(label_of(group, line) or "mean", []).append(group)
        self._labels = [*dict.fromkeys(label for panel in self._groups.values() for label in panel)]
        count = len(self._groups)
        self.columns = 2 if count == 4 else min(count, 3)
        rows = -(-count // self.columns)
        self._figure = new_figure((2.6 if rows == 1 else 2.1 * rows) + 0.07 * len(self._labels), title)
        grid = self._figure.subplots(rows, self.columns, sharex=True, sharey=True, squeeze=False)
        self.panels: list[Axes] = [*grid.flat[:count]]
        for name, axes in zip(self._groups, self.panels, strict=True):
            axes.set_title(literal(name), fontsize="medium")
            axes.grid(color="0.9")
        for axes in grid.flat[count:]:
            axes.remove()

    def curves(self) -> Iterator[tuple["Axes", tuple[str, str, str], str, list[Group]]]:
        """Yield each curve as a tuple (panel, look, label, groups).

        The look is colour, line style and marker. The groups are the combinations of labels that
        the curve shows.
        """
        for axes, curves in zip(self.panels, self._groups.values(), strict=True):
            for label, groups in curves.items():
                yield axes, look_of(self._labels.index(label)), literal(label), groups

    def finished(self, across: str, up: str, band: str = "", bars: str = "") -> "Figure":
        """Add axis labels and a legend; return the figure.

        Args:
            across: Label of the horizontal axis.
            up: Label of the vertical axis.
            band: Text for a band in the legend (default: the legend has no band).
            bars: Text for bars in the legend (default: the legend has no bars).
        """
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: dict[str, Any] = {}
        for number, axes in enumerate(self.panels):
            if number + self.columns >= len(self.panels):
                axes.set_xlabel(literal(across))
                axes.tick_params(labelbottom=True)
            if number % self.columns == 0:
                axes.set_ylabel(literal(up) + axes.get_ylabel())
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if band:
            handles[band] = Patch(color=GREY, alpha=BAND, linewidth=0)
        if bars:
            handles[bars] = Line2D([], [], color=GREY, marker="|", markersize=10, linestyle="none")
        if len(handles) > 1 or bars or PUBLISHED in handles:
            # move the entry of published values to the end of the legend
            handles = dict(sorted(handles.items(), key=lambda handle: handle[0] == PUBLISHED))
            columns = max(1, min(4, 105 // (max(map(len, handles)) + 8)))
            self._figure.legend(
                handles.values(), handles, loc="outside lower left", ncols=columns, frameon=False
            )
        return self._figure


def look_of(number: int) -> tuple[str, str, str]:
    """Return the colour, line style and marker of the label with the index ``number``.

    The first 64 labels look different from each other.
    """
    _, line, marker = LOOKS[(number + number // len(LOOKS)) % len(LOOKS)]
    return LOOKS[number % len(LOOKS)][0], line, marker


def compared(found: Found, along: str | None = None) -> list[str]:
    """Return a list with the axis to compare; it is empty if no axis has several labels.

    The axis to compare is the first axis with several labels, preferably with words as labels.

    Args:
        found: Findings of a study.
        along: Axis to ignore, or None (default).
    """
    names = [axis for axis in varied(found) if axis != along]
    return ([axis for axis in names if not all(map(is_number, found["axes"][axis]))] or names)[:1]


def short(axis: str, axes: Iterable[str] = ()) -> str:
    """Return the last part of an axis's dotted name.

    If several of ``axes`` end with this part, more parts are returned.

    >>> short("model.client_optimizer.lr", ["model.client_optimizer.lr", "model.server_optimizer.lr"])
    'client_optimizer.lr'
    """
    parts, others = axis.split("."), [other for other in axes if other != axis]
    ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), axis)


def varied(found: Found) -> list[str]:
    """Return the axes with two or more labels, except axes chosen on validation data."""
    return [
        axis
        for axis in found["axes"]
        if axis not in found["choose"] and len({group["labels"][axis] for group in found["groups"]}) > 1
    ]


def label_of(group: Group, axes: Sequence[str]) -> str:
    """Return the labels of some axes in words. For a label that is a number, also name the axis.

    >>> label_of({"labels": {"method": "GN", "model.E": "5"}}, ["method", "model.E"])
    'GN, E = 5'
    """
    labels = [(short(axis, group["labels"]), group["labels"][axis]) for axis in axes]
    return ", ".join(f"{axis} = {x}" if is_number(x) else x for axis, x in labels)


def is_number(label: str) -> bool:
    """Return whether a label is a finite number."""
    try:
        return isfinite(float(label))
    except ValueError:
        return False
