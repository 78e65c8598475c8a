"""Panels of a study's figures.

The axes of a study, such as the method, have labels. Each label of one axis has a curve. Each
combination of labels of the other axes has a panel.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fl_lightning.experiments.studies.axis_labels import compared, labels_in_words, varied
from fl_lightning.experiments.studies.study_frame import Row, StudyFrame
from fl_lightning.pictures.style import GREY, LOOKS, literal, new_figure

PUBLISHED = "published"
"""Text in a figure's legend for values that a paper has published."""

BAND = 0.18
"""Opacity of a band that shows the range of values over seeds."""

Look = tuple[str, str, str]
"""Colour, line style and marker."""


class Panels:
    """A figure with several panels of curves.

    Args:
        results: Results of a study.
        along: Axis of the study that is drawn horizontally, or None (default).

    Attributes:
        axes: Matplotlib axes of each panel.
        columns: Number of panels in a row.
    """

    def __init__(self, results: StudyFrame, along: str | None = None) -> None:
        line = compared(results, along)
        others = [axis for axis in varied(results) if axis not in (*line, along)]
        self._rows: dict[str, dict[str, list[Row]]] = {}
        for row in results.rows:
            curves = self._rows.setdefault(labels_in_words(row.labels, others), {})
            curves.setdefault(labels_in_words(row.labels, line) or "mean", []).append(row)
        self._labels = [*dict.fromkeys(label for curves in self._rows.values() for label in curves)]
        count = len(self._rows)
        self.columns = 2 if count == 4 else min(count, 3)
        lines = -(-count // self.columns)
        self._figure = new_figure((2.6 if lines == 1 else 2.1 * lines) + 0.07 * len(self._labels))
        grid = self._figure.subplots(lines, self.columns, sharex=True, sharey=True, squeeze=False)
        self.axes: list[Axes] = [*grid.flat[:count]]
        for name, axes in zip(self._rows, self.axes, strict=True):
            axes.set_title(literal(name), fontsize="medium")
            axes.grid(color="0.9")
        for axes in grid.flat[count:]:
            axes.remove()

    def curves(self) -> Iterator[tuple[Axes, Look, str, list[Row]]]:
        """Yield each curve as a tuple (axes, look, label, rows). The rows are the curve's points."""
        for axes, curves in zip(self.axes, self._rows.values(), strict=True):
            for label, rows in curves.items():
                yield axes, look_of(self._labels.index(label)), literal(label), rows

    def finished(self, across: str, up: str, band: str = "", bars: str = "") -> Figure:
        """Add axis labels and a legend; return the figure.

        Args:
            across: Label of the horizontal axis.
            up: Label of the vertical axis.
            band: Text for a band in the legend (default: the legend has no band).
            bars: Text for bars in the legend (default: the legend has no bars).
        """
        handles: dict[str, Any] = {}
        for number, axes in enumerate(self.axes):
            if number + self.columns >= len(self.axes):
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


def look_of(number: int) -> Look:
    """Return the look of the label with the index ``number``. The first 64 looks are different."""
    _, line, marker = LOOKS[(number + number // len(LOOKS)) % len(LOOKS)]
    return LOOKS[number % len(LOOKS)][0], line, marker


def range_in_words(what: str, counts: Sequence[int]) -> str:
    """Describe the range of a band or of bars, as in ``"band: min to max of 3 runs"``.

    Args:
        what: ``"band"`` or ``"bar"``.
        counts: Number of runs of each curve. Without a count, the text is empty.
    """
    runs = " to ".join(map(str, dict.fromkeys((min(counts), max(counts))))) if counts else ""
    return f"{what}: min to max of {runs} runs" if runs else ""
