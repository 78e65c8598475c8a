"""The look of the figures: colours, words, legends, and how they become files; matplotlib is imported when the first is drawn."""

import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0
"""Width of every figure in inches, the text width of a paper."""

DOTS_PER_INCH = 150

BLACK, GREY, LIGHT_GREY = "#000000", "#555555", "#999999"
BLUE, VERMILLION, SKY = "#0072B2", "#D55E00", "#56B4E9"
GREEN, PURPLE, ORANGE = "#009E73", "#CC79A7", "#E69F00"
"""Colours of Okabe and Ito, which the colour-blind can tell apart."""

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
"""Colour, line and marker of the first, second, ... of several runs."""

SPLITS = {
    "train": ("training: clients, before aggregation", (LIGHT_GREY, "-", ".")),
    "val": ("validation", (BLUE, "-", "o")),
    "test": ("test", (VERMILLION, "--", "s")),
}
"""What a figure calls the data that a metric is of, and how its curve looks."""


@cache
def qualities() -> Mapping[str, str]:
    """Return what figures call the quality of each shipped task, by the name of the metric."""
    from fl_lightning.round.tasks import QUALITIES  # late: torchmetrics imports pyplot

    return QUALITIES


PERSONAL = {
    "own": ("clients' own models, data like their own", (GREEN, "-", "D")),
    "personal": ("clients' own models, the server's data", (PURPLE, "-.", "^")),
}
"""What a figure calls the accuracies of a method whose clients keep state, and how their curves look; before the server's."""

COSTS: dict[str, tuple[str, Mapping[float, str]]] = {
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
"""What communication costs, by metric: the words beside its axis, and its units by size."""

DRIFT = {
    "BN statistics:\nL1 norm": {
        "bn/local_deviation": "clients' first batches: distance to the server's",
        "bn/global_change": "the server's running ones: change in a round",
    },
    "BN statistics:\nvariance": {
        "bn/window_variance": "of a client's first batches over rounds, mean of clients",
    },
    "training loss": {"train/loss": "of the clients' own models before aggregation, mean"},
    "gradient deviation,\nrelative": {
        "bn/gradient_deviation": "all parameters, clients' mean against their union batch",
        "bn/gradient_deviation_affine": "BN's gamma and beta",
        "bn/gradient_deviation_weights": "all others",
    },
    "BN statistics:\nrelative bias": {
        "bn/mean_bias": "running means against a pooled pass over all training data",
        "bn/var_bias": "running variances likewise",
    },
    "accuracy\ndifference": {
        "bn/train_eval_gap": "running statistics minus those of the evaluation batch",
        "bn/recalibration_gap": "running statistics minus those of the pooled pass",
    },
}
"""What BN does to a run: the words beside each axis, and those of its metrics."""

LAYERS = {
    "local_deviation_mean": "clients' batch means: distance from the server's running ones, per channel",
    "local_deviation_var": "clients' batch variances: distance from the server's running ones, per channel",
    "gradient_deviation": "clients' mean gradient: distance from their union batch's, relative",
}
"""The quantities that are shown layer by layer, and what is said of them."""

_STYLE = {
    "agg.path.chunksize": 10_000,  # Agg refuses one path of many thousand points
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.titlesize": 9,
    "font.size": 9,
    "legend.fontsize": 8,
    "lines.markersize": 4,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "",  # the same figure gives the same names
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@contextmanager
def paper_style() -> Iterator[None]:
    """Draw in this project's style: the user's own matplotlib settings do not count, and are as before afterwards."""
    from matplotlib import style

    with style.context(["default", _STYLE]):
        yield


def new_figure(height: float, title: Sequence[str]) -> "Figure":
    """An empty figure under a title.

    Args:
        height: Height below the title in inches.
        title: Lines of the title; long ones are wrapped, and cut after three.
    """
    from matplotlib.figure import Figure

    lines = [
        line for text in title for line in textwrap.wrap(text, 92, max_lines=3, placeholder=" …") or [""]
    ]
    figure = Figure(figsize=(WIDTH, height + 0.2 + 0.16 * len(lines)), layout="constrained")
    figure.suptitle(literal("\n".join(lines)), x=0.01, ha="left", linespacing=1.3)
    return figure


def legend_above(axes: "Axes") -> None:
    """A legend between the title and the data, which it cannot hide; none where nothing has a label."""
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = max(1, min(3, 105 // (max(map(len, labels)) + 8)))  # as many as are sure to fit
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2)


def literal(text: str) -> str:
    """A text of the user's that matplotlib draws as it is: no formulas, and nothing that is not Unicode."""
    return text.encode(errors="replace").decode().replace("$", r"\$")


_METADATA = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
}
"""What matplotlib would say of itself and of the time."""


def rendered(figure: "Figure", form: str) -> bytes:
    """A figure as ``png``, ``pdf`` or ``svg``, whose text stays text; the same figure gives the same bytes."""
    content = BytesIO()
    with paper_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the box in its place says so
        figure.savefig(content, format=form, dpi=DOTS_PER_INCH, metadata=_METADATA[form])
    return content.getvalue()


def write_figure(path: Path, figure: "Figure") -> None:
    """Write a figure atomically, in the form that its name ends in: ``.png``, ``.pdf`` or ``.svg``.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    write_bytes(path, rendered(figure, path.suffix[1:]))
