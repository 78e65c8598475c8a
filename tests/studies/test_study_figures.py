"""The figures of studies."""

import json
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest

from fl_lightning.experiments.studies.figures import pictures, write_figures
from fl_lightning.experiments.studies.tables import whole_table
from fl_lightning.files import write_json, write_text
from tests.support.study_frames import study_frame
from tests.support.written_runs import study_of, write_run


def test_what_was_sent_is_an_axis_where_it_differs(tmp_path):
    places = [write_run(tmp_path / f"x{norm}", norm=norm, name=norm) for norm in ("bn", "gn")]
    assert [picture.name for picture in pictures(study_of(places))] == ["by_run", "curves"]
    path = places[1] / "result.json"
    write_json(path, {**json.loads(path.read_text()), "upload_bytes": 5_000})
    *_, bytes_sent = pictures(study_of(places))
    axes = bytes_sent.draw().axes[0]
    assert axes.get_xlabel() == "sent and received, kB"
    assert [list(line.get_xdata()) for line in axes.lines] == [[500.0, 1000.0, 1500.0]] * 2


def test_an_axis_of_numbers_has_room_for_0_beside_small_ones(tmp_path):
    gammas = ["0", "0.01", "1"]
    rows = [{"labels": {"gamma": gamma}, "values": {"a": {0: 0.5}}} for gamma in gammas]
    found = study_frame(rows, {"gamma": gammas}, {"a": "accuracy"})
    by_gamma = next(picture for picture in pictures(found) if picture.name == "by_gamma").draw()
    (axes,) = by_gamma.axes
    places = axes.transAxes.inverted().transform(axes.transData.transform([(float(x), 0.5) for x in gammas]))
    assert places[1][0] - places[0][0] > 0.1
    assert places[2][0] - places[1][0] > 0.1


def test_axes_with_the_same_last_part_have_pictures_and_columns_of_their_own():
    rates = {"client_optimizer.lr": ["0.1", "0.2"], "server_optimizer.lr": ["0.5", "1"]}
    labels = [dict(zip(rates, pair, strict=True)) for pair in product(*rates.values())]
    took = {"samples": 1, "upload_bytes": 1.0, "exchanges": 1, "train_seconds": 1.0}
    rows = [{"labels": x, "values": {"a": {0: 0.5}}, "rounds": 1, **took} for x in labels]
    found = study_frame(rows, rates, {"a": "accuracy"})
    names = [picture.name for picture in pictures(found)]
    assert names == ["by_client_optimizer_lr", "by_server_optimizer_lr", "heat_map"]
    assert [*whole_table(found).columns][:3] == [*rates, "accuracy"]


def test_a_label_that_is_read_by_a_metric_of_its_own_has_its_own_curve(tmp_path):
    place = write_run(tmp_path / "a-s0")
    rows = [{"round": r, "val/accuracy": 0.5, "val/accuracy_silobn": 0.25 * r} for r in range(3)]
    write_text(place / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    found = study_of([place])
    silo = found.cells.assign(metric="test/accuracy_silobn").rename(index={"bn": "silo"})
    found = replace(found, axes={"run": ["bn", "silo"]}, cells=pd.concat([found.cells, silo]))
    curves = next(picture for picture in pictures(found) if picture.name == "curves").draw().axes[0]
    assert [list(line.get_ydata()) for line in curves.lines] == [[0.5, 0.5, 0.5], [0.0, 0.25, 0.5]]


def test_curves_of_a_name_that_a_lightning_module_has_logged_keep_the_name(tmp_path):
    place = write_run(tmp_path / "a-s0")
    rows = [{"round": r, "val_acc": 0.25 * r} for r in range(3)]
    write_text(place / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    found = study_of([place])
    found = replace(found, metrics={"val_acc": "validation accuracy"})
    curves = next(picture for picture in pictures(found) if picture.name == "curves")
    assert curves.caption.startswith("val_acc over communication rounds")
    (axes,) = curves.draw().axes
    assert axes.get_ylabel() == "val_acc"
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.0, 0.25, 0.5]]


def test_a_map_of_differences_has_0_in_the_middle(tmp_path):
    """What is not there has no colour, and what one method has more is as dark as what it has less."""
    rows = [
        {"labels": {"method": m, "E": e, "b": b}, "values": {"a": {0: x}}}
        for m, e, b, x in [("BN", "1", "2", 0.5), ("GN", "1", "2", 0.75), ("BN", "9", "2", 0.5), ("GN", "9", "2", 0.375), ("BN", "1", "4", 0.5)]
    ]  # fmt: skip
    axes = {"method": ["BN", "GN"], "E": ["1", "9"], "b": ["2", "4"]}
    settings = {"spread": "E", "difference": "GN - BN"}
    names = [picture.name for picture in pictures(study_frame(rows, axes, {"a": "accuracy"}, **settings))]
    assert "difference" not in names  # b is 2 in both pairs
    rows.append({**rows[1], "labels": {"method": "GN", "E": "1", "b": "4"}})
    found = study_frame(rows, axes, {"a": "accuracy"}, **settings)
    (picture,) = (picture for picture in pictures(found) if picture.name == "difference")
    (axes,) = picture.draw().axes
    assert [text.get_text() for text in axes.texts] == ["+0.250", "-0.125", "+0.250"]
    assert axes.collections[0].get_clim() == (-0.25, 0.25)
    assert axes.get_title() == "GN \N{MINUS SIGN} BN, accuracy"


@pytest.mark.pictures
def test_pictures_of_earlier_findings_do_not_stay(tmp_path):
    labels = [("BN", "1"), ("GN", "1"), ("BN", "9"), ("GN", "9")]
    rows = [{"labels": {"method": m, "E": e}, "values": {"a": {0: 0.5}}} for m, e in labels]
    axes, metrics = {"method": ["BN", "GN"], "E": ["1", "9"]}, {"a": "accuracy"}
    write_figures(tmp_path, study_frame(rows, axes, metrics, spread="E"))
    (tmp_path / "by_hand.png").touch()
    assert {path.stem for path in tmp_path.iterdir()} == {"by_E", "heat_map", "by_hand"}
    write_figures(tmp_path, study_frame(rows[:2], axes, metrics, spread="E"))  # E has one label now
    assert {path.stem for path in tmp_path.iterdir()} == {"by_method", "by_hand"}


def legend_of(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_a_band_and_a_bar_say_what_they_are(tmp_path):
    places = [write_run(tmp_path / f"bn-s{seed}", seed=seed, accuracy=0.5 + seed / 8) for seed in range(3)]
    places += [
        write_run(tmp_path / f"gn-s{seed}", norm="gn", name="gn", seed=seed, accuracy=0.875 + seed / 16)
        for seed in range(2)
    ]
    by_run, curves = pictures(study_of(places))
    assert legend_of(curves.draw()) == ["bn", "gn", "band: min to max of 2 to 3 runs"]
    assert legend_of(by_run.draw()) == ["bar: min to max of 2 to 3 runs"]
    single = study_of([places[0], places[3]])
    assert [legend_of(picture.draw()) for picture in pictures(single)] == [[], ["bn", "gn"]]


@pytest.mark.parametrize(
    "curves",
    [
        [[0.0, 0.25, 0.5], [0.0, 0.5, 1.0]],  # the largest value is above 1.15 times the largest mean
        [[-0.75, -0.5, 0.25]],
        [[-0.75, -0.5, -0.25], [-0.5, -0.5, -0.5]],
    ],
)
def test_all_values_of_the_curves_lie_within_the_axis(tmp_path, curves):
    places = [write_run(tmp_path / f"bn-s{seed}", seed=seed) for seed in range(len(curves))]
    for place, values in zip(places, curves, strict=True):
        rows = [{"round": r, "val/accuracy": x} for r, x in enumerate(values)]
        write_text(place / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    picture = next(picture for picture in pictures(study_of(places)) if picture.name == "curves")
    low, high = picture.draw().axes[0].get_ylim()
    assert low <= min(min(values) for values in curves)
    assert max(max(values) for values in curves) <= high


def test_by_method_has_the_looks_of_the_curves_and_an_axis_of_the_differences(tmp_path):
    places = [
        write_run(tmp_path / f"{name}-s0", name=name, norm=name, accuracy=x)
        for name, x in (("bn", 0.9), ("gn", 0.91), ("ln", 0.93))
    ]
    by_run, curves = (picture.draw().axes[0] for picture in pictures(study_of(places)))
    looks = [[(line.get_color(), line.get_marker()) for line in axes.lines] for axes in (by_run, curves)]
    assert looks[0] == looks[1]
    assert len({*looks[0]}) == 3
    low, high = by_run.get_ylim()
    assert high - low < 2 * (0.93 - 0.9)
