"""Runs and studies loaded in Python: attributes with types, plain numbers, and frames of pandas."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from pandas.testing import assert_frame_equal

from fl_lightning import ConfigurationError, load_run, load_study
from fl_lightning.experiments.studies.study_frame import Chosen, Verdict
from fl_lightning.experiments.studies.tables import whole_table, write_tables
from tests.support.study_frames import study_frame
from tests.support.study_in_process import study as run_study
from tests.support.study_in_process import write
from tests.support.written_runs import write_run, write_study


def test_a_run_has_its_settings_its_rounds_and_its_result(tmp_path):
    run = load_run(write_run(tmp_path / "a-s0", accuracy=0.1 + 0.2))
    assert run.config["model"]["local_steps"] == 7
    assert [row["val/accuracy"] for row in run.metrics] == [0.0, (0.1 + 0.2) / 2, 0.1 + 0.2]
    assert run.result["rounds"] == 2
    assert run.values == {"test/loss": 1.75, "test/accuracy": 0.1 + 0.2}


def test_an_unfinished_run_has_rounds_and_says_that_it_has_no_result(tmp_path):
    run = load_run(str(write_run(tmp_path / "a-s0", finished=False)))
    assert not run.finished
    assert len(run.metrics) == 3
    with pytest.raises(ConfigurationError, match=r"^load_run: .*a-s0 has no result.json.*; resume it, .*$"):
        _ = run.result


def test_a_folder_that_is_no_run_names_the_runs_in_it(tmp_path):
    write_run(tmp_path / "bn" / "a-s0")
    with pytest.raises(ConfigurationError, match=r"^load_run: .*bn is no run directory .*; it has .*bn/a-s0"):
        load_run(tmp_path / "bn")
    with pytest.raises(ConfigurationError, match=r"^load_study: .*bn is no study's folder .*; give"):
        load_study(tmp_path / "bn")


def test_a_study_whose_name_has_slashes_finds_its_runs(tmp_path):
    folder = write_study(tmp_path / "runs")
    deeper = folder.parent / "paper" / "table9"
    deeper.parent.mkdir()
    cells = load_study(folder.rename(deeper)).cells
    assert [Path(directory).is_dir() for directory in cells["directory"]] == [*(cells["phase"] == "done")]
    assert load_run(cells["directory"].iloc[0]).finished


def test_a_study_has_a_cell_for_each_combination_and_seed(tmp_path):
    study = load_study(write_study(tmp_path / "runs"))
    assert [row.labels["method"] for row in study.rows] == ["BN", "BN", "GN", "GN"]
    assert study.claims[0].claim == "GN > BN"
    assert study.cells.index.names == study.values.index.names == ["method", "model.E"]
    first, *_, last = study.cells.itertuples()
    assert (first.Index, first.seed, last.Index, last.seed) == (("BN", "1"), 0, ("GN", "10"), 1)
    assert study.rows[0].of("test/accuracy").to_dict() == {0: 0.125, 1: 0.1875}
    assert (last.phase, last.why, last.published) == ("failed", "the disk is full", 0.4512)
    assert study.rows[-1].of("test/accuracy").to_dict() == {0: 0.625}
    assert load_run(first.directory).result["method"] == "FedAvg"


def test_a_saved_study_is_loaded_as_it_was(tmp_path):
    values = {"a": {0: float("nan"), 1: 0.1 + 0.2}, "b": {0: float("-inf")}}
    rows = [{"labels": {"seed": "x"}, "values": values, "rounds": 6, "data": {"training": "0"}}]
    rows.append(
        {"labels": {"seed": "y"}, "values": {}, "runs": [{"seed": 0, "phase": "failed", "why": "no"}]}
    )
    verdict, choice = (
        Verdict("x > y", "undecided", "w"),
        Chosen("lr", {}, {}, "a", None, {"1": None}, 9, [], []),
    )
    study = study_frame(rows, {"seed": ["x", "y"]}, {"a": "A"}, choices=[choice], claims=[verdict])
    study.save(tmp_path / "runs/studies/one")
    loaded = load_study(tmp_path / "runs/studies/one")
    for before, after in ((study.cells, loaded.cells), (study.values, loaded.values)):
        columns = [name for name in before if name != "directory"]
        assert_frame_equal(after[columns], before[columns], check_exact=True)
    for name in ("name", "title", "axes", "metrics", "choices", "claims", "known", "report"):
        assert getattr(loaded, name) == getattr(study, name)


def test_a_study_without_axes_has_a_single_row(tmp_path):
    folder, row = tmp_path / "runs/studies/one", {"labels": {}, "values": {"a": {0: 0.25, 1: 0.75}}}
    row |= {"rounds": 1, "train_seconds": 1.0, "samples": 1, "exchanges": 1, "upload_bytes": 1}
    failed = [{"seed": seed, "phase": "failed", "why": "no"} for seed in (0, 1)]
    for rows, values, text in (
        ([row], ["0.25", "0.75"], "0.500 ± 0.354"),
        ([{**row, "values": {}, "runs": failed}], ["", ""], "failed: seed 0, 1"),
    ):
        study_frame(rows, {}, {"a": "A"}).save(folder)
        study = load_study(folder)
        write_tables(folder, study)
        assert [row.labels for row in study.rows] == [{}]
        cells = [*csv.DictReader((folder / "cells.csv").read_text().splitlines())]
        assert [*cells[0]][:3] == ["seed", "phase", "a"]
        assert [cell["a"] for cell in cells] == values
        assert whole_table(study).iloc[0, 0] == text


def test_the_csv_of_cells_is_of_plain_numbers_that_read_back_bit_for_bit(tmp_path):
    study = load_study(write_study(tmp_path / "runs"))
    study.values.iloc[1:3, 3] = [0.1 + 0.2, float("nan")]
    write_tables(tmp_path, study)
    rows = [*csv.DictReader((tmp_path / "cells.csv").read_text().splitlines())]
    assert len(rows) == 8
    assert [*rows[0]] == [
        "method", "model.E", "seed", "phase", "test/accuracy", "metric", "published", "learning_rate", "rounds",
        "samples", "upload_bytes", "download_bytes", "exchanges", "train_seconds", "diverged", "directory",
    ]  # fmt: skip
    assert (rows[1]["method"], rows[1]["model.E"], rows[1]["seed"], rows[1]["upload_bytes"]) == (
        "BN",
        "1",
        "1",
        "1500000",
    )
    assert float(rows[1]["test/accuracy"]) == 0.1 + 0.2
    assert rows[2]["test/accuracy"] == "nan"
    assert (rows[7]["phase"], rows[7]["test/accuracy"], rows[7]["rounds"]) == ("failed", "", "")


def test_an_axis_with_the_name_of_a_column_keeps_its_labels(tmp_path):
    study = load_study(write_study(tmp_path / "runs"))
    names = ["samples", "seed"]
    found = replace(
        study,
        axes={"samples": ["BN", "GN"], "seed": ["1", "10"]},
        spread=None,
        cells=study.cells.rename_axis(names),
        values=study.values.rename_axis(names),
    )
    write_tables(tmp_path, found)
    first, second, *_, last = csv.DictReader((tmp_path / "cells.csv").read_text().splitlines())
    assert [*first][:4] == ["samples", "seed", "run_seed", "phase"]
    assert [first[x] for x in ("samples", "seed", "run_seed", "run_samples")] == ["BN", "1", "0", "2800"]
    assert second["run_seed"] == "1"
    assert (last["samples"], last["seed"]) == ("GN", "10")
    table = whole_table(found)
    assert ([*table.columns][:2], [*table.iloc[0]][:2]) == (["samples", "seed"], ["BN", "1"])
    table = whole_table(found, columns=["samples"])
    assert ([*table.columns], [*table.iloc[0]]) == (["samples", "seed", "samples"], ["BN", "1", "2,800"])


def test_frames_have_the_same_numbers(tmp_path):
    study = load_study(write_study(tmp_path / "runs"))
    means = study.values.groupby(["method", "model.E"])["value"].mean()
    assert means["BN", "1"] == (0.125 + 0.1875) / 2
    rounds = load_run(study.cells["directory"].iloc[0]).frame()
    assert rounds.index.name == "round"
    assert [*rounds["val/accuracy"]] == [0.0, 0.25, 0.5]


@pytest.mark.slow
def test_a_study_shows_the_models_of_clients_beside_the_server_s(ran):
    fedbn = {"trainer.callbacks": ["FedBN"]}
    methods = {"BN": {}, "FedBN": fedbn, "clients": {**fedbn, "metric": "test/personal_accuracy"}}
    f1 = {"class_path": "torchmetrics.F1Score", "init_args": {"task": "multiclass", "average": "macro"}}
    settings = {"trainer.max_epochs": 1, "model.metrics": {"f1": f1}}
    scale = {"base": "tiny.yaml", "seeds": [0], "settings": settings}
    metrics = {"test/accuracy": "accuracy", "test/f1": "F1", "test/loss": "loss"}
    write(
        axes={"method": methods},
        without=[],
        published=[],
        claims=[],
        metrics=metrics,
        scales={"quick": scale},
    )
    run_study()
    study = load_study("runs/studies/s-quick")
    bn, fedbn, clients = (row.values.set_index("metric")["value"].to_dict() for row in study.rows)
    places = study.cells["directory"]
    result = load_run(places.iloc[1]).values
    names = [name for name in result if name.startswith(("test/personal_", "test/own_"))]
    assert {"test/personal_accuracy", "test/own_accuracy", "test/personal_f1"} <= {*names}
    local = {name: result[name] for name in names}
    server = {"server/test/accuracy": result["test/accuracy"]}
    assert fedbn == {**{name: result[name] for name in metrics}, **local, **server}
    personal = {name: result[name.replace("/", "/personal_")] for name in ("test/accuracy", "test/f1")}
    assert clients == {**personal, **local, **server}
    assert bn == {name: load_run(places.iloc[0]).values[name] for name in metrics}
    assert study.rows[2].metric == "test/personal_accuracy"


def test_labels_become_columns_by_reset_index(tmp_path):
    study = load_study(write_study(tmp_path / "runs"))  # its axis "method" is described by the runs too
    cells, values = study.cells.reset_index(), study.values.reset_index()
    assert {*study.axes, "run_method", "run_partition"} <= {*cells.columns}
    assert {*study.axes, "metric"} <= {*values.columns}


@pytest.mark.parametrize(
    "content", [b"\xff\x00", b"[1, 2]", b"text", b"", b"{a: [", b"[" * 10_000, b"name: x\n"]
)
def test_a_configuration_that_no_run_writes_is_one_line(tmp_path, content):
    place = write_run(tmp_path / "a-s0")
    (place / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"config.yaml is no resolved configuration") as error:
        _ = load_run(place).config
    assert "\n" not in str(error.value)
