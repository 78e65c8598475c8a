"""The figures of any run: they show the right numbers, whatever the numbers are, and their texts do not overlap."""

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fl_lightning.pictures import style
from fl_lightning.pictures.federation import (
    calibration_figure,
    class_quality_figure,
    client_sizes_figure,
    clients_figure,
    name_labels,
    partition_figure,
)
from fl_lightning.pictures.learning_curve import learning_curve_figure, policy_changes
from fl_lightning.pictures.series import MAX_POINTS
from fl_lightning.pictures.style import paper_style, write_figure

TITLE = ["FedAvg + FixBN(freeze_round=2)", "LeNet (BN); Digits: IID(), 3 clients; seed 0"]
HISTOGRAM = [[5, 0, 3, 1], [0, 7, 0, 2]]
LONG = [f"a class with a long name, of number {i}" for i in range(100)]
ODD = ["猫", "$x^2", "$\\frac{$", "a" * 300, "\n\t", "", "señal  de\nalto", "_hidden", "🐈", "\udc80"]


def names(ticks):
    return [tick.get_text() for tick in ticks]


def legend(axes):
    return names(axes.get_legend().get_texts())


def png(figure):
    write_figure(Path("picture.png"), figure)
    return Path("picture.png").read_bytes()


def rows_of(count, **metrics):
    """Rows 0 to count - 1, each metric a function of the round."""
    return [
        {"round": r} | {name.replace("_", "/"): value(r) for name, value in metrics.items()}
        for r in range(count)
    ]


def curve(axes, start):
    """Rounds and values of the one curve whose label begins so."""
    (found,) = [line for line in axes.lines if line.get_label().startswith(start)]
    return np.array(found.get_xdata()), np.array(found.get_ydata())


def changes(axes):
    """Rounds of the vertical lines by label."""
    return {c.get_label(): [segment[0][0] for segment in c.get_segments()] for c in axes.collections}


# The learning curve


def test_evaluation_on_test_data_is_labelled_so():
    rows = rows_of(3, test_loss=lambda r: 1.0, test_accuracy=lambda r: r / 4)
    accuracy, loss = learning_curve_figure(rows, {}, TITLE).axes
    assert legend(accuracy) == ["test: 0.5000 after round 2"]
    assert legend(loss) == ["test"]


def test_accuracies_of_clients_own_models_stand_before_the_servers():
    # as FedBN's, which the server's model alone would show in the wrong light
    rows = [
        {"round": r, "val/accuracy": 0.56, "val/loss": 1.0, "val/own_accuracy": 0.97, "val/personal_accuracy": 0.3, "test/accuracy": 0.5}
        for r in range(3)
    ]  # fmt: skip
    accuracy, loss = learning_curve_figure(rows, {}, TITLE).axes
    assert legend(accuracy) == [
        "validation, clients' own models, data like their own: 0.9700 after round 2",
        "validation, clients' own models, the server's data: 0.3000 after round 2",
        "validation, the server's model: 0.5600 after round 2",
        "test: 0.5000 after round 2",
    ]
    assert curve(accuracy, "validation, clients' own models, data")[1].tolist() == [0.97] * 3
    assert legend(loss) == ["validation"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"weight": [[1, "averaged"]], "counter": [[1, "max"]]}, {}),
        ({"affine": [[1, "averaged"], [7, "frozen"]]}, {7: "BN gamma, beta frozen from round 7"}),
        (
            {
                "mean": [[1, "averaged"], [3, "frozen"], [9, "local"]],
                "var": [[1, "averaged"], [3, "frozen"]],
            },
            {3: "BN statistics frozen from round 3", 9: "BN running mean local from round 9"},
        ),
        (
            {"weight": [[1, "averaged"], [2, "local"]], "var": [[1, "averaged"], [2, "frozen"]]},
            {2: "BN running variance frozen; weights local from round 2"},
        ),
    ],
)
def test_policy_changes_in_words(policy, expected):
    assert policy_changes(policy) == expected


def test_change_after_the_last_row_is_not_drawn_yet():
    policy = {"mean": [[1, "averaged"], [4, "frozen"], [5, "averaged"]]}
    (loss,) = learning_curve_figure(rows_of(5, train_loss=lambda r: 1.0), policy, TITLE).axes
    assert list(changes(loss).values()) == [[4]]


def test_many_changes_share_a_label():
    stages = [[r, "frozen" if r % 2 == 0 else "averaged"] for r in range(1, 40)]
    rows = rows_of(40, train_loss=lambda r: 1.0)
    (loss,) = learning_curve_figure(rows, {"mean": stages}, TITLE).axes
    words = "BN running mean frozen from round 2; BN running mean averaged from round 3; BN running …"
    assert changes(loss) == {words: list(range(2, 40))}
    png(loss.figure)


def test_loss_of_many_rounds_is_drawn_as_the_means_that_the_legend_names():
    rows = rows_of(64_001, train_loss=lambda r: 2.0 + r % 2 if r != 1000 else math.nan)[1:]
    (loss,) = learning_curve_figure(rows, {}, TITLE).axes
    rounds, values = curve(loss, "training: clients, before aggregation (means of 128)")
    assert len(rounds) == MAX_POINTS
    assert np.isnan(values).sum() == 1
    assert np.nanmax(abs(values - 2.5)) < 1e-12
    assert rounds[:2].tolist() == [64.5, 192.5]


def test_means_end_with_the_rounds_that_are_left():
    (loss,) = learning_curve_figure(rows_of(1001, train_loss=float), {}, TITLE).axes
    rounds, values = curve(loss, "training")
    assert rounds.tolist() == values.tolist() == [*(3 * i + 1.0 for i in range(333)), 999.5]


def test_values_that_are_not_finite_are_gaps_and_crosses():
    losses = [2.0, math.nan, 1.5, math.inf, -math.inf, 1e300, 1.0]
    rows = rows_of(7, val_loss=losses.__getitem__, val_accuracy=lambda r: math.nan if r == 6 else 0.5)
    accuracy, loss = learning_curve_figure(rows, {}, TITLE).axes
    gaps = np.isnan(loss.lines[0].get_ydata()).tolist()
    assert gaps == [value not in (2.0, 1.5, 1.0) for value in losses]
    for axes, rounds in ((accuracy, [6]), (loss, [1, 3, 4, 5])):
        assert curve(axes, "validation: not finite")[0].tolist() == rounds
    png(loss.figure)


@pytest.mark.parametrize("best", [1.0, 0.04, 0.0, math.nan, math.inf])
def test_accuracy_starts_at_zero_and_the_best_fits(best):
    axes, _ = learning_curve_figure(rows_of(3, val_accuracy=lambda r: best), {}, TITLE).axes
    low, high = axes.get_ylim()
    assert low == 0
    assert high > best or not math.isfinite(best)
    assert high <= 1.03


@pytest.mark.parametrize(
    ("quality", "values"), [("loss", [2.3, 1.9, 1.5]), ("mse", [25.0, 19.0, 15.0]), ("r2", [-1.5, -0.5, 0.5])]
)
def test_a_main_metric_outside_0_to_1_lies_within_its_axis(quality, values):
    rows = rows_of(3, **{f"val_{quality}": values.__getitem__, "train_loss": lambda r: 1.0})
    first, *others = learning_curve_figure(rows, {}, TITLE, quality).axes
    assert [axes.get_ylabel() for axes in others] == ["loss"] * (quality != "loss")
    assert curve(first, "validation")[1].tolist() == values
    low, high = first.get_ylim()
    assert low <= min(values)
    assert max(values) <= high


def test_a_curve_has_the_main_metric_of_a_task_first_and_the_others_that_the_rows_have():
    rows = rows_of(3, val_mae=lambda r: r / 2, val_r2=lambda r: r / 4)
    figure = learning_curve_figure(rows, {}, TITLE, "r2", ["mae", "bias"])
    assert [axes.get_ylabel() for axes in figure.axes] == ["r2", "mae", "loss"]


@pytest.mark.parametrize(("last", "log"), [(0.001, True), (0.0, False), (0.5, False), (-1.0, False)])
def test_loss_over_decades_is_on_a_log_scale_that_is_named(last, log):
    rows = rows_of(3, train_loss=[2.0, 1.0, last].__getitem__)
    (axes,) = learning_curve_figure(rows, {}, TITLE).axes
    assert (axes.get_yscale() == "log") == ("log" in axes.get_ylabel()) == log
    assert axes.get_ylim()[0] <= last


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"round": 0, "val/loss": 2.3, "val/accuracy": 0.1}],
        [{"round": 64_000, "train/loss": math.nan, "val/loss": math.inf, "val/accuracy": math.nan}],
        rows_of(5, train_loss=lambda r: 0.0, val_loss=lambda r: 0.0, val_accuracy=lambda r: 0.0),
        rows_of(50, train_loss=lambda r: -(1.3 ** (4 * r)), val_loss=lambda r: 1e-300 * 10.0**r),
        rows_of(50, train_loss=lambda r: r * 1e-300 * 10.0 ** (6 * r)),
        rows_of(2000, train_loss=lambda r: math.inf, val_accuracy=lambda r: r % 2),
    ],
)
def test_curve_of_any_rows_is_drawn_without_a_warning(rows):
    png(learning_curve_figure(rows, {"mean": [[1, "averaged"], [201, "frozen"]]}, TITLE))


# Clients and classes


def test_cells_are_the_histogram_clients_down_classes_across():
    cells, sizes, _ = partition_figure(HISTOGRAM, ["a", "b", "c", "d"], TITLE).axes
    assert cells.get_ylim() == (1.5, -0.5)
    assert names(cells.get_xticklabels()) == ["a", "b", "c", "d"]
    assert cells.images[0].get_array().tolist() == HISTOGRAM
    assert [bar.get_width() for bar in sizes.patches] == [9, 9]


def test_clients_have_their_names():
    record = {"class_histogram": HISTOGRAM, "sizes": [9, 9], "clients": ["Oslo", "Rome"]}
    cells, *_ = clients_figure(record, None, TITLE).axes
    assert names(cells.get_yticklabels()) == ["Oslo", "Rome"]
    (sizes,) = clients_figure({**record, "class_histogram": []}, None, TITLE).axes
    assert names(sizes.get_xticklabels()) == ["Oslo", "Rome"]


def test_many_clients_are_sorted_by_their_most_frequent_class_and_a_row_is_the_mean_of_some():
    counts = np.zeros((1000, 4), dtype=int)
    counts[range(1000), np.arange(1000) % 4] = 8  # one class each, in turn
    counts[0] = [9, 7, 0, 0]
    cells, sizes, _ = partition_figure(counts.tolist(), None, TITLE).axes
    rows = cells.images[0].get_array()
    assert rows.argmax(1).tolist() == sorted(rows.argmax(1))
    assert rows[0].tolist() == [8, 0, 0, 0]
    assert (rows > 0).sum() == 250 + 2  # two rows have clients of two classes
    assert rows.sum() == pytest.approx((999 * 8 + 16) / 4)
    assert [bar.get_width() for bar in sizes.patches] == pytest.approx(rows.sum(1))
    assert cells.get_ylim() == (999.5, -0.5)
    assert cells.get_ylabel() == "clients, sorted by most frequent class; a row is the mean of about 4"


def test_bars_are_the_classes_from_the_top_and_the_line_is_their_mean():
    figure = class_quality_figure([0.25, None, 1.0, 0.0], ["a", "b", "c", "d"], "test accuracy", TITLE)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [0.25, 0, 1, 0]
    assert names(axes.get_yticklabels()) == ["a   0.250", "b   no samples", "c   1.000", "d   0.000"]
    assert axes.yaxis_inverted()
    assert axes.lines[0].get_xdata()[0] == pytest.approx(1.25 / 3)
    assert "mean of the classes 0.4167" in figure.get_suptitle()
    assert axes.get_xlabel() == "test accuracy"


def test_no_class_with_samples_has_no_mean():
    figure = class_quality_figure([None, None], None, "test accuracy", TITLE)
    assert "mean of the classes nan" in figure.get_suptitle()
    png(figure)


def shown(axis):
    """The labels of an axis that lie upright inside of its view."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [tick.label1 for tick in ticks if not tick.label1.get_rotation()]


def overlapping(figure):
    """Pairs of texts that overlap, as they are drawn."""
    with paper_style():
        FigureCanvasAgg(figure).draw()
    texts = [figure._suptitle]
    for axes in figure.axes:
        texts += [axes.xaxis.label, axes.yaxis.label, *axes.texts, *shown(axes.xaxis), *shown(axes.yaxis)]
    boxes = {text: text.get_window_extent() for text in texts if text.get_text() and text.get_visible()}
    pairs = combinations(boxes.items(), 2)
    return [(a.get_text(), b.get_text()) for (a, box), (b, other) in pairs if box.overlaps(other)]


@pytest.mark.parametrize(
    ("clients", "classes", "largest", "known"),
    [
        (1, 1, 1, None),
        (3, 2, 10**6, LONG),
        (10, 10, 10**5, LONG),
        (100, 2, 900, None),
        (3500, 62, 900, None),
        (3, 100, 900, LONG),
    ],
)
def test_texts_of_any_federation_do_not_overlap(clients, classes, largest, known):
    counts = np.random.default_rng(0).integers(0, largest + 1, (clients, classes))
    labels = known and known[:classes]
    assert not overlapping(partition_figure(counts.tolist(), labels, TITLE))
    assert not overlapping(client_sizes_figure(counts.sum(1).tolist(), TITLE))
    assert not overlapping(
        class_quality_figure((counts[0] / largest).tolist(), labels, "test accuracy", TITLE)
    )


@pytest.mark.parametrize("positive", ["W" * 300, ""])
@pytest.mark.parametrize("bins", [[9], [*range(10)]])
def test_texts_of_a_calibration_curve_do_not_overlap(positive, bins):
    assert not overlapping(calibration_figure(curve_rows(bins), positive, TITLE))


def curve_rows(bins):
    return [[low / 10, (low + 1) / 10, 10**6 - low, low / 10 + 0.05, 1 - low / 10] for low in bins]


# Names and style


def test_odd_names_are_drawn_without_a_warning():
    labels = name_labels(ODD, len(ODD))
    assert labels[3:6] == ["a" * 18, "4", "5"]
    assert labels[6:8] == ["señal de alto", "_hidden"]
    assert name_labels(["a"], 2) == name_labels(None, 2) == ["0", "1"]
    title = ["Метод_$\\frac{$ 猫", "x" * 2000, ""]
    png(partition_figure([list(range(10))] * 3, ODD, title))
    png(class_quality_figure([0.5] * 10, ODD, "test accuracy", title))
    for name in ODD:
        png(calibration_figure(curve_rows([0, 9]), name, title))


def test_settings_of_the_user_neither_count_nor_change():
    plain = png(partition_figure(HISTOGRAM, None, TITLE))
    custom = {"font.size": 30.0, "axes.facecolor": "red", "text.usetex": True, "savefig.transparent": True}
    before = rcParams.copy()
    rcParams.update(custom)
    try:
        assert png(partition_figure(HISTOGRAM, None, TITLE)) == plain
        assert {key: rcParams[key] for key in custom} == custom
    finally:
        rcParams.update(before)


def test_pictures_are_drawn_without_pyplot():
    """pyplot keeps each figure in memory until the figure is closed, and chooses a window system."""
    sources = [path.read_text() for path in Path(style.__file__).parent.glob("*.py")]
    assert len(sources) >= 8
    assert not any("pyplot" in source for source in sources)
