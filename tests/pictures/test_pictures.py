"""Pictures of a run: they show the right numbers, whatever the numbers are, and never endanger a result."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import attempts, write_config
from command_line import run_rendered as run
from matplotlib import rcParams
from matplotlib.colors import to_rgb
from PIL import Image

from fl_lightning.pictures import style as drawing
from fl_lightning.pictures.federation import class_accuracy_figure, client_sizes_figure, partition_figure
from fl_lightning.pictures.learning_curve import MAX_POINTS, learning_curve_figure, policy_changes
from fl_lightning.pictures.style import class_labels, drawable, write_figure
from fl_lightning.run_directory import drawings as run_pictures
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.metrics import read_metrics

TITLE = ["FedAvg + FixBN(freeze_round=2)", "LeNet (BN); Digits: IID(), 3 clients; seed 0"]
PICTURES = ("partition.png", "learning_curve.png", "class_accuracy.png")
HISTOGRAM = [[5, 0, 3, 1], [0, 7, 0, 2]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        return Attempt(run().attempt.path.resolve())


def read(path):
    return json.loads(path.read_text())


def texts(axes):
    return [text.get_text() for text in axes.texts]


def names(ticks):
    return [tick.get_text() for tick in ticks]


def line(axes, start):
    """The drawn line whose label begins so, as rounds and values."""
    (found,) = [
        x for x in axes.lines if x.get_label().startswith(start) and "not finite" not in x.get_label()
    ]
    return np.array(found.get_xdata()), np.array(found.get_ydata())


def vertical_lines(axes):
    """Rounds of the vertical lines by label."""
    return {c.get_label(): [segment[0][0] for segment in c.get_segments()] for c in axes.collections}


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def png(figure):
    write_figure(Path("picture.png"), figure)
    return Path("picture.png").read_bytes()


def size(content):
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


# A run


def test_finished_run_has_every_picture(finished):
    for name in PICTURES:
        with Image.open(finished.path / name) as picture:
            assert picture.format == "PNG"
            assert picture.width == drawing.WIDTH * drawing.DOTS_PER_INCH
            assert 200 < picture.height < 1300
            assert "Software" not in picture.info
            assert len(picture.convert("L").getcolors()) > 10
    assert not [path for path in finished.path.iterdir() if path.name.endswith(".tmp")]


def test_equal_runs_give_equal_bytes_and_another_seed_other_ones(finished):
    again, other = run().attempt, run("--seed_everything", 1).attempt
    for name in PICTURES:
        assert (again.path / name).read_bytes() == (finished.path / name).read_bytes()
        assert (again.path / name).read_bytes() != (other.path / name).read_bytes()


def test_stopped_run_has_its_curve_and_the_resumed_run_draws_them_all(tmp_path, monkeypatch):
    (tmp_path / "stop.py").write_text(
        "import os\nfrom fl_lightning import FederatedCallback\n"
        "class Stop(FederatedCallback):\n"
        "    def on_round_start(self, trainer, pl_module, cohort):\n"
        "        if cohort.round == 3:\n"
        f"            os.kill(os.getpid(), {int(signal.SIGTERM)})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fixbn = {"class_path": "FixBN", "init_args": {"freeze_round": 2}}
    write_config({"trainer.callbacks": [fixbn, {"class_path": "stop.Stop"}]})
    with pytest.raises(SystemExit):
        run()
    (folder,) = Path("runs/tiny").iterdir()
    assert {path.name for path in folder.glob("*.png")} == {"partition.png", "learning_curve.png"}
    before = (folder / "learning_curve.png").read_bytes()
    run("--ckpt_path", "last")
    assert {path.name for path in folder.glob("*.png")} == set(PICTURES)
    assert (folder / "learning_curve.png").read_bytes() != before


def test_run_taken_further_drops_the_class_accuracy_of_the_shorter_one(monkeypatch):
    attempt = run("--trainer.max_epochs", 2).attempt
    assert attempt.class_accuracy.exists()
    monkeypatch.setattr("fl_lightning.run_directory.result.draw_results", lambda *_: None)
    run("--ckpt_path", "last", "--trainer.max_epochs", 3)
    assert not attempt.class_accuracy.exists()


def test_result_and_picture_name_the_accuracy_of_each_class_on_the_test_set(finished):
    result = read(finished.result)
    found = result["class_accuracy"]
    assert found["split"] == "test"
    assert found["classes"] == list("0123456789")
    assert sum(found["samples"]) == 359
    right = sum(a * n for a, n in zip(found["accuracy"], found["samples"], strict=True))
    assert right / 359 == pytest.approx(result["test/accuracy"], abs=1e-6)


def test_picture_that_cannot_be_drawn_costs_nothing_but_itself(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no ink")

    monkeypatch.setattr(run_pictures, "write_figure", fail)
    attempt = run("--trainer.max_epochs", 1).attempt
    assert read(attempt.result)["rounds"] == 1
    assert not list(attempt.path.glob("*.png"))
    printed = capsys.readouterr()
    assert "Result" in printed.out
    for name in PICTURES:
        assert f"{attempt.path / name} was not written: RuntimeError: no ink\n" in printed.err


def test_result_is_written_before_its_pictures(monkeypatch, capsys):
    def look(attempt, title):
        assert attempt.result.exists()
        assert "Result" in capsys.readouterr().out
        seen.append(attempt)

    seen = []
    monkeypatch.setattr("fl_lightning.run_directory.result.draw_results", look)
    assert [run("--trainer.max_epochs", 1).attempt] == seen


def test_fast_dev_run_draws_nothing():
    run("--trainer.fast_dev_run", "true")
    assert attempts() == []
    assert not list(Path().rglob("*.png"))


def test_pictures_of_a_run_say_what_it_is(finished, monkeypatch):
    drawn = {}
    monkeypatch.setattr(run_pictures, "write_figure", lambda path, figure: drawn.update({path.name: figure}))
    attempt = run(
        "--seed_everything", 3, "--model.model.init_args.norm", "gn", "--trainer.callbacks", "[]"
    ).attempt
    assert set(drawn) == set(PICTURES)
    for figure in drawn.values():
        assert figure.get_suptitle().startswith(
            "FedAvg\nLeNet (GN); Digits: Shards(class_fraction=0.4), 3 clients; seed 3"
        )
    cells = drawn["partition.png"].axes[0]
    assert cells.images[0].get_array().tolist() == read(attempt.partition)["class_histogram"]
    rounds, values = line(drawn["learning_curve.png"].axes[0], "validation")
    rows = [row for row in read_metrics(attempt.metrics) if "val/accuracy" in row]
    assert rounds.tolist() == [row["round"] for row in rows]
    assert values.tolist() == [row["val/accuracy"] for row in rows]
    bars = drawn["class_accuracy.png"].axes[0].patches
    assert [bar.get_width() for bar in bars] == read(attempt.result)["class_accuracy"]["accuracy"]


def test_regression_on_own_data_gets_loss_and_client_sizes(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(run_pictures, "write_figure", lambda path, figure: drawn.update({path.name: figure}))
    (tmp_path / "own.py").write_text(
        "import torch\nfrom helpers import ArrayClient\nfrom fl_lightning import FederatedDataModule\n"
        "class Own(FederatedDataModule):\n"
        "    def __init__(self, seed: int = 0) -> None:\n"
        "        x = torch.linspace(-1, 1, 60).view(30, 2)\n"
        "        parts = [ArrayClient(x[:n], x[:n].sum(1, keepdim=True), 5) for n in (10, 30, 20)]\n"
        "        super().__init__(parts, parts[1], seed)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    linear = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 1}}
    write_config(
        {
            "data": {"class_path": "own.Own"},
            "model.model": linear,
            "model.loss": {"class_path": "torch.nn.MSELoss"},
            "trainer.callbacks": None,
        }
    )
    assert read(run().attempt.result)["class_accuracy"] is None
    assert set(drawn) == {"partition.png", "learning_curve.png"}
    assert [bar.get_height() for bar in drawn["partition.png"].axes[0].patches] == [10, 30, 20]
    (loss,) = drawn["learning_curve.png"].axes
    assert loss.get_ylabel().startswith("loss")


# The learning curve


def rows_of(count, **metrics):
    """Rows 0 to count - 1, each metric a function of the round."""
    return [
        {"round": r} | {name.replace("_", "/"): value(r) for name, value in metrics.items()}
        for r in range(count)
    ]


def test_curve_of_a_run_marks_the_rounds_of_its_policy(finished):
    rows, policy = read_metrics(finished.metrics), read(finished.policy)
    figure = learning_curve_figure(rows, policy, TITLE)
    accuracy, loss = figure.axes
    assert policy["mean"] == "averaged; frozen from round 3"
    assert vertical_lines(accuracy) == {"BN statistics frozen from round 3": [3]}
    assert list(vertical_lines(loss).values()) == [[3]]
    assert "BN statistics frozen from round 3" in legend(accuracy)
    for axes, name in ((accuracy, "val/accuracy"), (loss, "val/loss")):
        rounds, values = line(axes, "validation")
        assert dict(zip(rounds, values, strict=True)) == {r["round"]: r[name] for r in rows if name in r}
    rounds, values = line(loss, "training")
    assert (rounds.tolist(), values.tolist()) == ([1, 2, 3, 4], [row["train/loss"] for row in rows[1:]])
    assert accuracy.get_xlim() == loss.get_xlim()
    assert loss.get_xlabel() == "communication round"


def test_evaluation_on_test_data_is_labelled_so():
    rows = rows_of(3, test_loss=lambda r: 1.0, test_accuracy=lambda r: r / 4)
    accuracy, loss = learning_curve_figure(rows, {}, TITLE).axes
    assert legend(accuracy) == ["test: 0.5000 after round 2"]
    assert legend(loss) == ["test"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"weight": "averaged", "counter": "max"}, {}),
        ({"affine": "averaged; frozen from round 7"}, {7: "BN gamma, beta frozen from round 7"}),
        (
            {
                "mean": "averaged; frozen from round 3; local from round 9",
                "var": "averaged; frozen from round 3",
            },
            {3: "BN statistics frozen from round 3", 9: "BN means local from round 9"},
        ),
        (
            {"weight": "averaged; local from round 2", "var": "averaged; frozen from round 2"},
            {2: "BN variances frozen; weights local from round 2"},
        ),
    ],
)
def test_policy_changes_in_words(policy, expected):
    assert policy_changes(policy) == expected


def test_change_after_the_last_row_is_not_drawn_yet():
    rows = rows_of(5, train_loss=lambda r: 1.0)
    policy = {"mean": "averaged; frozen from round 4; averaged from round 5"}
    (loss,) = learning_curve_figure(rows, policy, TITLE).axes
    assert list(vertical_lines(loss).values()) == [[4]]


def test_many_changes_share_a_label():
    stages = "".join(f"; {'frozen' if r % 2 else 'averaged'} from round {r}" for r in range(2, 40))
    (loss,) = learning_curve_figure(
        rows_of(40, train_loss=lambda r: 1.0), {"mean": "averaged" + stages}, TITLE
    ).axes
    assert vertical_lines(loss) == {"the policy changes in 38 rounds": list(range(2, 40))}


def test_training_loss_of_many_rounds_is_drawn_as_the_means_that_its_axis_names():
    rows = rows_of(64_001, train_loss=lambda r: 2.0 + r % 2 if r != 1000 else math.nan)[1:]
    (loss,) = learning_curve_figure(rows, {}, TITLE).axes
    rounds, values = line(loss, "training")
    assert len(rounds) == MAX_POINTS
    assert np.isnan(values).sum() == 1
    assert np.nanmax(abs(values - 2.5)) < 1e-12
    assert rounds[:2].tolist() == [64.5, 192.5]
    assert loss.get_ylabel() == "loss\n(training: mean of 128 rounds)"
    assert size(png(loss.figure))[0] == 1050


def test_means_end_with_the_rounds_that_are_left():
    (loss,) = learning_curve_figure(rows_of(1001, train_loss=float), {}, TITLE).axes
    rounds, values = line(loss, "training")
    assert rounds.tolist() == values.tolist() == [*(3 * i + 1.0 for i in range(333)), 999.5]


def test_values_that_are_not_finite_are_gaps_and_crosses():
    losses = [2.0, math.nan, 1.5, math.inf, -math.inf, 1e300, 1.0]
    rows = rows_of(7, val_loss=losses.__getitem__, val_accuracy=lambda r: math.nan if r == 6 else 0.5)
    accuracy, loss = learning_curve_figure(rows, {}, TITLE).axes
    assert [math.isnan(v) for v in line(loss, "validation")[1]] == [x not in (2.0, 1.5, 1.0) for x in losses]
    for axes, rounds in ((accuracy, [6]), (loss, [1, 3, 4, 5])):
        (crosses,) = [x for x in axes.lines if x.get_marker() == "x"]
        assert crosses.get_xdata().tolist() == rounds
        assert "validation: not finite" in legend(axes)
    png(loss.figure)


@pytest.mark.parametrize("best", [1.0, 0.04, 0.0, math.nan, math.inf])
def test_accuracy_starts_at_zero_and_the_best_fits(best):
    axes, _ = learning_curve_figure(rows_of(3, val_accuracy=lambda r: best), {}, TITLE).axes
    low, high = axes.get_ylim()
    assert low == 0
    assert high > best or not math.isfinite(best)
    assert high <= 1.03


def test_loss_over_decades_is_on_a_log_scale_that_is_named():
    for smallest, scale in (
        (0.001, "log"),
        (0.5, "linear"),
        (0.0, "linear"),
        (-1.0, "linear"),
        (1e-300, "linear"),
    ):
        (axes,) = learning_curve_figure(
            rows_of(3, train_loss=[2.0, 1.0, smallest].__getitem__), {}, TITLE
        ).axes
        assert axes.get_yscale() == scale
        assert ("log scale" in axes.get_ylabel()) == (scale == "log")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"round": 0, "val/loss": 2.3, "val/accuracy": 0.1}],
        [{"round": 1, "train/loss": 2.3}],
        [{"round": 64_000, "train/loss": math.nan, "val/loss": math.inf, "val/accuracy": math.nan}],
        rows_of(5, train_loss=lambda r: 0.0, val_loss=lambda r: 0.0, val_accuracy=lambda r: 0.0),
        rows_of(50, train_loss=lambda r: -(1.3 ** (4 * r)), val_loss=lambda r: 1e-300 * 10.0**r),
        rows_of(2000, train_loss=lambda r: math.inf, val_accuracy=lambda r: r % 2),
    ],
)
def test_curve_of_any_rows_is_drawn_without_a_warning(rows):
    policy = {"mean": "averaged; frozen from round 201"}
    width, height = size(png(learning_curve_figure(rows, policy, TITLE)))
    assert width == 1050
    assert 300 < height < 900


# The partition


def test_cells_are_the_histogram_clients_down_classes_across():
    figure = partition_figure(HISTOGRAM, ["a", "b", "c", "d"], TITLE)
    cells, sizes = figure.axes
    assert cells.images[0].get_array().tolist() == HISTOGRAM
    assert cells.get_ylim() == (1.5, -0.5)
    assert (cells.get_xlabel(), cells.get_ylabel()) == ("class", "client")
    assert names(cells.get_xticklabels()) == ["a", "b", "c", "d"]
    assert names(cells.get_yticklabels()) == ["0", "1"]
    written = {text.get_position(): text.get_text() for text in cells.texts}
    assert written == {(c, i): str(HISTOGRAM[i][c]) for i in range(2) for c in range(4)}
    assert [bar.get_width() for bar in sizes.patches] == [9, 9]
    assert texts(sizes) == ["9", "9"]


def test_numbers_stand_out_from_their_cells():
    counts = [[0, 20, 40, 60, 80, 100]]
    cells = partition_figure(counts, None, TITLE).axes[0]
    image = cells.images[0]
    for count, text in zip(counts[0], cells.texts, strict=True):
        light = [
            np.dot(rgb, (0.21, 0.72, 0.07))
            for rgb in (image.to_rgba([count])[0][:3], to_rgb(text.get_color()))
        ]
        assert abs(light[0] - light[1]) > 0.4


@pytest.mark.parametrize(
    ("clients", "classes", "numbers"), [(1, 2, True), (20, 20, True), (100, 10, False), (3, 30, False)]
)
def test_many_cells_have_a_colour_bar_instead_of_numbers(clients, classes, numbers):
    counts = np.random.default_rng(0).integers(0, 900, (clients, classes))
    figure = partition_figure(counts.tolist(), None, TITLE)
    assert bool(figure.axes[0].texts) == numbers
    assert len(figure.axes) == (2 if numbers else 3)
    assert figure.axes[0].images[0].get_array().tolist() == counts.tolist()
    sizes = figure.axes[1].patches
    drawn = sizes[0].get_data().values if clients > 50 else [bar.get_width() for bar in sizes]
    assert list(drawn) == counts.sum(1).tolist()


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 25), (100, 1000)])
@pytest.mark.parametrize("largest", [1, 10**7])
def test_partition_of_any_shape_is_drawn_without_a_warning(shape, largest):
    counts = np.random.default_rng(0).integers(0, largest, shape)
    width, height = size(png(partition_figure(counts.tolist(), ["a long class name"] * shape[1], TITLE)))
    assert width == 1050
    assert 200 < height < 1300


@pytest.mark.parametrize("sizes", [[0], [7, 3], list(range(40)), list(range(3000))])
def test_sizes_of_any_number_of_clients_are_drawn(sizes):
    axes = client_sizes_figure(sizes, TITLE).axes[0]
    drawn = (
        axes.patches[0].get_data().values if len(sizes) > 50 else [bar.get_height() for bar in axes.patches]
    )
    assert list(drawn) == sizes
    assert size(png(axes.figure)) == (1050, 438)


# Accuracy by class


def test_bars_are_the_classes_from_the_top_and_the_line_is_their_mean():
    accuracy = [0.25, None, 1.0, 0.0]
    figure = class_accuracy_figure(accuracy, ["a", "b", "c", "d"], "test", TITLE)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [0.25, 0, 1, 0]
    assert texts(axes) == ["0.250", "no samples", "1.000", "0.000"]
    assert names(axes.get_yticklabels()) == ["a", "b", "c", "d"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert axes.lines[0].get_xdata()[0] == pytest.approx(1.25 / 3)
    assert "mean of the classes 0.4167" in figure.get_suptitle()
    assert figure.get_supxlabel() == "test accuracy"


@pytest.mark.parametrize(("classes", "panels"), [(2, 1), (10, 1), (100, 2), (200, 4), (1000, 1)])
def test_accuracy_of_any_number_of_classes_is_drawn(classes, panels):
    accuracy = [i / classes for i in range(classes)]
    figure = class_accuracy_figure(accuracy, None, "val", TITLE)
    assert len(figure.axes) == panels
    if classes <= 200:
        assert [bar.get_width() for axes in figure.axes for bar in axes.patches] == accuracy
        shown = [name for axes in figure.axes for name in names(axes.get_yticklabels())]
        assert shown == [str(i) for i in range(classes)]
    else:
        assert figure.axes[0].patches[0].get_data().values.tolist() == accuracy
    width, height = size(png(figure))
    assert width == 1050
    assert 200 < height < 1300


def test_no_class_with_samples_has_no_mean():
    figure = class_accuracy_figure([None, None], None, "test", TITLE)
    assert not figure.axes[0].lines
    assert texts(figure.axes[0]) == ["no samples"] * 2
    png(figure)


# Names and style

ODD_NAMES = [
    "猫",
    "$x^2",
    "$\\frac{$",
    "a" * 300,
    "\n\t",
    "",
    "señal  de\nalto",
    "Ωmega",
    "_hidden",
    "🐈",
    "\udc80",
]


def test_names_are_drawn_as_they_are_or_give_way_to_a_numbered_class():
    expected = [
        "class 0",
        "$x^2",
        "$\\frac{$",
        "a" * 17 + "…",
        "class 4",
        "class 5",
        "señal de alto",
        "Ωmega",
        "_hidden",
        "class 9",
        "class 10",
    ]
    labels = class_labels(ODD_NAMES, len(ODD_NAMES))
    assert labels == expected
    assert class_labels(["a"], 2) == class_labels(None, 2) == ["0", "1"]


def test_odd_names_are_drawn_without_a_warning():
    title = ["Метод_$\\frac{$ 猫", "x" * 2000, ""]
    figure = partition_figure([list(range(11))] * 3, ODD_NAMES, title)
    assert names(figure.axes[0].get_xticklabels()) == class_labels(ODD_NAMES, 11)
    png(figure)
    png(class_accuracy_figure([0.5] * 11, ODD_NAMES, "test", title))
    png(learning_curve_figure(rows_of(2, train_loss=float), {}, title))
    assert drawable("Метод 猫") == "Метод ?"


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


def test_matplotlib_is_imported_for_the_first_figure_and_pyplot_never():
    code = (
        "import sys; from pathlib import Path; from fl_lightning import drawing, learning_curve, pictures\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"drawing.write_figure(Path('x.png'), pictures.partition_figure({HISTOGRAM}, None, ['t']))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_home_that_cannot_be_written_is_no_matter_of_a_picture(tmp_path):
    (tmp_path / "home").touch()
    code = (
        "import logging; from pathlib import Path; from fl_lightning import drawing, pictures\n"
        f"drawing.write_figure(Path('x.png'), pictures.partition_figure({HISTOGRAM}, None, ['t']))\n"
        "assert logging.getLogger('matplotlib').level == logging.NOTSET\n"
    )
    elsewhere = {"HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"}
    environment = {key: value for key, value in os.environ.items() if key not in elsewhere}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
