"""Figures of clients and classes: the partition, and the server model's accuracy per class."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from fl_lightning.pictures.style import BLACK, GREY, SKY, VERMILLION, literal, new_figure, paper_style

if TYPE_CHECKING:
    from fl_lightning.client_data.federated import PartitionRecord

_MAX_NAMED = 25  # largest number of clients or classes for which the axis shows each name
# largest number of rows; with more clients, a row is the mean of several similar clients
_MAX_ROWS = 250
_MAX_BARS = 200  # largest number of classes for which bars have labels


def clients_figure(
    record: "PartitionRecord", class_names: Sequence[str] | None, title: Sequence[str]
) -> Figure:
    """Draw the number of samples of each client, by class if the data have classes."""
    if record.get("class_histogram"):
        return partition_figure(record["class_histogram"], class_names, title, record.get("clients", ()))
    return client_sizes_figure(record["sizes"], title, record.get("clients", ()))


@paper_style()
def partition_figure(
    histogram: Sequence[Sequence[int]],
    class_names: Sequence[str] | None,
    title: Sequence[str],
    client_names: Sequence[str] = (),
) -> Figure:
    """Draw a heat map of the number of samples, with a row per client and a column per class.

    Bars beside the heat map show each client's total number of samples.

    More than 250 clients are sorted by their most frequent class, and by the share of this class.
    Neighbouring clients are then averaged, which gives 250 rows.

    Args:
        histogram: ``histogram[i][c]`` is the number of samples of class c at client i, as in
            ``partition.json``.
        class_names: Name of each class; None to show class numbers.
        title: Lines of the title.
        client_names: Names of the clients; empty to show client ids. More than 25 clients have no
            names in the picture.
    """
    counts = np.asarray(histogram)
    clients, classes = counts.shape
    label, first = "client", np.arange(clients + 1)  # index of the first client in each row
    if clients > _MAX_ROWS:
        order = np.lexsort((-counts.max(1) / np.maximum(counts.sum(1), 1), counts.argmax(1)))
        first = np.linspace(0, clients, _MAX_ROWS + 1).astype(int)
        counts = np.add.reduceat(counts[order], first[:-1]) / np.diff(first)[:, None]
        label = (
            f"clients, sorted by most frequent class; a row is the mean of about {clients / _MAX_ROWS:.2g}"
        )
    figure = new_figure(0.2 * min(clients, _MAX_NAMED) + 2.0, title)
    cells, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(6, 1))
    # the colour shows the square root, so that small counts are visible
    norm = PowerNorm(0.5, vmin=0, vmax=max(counts.max(), 1))
    edges = (-0.5, classes - 0.5, clients - 0.5, -0.5)
    image = cells.imshow(
        counts, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest", extent=edges
    )
    text = "samples of a class (colours: square root)"
    bar = figure.colorbar(image, ax=(cells, sizes), location="bottom", shrink=0.5, aspect=40, label=text)
    bar.ax.locator_params(nbins=4)
    # no gaps for many clients, since narrow gaps cause moiré patterns
    rows, gap = np.diff(first), 0.2 if clients <= 100 else 0.0
    lower = first[:-1] - 0.5 + gap / 2 * rows
    sizes.barh(lower, counts.sum(1), (1 - gap) * rows, align="edge", color=GREY)
    cells.locator_params(integer=True, nbins=_MAX_NAMED, min_n_ticks=1)
    if client_names and clients <= _MAX_NAMED:
        cells.set_yticks(range(clients), name_labels(client_names, clients))
    if class_names is not None and classes <= _MAX_NAMED:
        names = name_labels(class_names, classes)
        cells.set_xticks(range(classes), names, rotation=40, ha="right", rotation_mode="anchor")
    cells.set(xlabel="class", ylabel=label)
    sizes.set(xlabel="samples")
    sizes.tick_params(axis="y", length=0)
    return figure


@paper_style()
def client_sizes_figure(
    sizes: Sequence[int], title: Sequence[str], client_names: Sequence[str] = ()
) -> Figure:
    """Draw a bar with each client's number of training samples, for data without classes."""
    figure = new_figure(2.4, title)
    axes = figure.subplots()
    axes.bar(range(len(sizes)), sizes, 0.8 if len(sizes) <= 100 else 1.0, color=GREY)
    axes.set(xlabel="client", ylabel="training samples")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    if client_names and len(sizes) <= _MAX_NAMED:
        names = name_labels(client_names, len(sizes))
        axes.set_xticks(range(len(sizes)), names, rotation=40, ha="right", rotation_mode="anchor")
    return figure


@paper_style()
def class_quality_figure(
    quality: Sequence[float | None], class_names: Sequence[str] | None, what: str, title: Sequence[str]
) -> Figure:
    """Draw the server model's quality for each class, and the mean of all classes.

    Args:
        quality: Quality of each class in [0, 1], such as accuracy; None for a class without
            samples.
        class_names: Name of each class; None to show class numbers.
        what: Label of the x-axis, such as ``"test accuracy"``.
        title: Lines of the title.
    """
    values = np.array(quality, dtype=np.float64)  # None becomes NaN
    count, known = len(values), values[~np.isnan(values)]
    mean = known.mean() if len(known) else np.nan
    figure = new_figure(
        0.14 * min(count, _MAX_BARS) + 0.7, [*title, f"mean of the classes {mean:.4f} (dashed line)"]
    )
    axes = figure.subplots()
    axes.barh(range(count), np.nan_to_num(values), color=SKY)
    axes.axvline(mean, color=BLACK, linestyle="--")
    if count <= _MAX_BARS:
        texts = ["no samples" if np.isnan(value) else f"{value:.3f}" for value in values]
        names = name_labels(class_names, count)
        labels = [f"{name}   {text}" for name, text in zip(names, texts, strict=True)]
        axes.set_yticks(range(count), labels, size=7)
        axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 1.01), ylim=(count - 0.4, -0.6), xlabel=what)
    return figure


@paper_style()
def client_quality_figure(
    values: Mapping[str, Sequence[float | None]], names: Sequence[str], what: str, title: Sequence[str]
) -> Figure:
    """Draw each client's values of a metric, one mark for each model. The last model sorts the clients.

    Args:
        values: Values of each client by model; None for a client without a value.
        names: Names of the clients.
        what: Name of the metric.
        title: Lines of the title.
    """
    models = {model: np.array(known, dtype=np.float64) for model, known in values.items()}
    order = np.argsort([*models.values()][-1], kind="stable")  # NaN comes last
    labels = name_labels(names, len(order))
    means = ", ".join(f"{model} {np.nanmean(known):.4f}" for model, known in models.items())
    figure = new_figure(0.14 * min(len(order), _MAX_BARS) + 0.7, [*title, f"mean over clients: {means}"])
    axes = figure.subplots()
    # rings around the points of another model
    ring: dict[str, Any] = {"color": BLACK, "markersize": 8, "fillstyle": "none"}
    point: dict[str, Any] = {"color": VERMILLION, "markersize": 4}
    for (model, known), style in zip(models.items(), (ring, point), strict=False):
        axes.plot(known[order], range(len(order)), "o", label=model, **style)
    if len(order) <= _MAX_BARS:
        axes.set_yticks(range(len(order)), [labels[client] for client in order], size=7)
    else:
        axes.set_ylabel("clients, sorted")
    axes.set(ylim=(len(order) - 0.4, -0.6), xlabel=what)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


@paper_style()
def participation_figure(values: Mapping[str, Sequence[float]], what: str, title: Sequence[str]) -> "Figure":
    """Draw the clients' values of a metric: a column for each group of clients, with its mean.

    Args:
        values: Values of the clients by group. The first group is that of the clients that train.
        what: Name of the metric.
        title: Lines of the title.
    """
    figure = new_figure(2.2, title)
    axes = figure.subplots()
    for place, (group, known) in enumerate(values.items()):
        color = GREY if place == 0 else VERMILLION
        spread = np.linspace(-0.15, 0.15, len(known)) if len(known) > 1 else [0.0]
        axes.plot(place + np.asarray(spread), sorted(known), "o", color=color, markersize=3, label=group)
        axes.hlines(float(np.mean(known)), place - 0.3, place + 0.3, color=BLACK)
    axes.set_xticks(range(len(values)), [group.replace("_", " ") for group in values])
    axes.set(xlabel="clients that train; clients that never train, by source", ylabel=what)
    return figure


@paper_style()
def calibration_figure(bins: Sequence[Sequence[float]], positive: str, title: Sequence[str]) -> Figure:
    """Draw a calibration curve, and below it a bar with the number of samples of each bin.

    Args:
        bins: Lower edge, upper edge, number of samples, mean predicted probability and observed
            share of each bin with samples.
        positive: Name of class 1 if there are two classes. If empty, the curve is of the predicted
            class.
        title: Lines of the title.
    """
    low, high, samples, predicted, observed = np.array(bins).T
    note = f"own test samples of all clients: {samples.sum():,.0f}, in {1 / (high - low)[0]:.0f} bins of equal width"
    labels = "probability of the predicted class", "share of correct predictions"
    if positive:
        (name,) = name_labels([positive], 1)
        labels = f"predicted probability of {name}", "observed share"
    figure = new_figure(4.4, [*title, note])
    curve, counts = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    curve.plot((0, 1), (0, 1), "--", color=GREY, label="perfect calibration")
    curve.plot(predicted, observed, "o-", color=VERMILLION, label="mean of each bin")
    curve.set(xlim=(0, 1), ylim=(-0.02, 1.02), ylabel=labels[1])
    curve.legend(loc="upper left")
    bars = counts.bar(low, samples, high - low, align="edge", color=SKY, edgecolor=GREY)
    counts.bar_label(bars, [f"{count:,.0f}" for count in samples], size=7)
    counts.margins(y=0.3)
    counts.set(xlabel=labels[0], ylabel="samples")
    return figure


def name_labels(names: Sequence[str] | None, count: int) -> list[str]:
    """Return a label for each class or client: the start of its name, or its number."""
    if names is None or len(names) != count:
        return [str(number) for number in range(count)]
    return [literal(" ".join(name.split())[:18]) or str(number) for number, name in enumerate(names)]
