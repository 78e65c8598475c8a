"""The look of the figures and how they become files; matplotlib is imported when the first one is drawn."""

import logging
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH = 7.0
"""Width of every figure in inches, the text width of a paper."""

DOTS_PER_INCH = 150

BLACK, GREY, LIGHT_GREY = "#000000", "#555555", "#999999"
BLUE, VERMILLION, SKY = "#0072B2", "#D55E00", "#56B4E9"
"""Colours of Okabe and Ito, which the colour-blind can tell apart."""

_STYLE = {
    "agg.path.chunksize": 10_000,  # Agg refuses one path of many thousand points
    "axes.grid": False,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.titlesize": 9,
    "font.size": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@contextmanager
def paper_style() -> Iterator[None]:
    """Draw in this project's style: the user's own matplotlib settings do not count, and are as before afterwards."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # where it keeps its caches is not the user's concern
    try:
        import matplotlib as mpl

        settings: dict[Any, Any] = {
            key: mpl.rcParamsDefault[key] for key in mpl.rcParamsDefault if key != "backend"
        }
        with mpl.rc_context(settings | _STYLE):
            yield
    finally:
        log.setLevel(level)


def new_figure(height: float, title: Sequence[str]) -> "Figure":
    """An empty figure under a title.

    Args:
        height: Height below the title in inches.
        title: Lines of the title; long ones are wrapped, and cut after three.
    """
    from matplotlib.figure import Figure

    lines = [
        line
        for text in title
        for line in textwrap.wrap(drawable(text), 92, max_lines=3, placeholder=" …") or [""]
    ]
    figure = Figure(figsize=(WIDTH, height + 0.2 + 0.16 * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), x=0.01, ha="left", linespacing=1.3, parse_math=False)
    return figure


def legend_above(axes: "Axes") -> None:
    """A legend between the title and the data, which it cannot hide; none where nothing has a label."""
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = max(1, min(3, 105 // (max(map(len, labels)) + 8)))  # as many as are sure to fit
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2)


def count_on(axis: "Axis") -> None:
    """Put an axis' ticks at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def class_labels(names: Sequence[str] | None, count: int, length: int = 18) -> list[str]:
    """What to write beside each class: its name, ``"class 6"`` where that cannot be drawn.

    Args:
        names: The names, None for the bare numbers.
        count: Number of classes.
        length: Names are cut to so many characters.
    """
    if names is None or len(names) != count:
        return [str(number) for number in range(count)]
    texts = [" ".join(name.split()) for name in names]
    return [
        (text if len(text) <= length else text[: length - 1] + "…")
        if text and drawable(text) == text
        else f"class {number}"
        for number, text in enumerate(texts)
    ]


def drawable(text: str) -> str:
    """The text with a question mark for each character that the font lacks."""
    known = _characters()
    return "".join(character if character in known else "?" for character in text)


@cache
def _characters() -> frozenset[str]:
    import matplotlib as mpl
    from matplotlib.ft2font import FT2Font

    font = FT2Font(f"{mpl.get_data_path()}/fonts/ttf/DejaVuSans.ttf")
    return frozenset(map(chr, font.get_charmap()))


def write_figure(path: Path, figure: "Figure") -> None:
    """Write a figure as PNG, atomically; the same figure gives the same bytes.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    content = BytesIO()
    with paper_style():
        figure.savefig(content, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    with atomic_write(path) as file:
        file.write(content.getvalue())
