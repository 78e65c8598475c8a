"""The figures and tables of BatchNormDiagnostics: what they show, and that they can be drawn of any run."""

import csv
import json
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.text import Text

from fl_lightning.callbacks import BatchNormDiagnostics
from fl_lightning.pictures.drift import drift_figure, layers_figure
from fl_lightning.pictures.style import DRIFT, LAYERS, write_figure
from tests.support.command_line import attempts, run, write_config


def rows(**curves):
    """Rows of metrics: a metric ``bn_x`` for ``bn/x`` is a list of values from round 1 on."""
    count = max(map(len, curves.values()))
    return [
        {"round": r + 1}
        | {n.replace("_", "/", 1): values[r] for n, values in curves.items() if r < len(values)}
        for r in range(count)
    ]


def lines(figure):
    """The labelled lines of all panels, by label."""
    axes = [axes for axes in figure.axes if axes.get_ylabel()]
    return {line.get_label(): line for one in axes for line in one.get_lines()}


def draw(figure, tmp_path):
    write_figure(tmp_path / "x.png", figure)
    return figure


def test_what_was_not_measured_has_no_panel(tmp_path):
    found = draw(drift_figure(rows(bn_gradient_deviation=[1.0, 0.5], train_loss=[2.0, 1.0]), ["x"]), tmp_path)
    assert [axes.get_ylabel() for axes in found.axes] == ["loss", "relative\nL2 distance"]


def test_every_panel_says_in_the_picture_how_to_read_it(tmp_path):
    metrics = [metric for panel in DRIFT for metric in panel.curves]
    values = [{"round": r, **dict.fromkeys(metrics, 0.1 * r), "fixbn/freeze_round": 1} for r in range(1, 4)]
    found = draw(drift_figure(values, ["x"]), tmp_path)
    found.draw_without_rendering()  # at the figure's own resolution
    titles = [axes.get_legend().get_title() for axes in found.axes]
    assert [title.get_text() for title in titles] == [panel.heading for panel in DRIFT]
    assert all(title.get_window_extent().x1 < found.bbox.x1 for title in titles)
    assert [len(axes.get_legend().texts) for axes in found.axes] == [3, 1, 1, 3, 2, 2]
    zero = [line for line in found.axes[-1].get_lines() if list(line.get_ydata()) == [0, 0]]
    assert len(zero) == 1


def test_zeros_stand_at_the_foot_of_a_logarithmic_axis(tmp_path):
    values = [1.0, 0.1, 2e-3, 0.0, 0.0]
    found = draw(drift_figure(rows(bn_global_change=values, fixbn_freeze_round=[3] * 5), ["x"]), tmp_path)
    drawn = lines(found)
    assert (
        drawn["change of the server's running statistics in a round, 0 if frozen"].get_ydata().tolist()
        == values
    )
    axis = found.axes[0].yaxis
    places = axis.get_transform().transform([0.0, *[v for v in axis.get_majorticklocs() if v > 0], 1.0])
    assert (np.diff(places[:-1]) > 0.1 * places[-1]).all()
    assert axis.get_view_interval()[0] < 0
    assert drawn["BN frozen from round 4"].get_xdata() == [3.5, 3.5]


def test_figures_survive_numbers_that_no_axis_can_show(tmp_path):
    bad = [float("nan"), float("inf"), 1e300, 1.0]
    draw(drift_figure(rows(bn_global_change=bad, bn_train_eval_gap=bad, train_loss=bad), ["x"]), tmp_path)
    values = {"gradient_deviation": {r: {"a": value, "b": 0.0} for r, value in enumerate(bad, 1)}}
    draw(layers_figure(values, ["x"]), tmp_path)
    nothing = {"gradient_deviation": {1: {"a": float("nan")}}}
    draw(layers_figure(nothing, ["x"]), tmp_path)


@pytest.mark.parametrize("log", [True, False])
def test_heat_maps_have_the_layers_from_first_to_last_and_columns_half_way_to_the_next_round(log, tmp_path):
    low = 1e-9 if log else 0.4
    by_round = {
        1: {"first": 1.0, "last": 0.5},
        10: {"first": 0.5, "last": low},
        20: {"first": 0.5, "last": low},
    }
    found = draw(layers_figure({"gradient_deviation": by_round}, ["x"]), tmp_path)
    axes = found.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["first", "last"]
    assert axes.yaxis_inverted()
    mesh = axes.collections[0]
    assert mesh.get_array().filled(np.nan).tolist() == [[1.0, 0.5, 0.5], [0.5, low, low]]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0.5, 5.5, 15.0, 20.5]
    assert isinstance(mesh.norm, LogNorm) == log


@pytest.mark.slow
def test_many_layers_keep_their_labels_apart(tmp_path):
    names = [f"stage{i}.0.conv1" for i in range(150)]
    values = {quantity: {1: dict.fromkeys(names, 1.0), 2: dict.fromkeys(names, 0.1)} for quantity in LAYERS}
    figure = draw(layers_figure(values, ["x"]), tmp_path)
    boxes = [text.get_window_extent() for text in figure.axes[0].get_yticklabels()]
    assert all(not one.overlaps(two) for one, two in pairwise(boxes))


def test_before_the_first_round_there_is_nothing_to_show():
    watched = BatchNormDiagnostics()
    assert not any((watched.figures([]), watched.tables(), watched.result_lines()))


@pytest.mark.slow
@pytest.mark.pictures
def test_a_run_leaves_figures_and_a_table_and_says_what_it_found(capsys):
    write_config(
        {
            "trainer.callbacks": [
                {"class_path": "FixBN", "init_args": {"freeze_round": 2}},
                {"class_path": "BatchNormDiagnostics", "init_args": {"every_n_rounds": 1}},
            ]
        }
    )
    cli = run()
    folder = cli.attempt.path
    assert (folder / "bn_drift.png").stat().st_size > 10_000
    assert (folder / "bn_layers.png").stat().st_size > 10_000
    with (folder / "bn_layers.csv").open() as file:
        table = list(csv.DictReader(file))
    assert {row["round"] for row in table} == {"1", "2", "3", "4"}
    assert {row["quantity"] for row in table} >= {*LAYERS, "global_change_var", "window_variance_mean"}
    deviation = {r["round"]: float(r["value"]) for r in table if r["quantity"] == "gradient_deviation"}
    assert deviation["2"] > 0.05
    assert deviation["4"] < 1e-4
    result = json.loads((folder / "result.json").read_text())
    assert result["bn_gradient_deviation"] < 1e-4
    printed = capsys.readouterr()
    assert "gradient deviation" in printed.out
    assert "in round 4" in printed.out
    assert "was not written" not in printed.err
    assert len(attempts()) == 1


def test_a_word_where_a_list_belongs_is_told_with_the_list(capsys):
    write_config(
        {"trainer.callbacks": [{"class_path": "BatchNormDiagnostics", "init_args": {"measure": "gap"}}]}
    )
    with pytest.raises(SystemExit):
        run()
    assert (
        "BatchNormDiagnostics.measure: gap is not valid; it takes Sequence[str], null"
        in capsys.readouterr().err
    )


def test_no_title_of_a_heat_map_leaves_the_figure(tmp_path):
    values = {quantity: {1: {"features.12": 1.0}} for quantity in LAYERS}
    figure = draw(layers_figure(values, ["x"]), tmp_path)
    FigureCanvasAgg(figure).draw()
    titles = [text for text in figure.findobj(Text) if text.get_text() in LAYERS.values()]
    assert len(titles) == len(LAYERS)
    assert all(text.get_window_extent().x1 < figure.bbox.x1 for text in titles)


def test_rounding_looks_like_rounding(tmp_path):
    values = [5e-7, 8e-7]
    axes = draw(drift_figure(rows(bn_gradient_deviation=values), ["x"]), tmp_path).axes[0]
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[1] > 1
    by_round = {r: {"a": value} for r, value in enumerate(values, 1)}
    mesh = layers_figure({"gradient_deviation": by_round}, ["x"]).axes[0].collections[0]
    assert mesh.norm.vmax == 1
