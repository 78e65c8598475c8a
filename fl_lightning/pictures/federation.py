"""The clients and the classes of a run as figures: who holds what, and what the server's model knows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.pictures.style import BLACK, GREY, SKY, class_labels, count_on, new_figure, paper_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_NAMED = 25  # more clients or classes than this go by the numbers of an axis
_MAX_BARS = 50  # more bars than this become one outline
_MAX_COLUMNS = 4  # of bars with names
_MEAN: dict[str, Any] = {"color": BLACK, "linestyle": "--", "linewidth": 1.2}


@paper_style()
def partition_figure(
    histogram: Sequence[Sequence[int]], class_names: Sequence[str] | None, title: Sequence[str]
) -> "Figure":
    """Samples of each class at each client: one row per client, whose size stands at the right.

    Args:
        histogram: ``histogram[i][c]``, the samples of class c at client i, as in ``partition.json``.
        class_names: Name of each class, None for their numbers.
        title: Lines of the title.
    """
    from matplotlib.colors import PowerNorm

    counts = np.asarray(histogram)
    clients, classes = counts.shape
    names = class_labels(class_names, classes)
    named = classes <= _MAX_NAMED
    slanted = named and classes * max(map(len, names)) > 60
    font = min(8.0, 500 / (classes * len(str(counts.max()))))  # points that fit into a cell
    written = named and clients <= _MAX_NAMED and font >= 5
    height = min(max(0.25 * clients, 0.5), 5.5) + 0.5
    figure = new_figure(height + 0.8 * slanted + 0.6 * (not written), title)
    cells, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(6, 1))
    # without numbers the colours must show few samples too
    norm = PowerNorm(1 if written else 0.5, vmin=0, vmax=max(counts.max(), 1))
    image = cells.imshow(counts, cmap="Blues", norm=norm, aspect="auto")
    cells.set(xlabel="class", ylabel="client")
    count_on(cells.yaxis)
    if clients <= _MAX_NAMED:
        cells.set_yticks(range(clients))
    if named:
        slant = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
        cells.set_xticks(range(classes), names, parse_math=False, **slant)
    else:
        count_on(cells.xaxis)
    if written:
        for (client, label), count in np.ndenumerate(counts):
            colour = "white" if norm(count) > 0.55 else BLACK if count else GREY
            cells.text(label, client, str(count), size=font, ha="center", va="center", color=colour)
    else:
        figure.colorbar(
            image,
            ax=(cells, sizes),
            location="bottom",
            shrink=0.5,
            aspect=40,
            label="samples of a class (colours: square root)",
        )
    totals = counts.sum(1).tolist()
    largest = max(*totals, 1)
    _draw_bars(sizes, totals, GREY, horizontal=True)
    room = 0.14 * len(str(largest)) if clients <= _MAX_NAMED else 0
    sizes.set(xlabel="samples", xlim=(0, (1 + room) * largest))
    sizes.set_xticks((0, largest), ("0", str(largest)))
    sizes.tick_params(axis="y", length=0)
    return figure


@paper_style()
def client_sizes_figure(sizes: Sequence[int], title: Sequence[str]) -> "Figure":
    """Number of training samples of each client, for data without classes.

    Args:
        sizes: Samples of each client, as in ``partition.json``.
        title: Lines of the title.
    """
    figure = new_figure(2.4, title)
    axes = figure.subplots()
    _draw_bars(axes, sizes, GREY, horizontal=False)
    axes.set(xlabel="client", ylabel="training samples", ylim=(0, 1.15 * max(*sizes, 1)))
    axes.set_xlim(-0.6, len(sizes) - 0.4)
    if len(sizes) <= _MAX_NAMED:
        axes.set_xticks(range(len(sizes)))
    else:
        count_on(axes.xaxis)
    return figure


@paper_style()
def class_accuracy_figure(
    accuracy: Sequence[float | None],
    class_names: Sequence[str] | None,
    split: str,
    title: Sequence[str],
) -> "Figure":
    """Accuracy of the server's model by class, in the order of the labels, and the mean of the classes.

    Args:
        accuracy: Accuracy of each class in [0, 1], None for a class without samples.
        class_names: Name of each class, None for their numbers.
        split: The data it was measured on: ``"val"`` or ``"test"``.
        title: Lines of the title.
    """
    values = np.array(accuracy, dtype=np.float64)  # None becomes NaN
    mean = float(np.nanmean(values)) if not np.isnan(values).all() else None
    if mean is not None:
        title = [*title, f"mean of the classes {mean:.4f} (dashed line)"]
    columns = -(-len(values) // _MAX_BARS)
    if columns > _MAX_COLUMNS:
        figure = new_figure(2.6, title)
        axes = figure.subplots()
        _draw_bars(axes, np.nan_to_num(values).tolist(), SKY, horizontal=False)
        axes.set(xlabel="class", ylabel=f"{split} accuracy", ylim=(0, 1), xlim=(-0.5, len(values) - 0.5))
        count_on(axes.xaxis)
        if mean is not None:
            axes.axhline(mean, **_MEAN)
        return figure
    names = class_labels(class_names, len(values), length=18 if columns < 3 else 12)
    rows = -(-len(values) // columns)
    figure = new_figure(max((0.2 if columns == 1 else 0.14) * rows, 0.4) + 0.5, title)
    for number, axes in enumerate(figure.subplots(1, columns, squeeze=False)[0]):
        part = slice(number * rows, (number + 1) * rows)
        _draw_named_bars(axes, values[part], names[part], font=8 if columns == 1 else 6)
        # the values stand beyond 1, where neither bars nor the mean reach
        axes.set(xlim=(0, 1.05 + 0.025 * columns**2), ylim=(rows - 0.4, -0.6))
        axes.set_xticks((0, 0.5, 1) if columns == 1 else (0, 1))
        if mean is not None:
            axes.axvline(mean, **_MEAN)
    figure.supxlabel(f"{split} accuracy", size=9)
    return figure


def _draw_named_bars(axes: "Axes", values: NDArray[np.float64], names: Sequence[str], font: float) -> None:
    axes.barh(range(len(values)), np.nan_to_num(values), 0.7, color=SKY)
    axes.set_yticks(range(len(values)), names, parse_math=False, size=font)
    axes.tick_params(axis="y", length=0)
    for place, value in enumerate(values):
        text = "no samples" if np.isnan(value) else f"{value:.3f}"
        axes.text(1, place, text, size=font, ha="right", va="center", transform=axes.get_yaxis_transform())


def _draw_bars(axes: "Axes", values: Sequence[float], colour: str, *, horizontal: bool) -> None:
    """A bar for each value, with the value where they are few; one outline where they are many."""
    if len(values) > _MAX_BARS:
        edges = np.arange(len(values) + 1) - 0.5
        axes.stairs(
            values, edges, orientation="horizontal" if horizontal else "vertical", fill=True, color=colour
        )
        return
    bars = (axes.barh if horizontal else axes.bar)(range(len(values)), values, 0.7, color=colour)
    if len(values) <= _MAX_NAMED:
        axes.bar_label(bars, [str(value) for value in values], padding=2, size=7)
