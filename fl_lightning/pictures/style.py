"""Style of figures: colours, labels, legends, files."""

import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_lightning.files import write_bytes

WIDTH = 7.0
"""Width of every figure in inches: the usual width of text in a paper."""

DOTS_PER_INCH = 150

BLACK, GREY, LIGHT_GREY = "#000000", "#555555", "#999999"
BLUE, VERMILLION, SKY = "#0072B2", "#D55E00", "#56B4E9"
GREEN, PURPLE, ORANGE = "#009E73", "#CC79A7", "#E69F00"
"""Palette of Okabe and Ito, with colours that colour-blind readers can distinguish."""

LOOKS = (
    (VERMILLION, "-", "o"),
    (BLUE, "--", "s"),
    (GREEN, "-", "D"),
    (BLACK, "-.", "^"),
    (PURPLE, "--", "v"),
    (ORANGE, "-", "P"),
    (SKY, "-.", "X"),
    (GREY, ":", "*"),
)
"""Colour, line style and marker of the first run, the second run and so on."""

SPLIT_LINES = {
    "train": ("training: clients, before aggregation", (LIGHT_GREY, "-", ".")),
    "val": ("validation", (BLUE, "-", "o")),
    "test": ("test", (VERMILLION, "--", "s")),
}
"""Label, colour, line style and marker of the curves for each split, keyed by split."""


PERSONAL = {
    "own": ("clients' own models, data like their own", (GREEN, "-", "D")),
    "personal": ("clients' own models, the server's data", (PURPLE, "-.", "^")),
}
"""Label and style of curves for the clients' own models, keyed by the metric's prefix.

These curves are drawn before the server model's curve."""

COST_AXES: dict[str, tuple[str, Mapping[float, str]]] = {
    "comm/total_bytes_per_client": (
        "sent and received by a client, {unit}",
        {1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "bytes"},
    ),
    "comm/total_exchanges": ("exchanges with the server, one after the other", {1.0: ""}),
    "comm/total_simulated_s": (
        "simulated time, {unit} (clients: {link})",
        {86400.0: "days", 3600.0: "h", 60.0: "min", 1.0: "s"},
    ),
}
"""Axis label and units of each communication cost, keyed by metric.

Units are keyed by size, as in ``{1e9: "GB"}``.
"""


class Panel(NamedTuple):
    """A panel of BN measurements.

    Attributes:
        axis: Label of the y-axis.
        curves: Labels of the curves, keyed by metric.
        heading: Name of the quantity, with a hint on how to read it.
        zero: Whether a line marks 0.
    """

    axis: str
    curves: Mapping[str, str]
    heading: str
    zero: bool = False


DRIFT = (
    Panel(
        "L1 distance",
        {
            "bn/local_deviation": "clients' batch statistics to the server's running statistics",
            "bn/global_change": "change of the server's running statistics in a round, 0 if frozen",
        },
        "Statistics mismatch: how far clients are from the server's mean and variance",
    ),
    Panel(
        "variance",
        {"bn/window_variance": "variance over the last measured rounds, mean over clients"},
        "Stability of a client's batch statistics: low if they have settled",
    ),
    Panel(
        "loss",
        {"train/loss": "mean of the clients' local models before aggregation"},
        "Training loss",
    ),
    Panel(
        "relative\nL2 distance",
        {
            "bn/gradient_deviation": "all parameters",
            "bn/gradient_deviation_affine": "BN's gamma and beta",
            "bn/gradient_deviation_weights": "other parameters",
        },
        "Gradient deviation: 0 up to rounding if clients follow the union batch's gradient",
    ),
    Panel(
        "relative error",
        {"bn/mean_bias": "running means", "bn/var_bias": "running variances"},
        "Bias of running statistics: 0 if they are those of all training data",
    ),
    Panel(
        "difference in\naccuracy",
        {
            "bn/train_eval_gap": "running statistics minus statistics of the evaluation batch",
            "bn/recalibration_gap": "running statistics minus statistics of all training data",
        },
        "Train-test discrepancy: below 0 if running statistics cost accuracy",
        zero=True,
    ),
)
"""Panels of BN measurements."""

LAYERS = {
    "local_deviation_mean": "distance of clients' batch means from the server's running means, per channel",
    "local_deviation_var": "distance of clients' batch variances from the server's running variances, per channel",
    "gradient_deviation": "relative distance of clients' mean gradient from the union batch's gradient",
}
"""Quantities that are shown for each layer, with their titles."""

_STYLE = {
    "agg.path.chunksize": 10_000,  # by default, Agg rejects curves of many thousand points
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.titlesize": 9,
    "font.size": 9,
    "legend.fontsize": 8,
    "lines.markersize": 4,
    "pdf.fonttype": 42,  # with TrueType, text is selectable
    "svg.fonttype": "none",
    "svg.hashsalt": "",  # makes the ids of SVG elements reproducible
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@contextmanager
def paper_style() -> Iterator[None]:
    """Draw figures in this project's style. The user's settings of matplotlib have no effect."""
    with style.context(["default", _STYLE]):
        yield


def new_figure(height: float, title: Sequence[str] = ()) -> Figure:
    """Return a figure whose height is ``height`` inches plus the title.

    If a line of the title is too long, it is broken into at most three lines.
    """
    lines = [
        line for text in title for line in textwrap.wrap(text, 92, max_lines=3, placeholder=" …") or [""]
    ]
    figure = Figure(figsize=(WIDTH, height + 0.2 + 0.16 * len(lines)), layout="constrained")
    figure.suptitle(literal("\n".join(lines)), x=0.01, ha="left", linespacing=1.3)
    return figure


def legend_above(axes: Axes, heading: str | None = None) -> None:
    """Put a legend with a heading above the data, if at least one curve has a label."""
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        # every column is as wide as the longest label
        columns = max(1, min(3, 105 // (max(map(len, labels)) + 8)))
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=columns,
            frameon=False,
            borderaxespad=0.2,
            title=heading,
            title_fontproperties={"size": 8.5, "weight": "bold"},
            alignment="left",
        )


def literal(text: str) -> str:
    """Return a text that matplotlib draws literally: escape ``$`` and replace invalid Unicode."""
    return text.encode(errors="replace").decode().replace("$", r"\$")


_METADATA = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
}
"""Settings that remove matplotlib's name and the time from files."""


def rendered(figure: Figure, form: str) -> bytes:
    """Return a figure as the bytes of a ``png``, ``pdf`` or ``svg`` file.

    Equal figures give equal bytes. Text in a ``pdf`` or ``svg`` is selectable.
    """
    content = BytesIO()
    with paper_style(), warnings.catch_warnings():
        # no warning about a missing glyph: matplotlib draws a box in its place
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(content, format=form, dpi=DOTS_PER_INCH, metadata=_METADATA[form])
    return content.getvalue()


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure atomically in the format of its suffix: ``.png``, ``.pdf`` or ``.svg``.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    write_bytes(path, rendered(figure, path.suffix[1:]))
