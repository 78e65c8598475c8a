"""Runs and studies loaded in Python: attributes with types, plain numbers, and frames of pandas."""

import csv
import sys

import pytest
from study_in_process import study as run_study
from study_in_process import write
from written_runs import write_run, write_study

from fl_lightning import ConfigurationError, load_run, load_study
from fl_lightning.experiments.studies.tables import whole_table, write_tables


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
    assert [cell.directory.is_dir() for cell in cells] == [cell.phase == "done" for cell in cells]
    assert load_run(cells[0].directory).finished


def test_a_study_has_a_cell_for_each_combination_and_seed(tmp_path):
    study = load_study(write_study(tmp_path / "runs"))
    assert [group["labels"]["method"] for group in study.rows] == ["BN", "BN", "GN", "GN"]
    assert study.claims[0]["claim"] == "GN > BN"
    first, *_, last = study.cells
    assert (first.labels, first.seed, first.values) == (
        {"method": "BN", "model.E": "1"},
        0,
        {"test/accuracy": 0.125},
    )
    assert (last.seed, last.phase, last.values, last.published) == (1, "failed", {}, 0.4512)
    assert load_run(first.directory).result["method"] == "FedAvg"


def test_the_csv_of_cells_is_of_plain_numbers_that_read_back_bit_for_bit(tmp_path):
    study = load_study(write_study(tmp_path / "runs"))
    study.rows[0]["values"]["test/accuracy"]["1"] = 0.1 + 0.2
    study.rows[1]["values"]["test/accuracy"]["0"] = float("nan")
    write_tables(tmp_path, study.found)
    rows = [*csv.DictReader((tmp_path / "cells.csv").read_text().splitlines())]
    assert len(rows) == 8
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
    for group in study.rows:
        group["labels"] = {"samples": group["labels"]["method"], "seed": group["labels"]["model.E"]}
    found = {**study.found, "spread": None, "axes": {"samples": ["BN", "GN"], "seed": ["1", "10"]}}
    write_tables(tmp_path, found)
    first, second, *_, last = csv.DictReader((tmp_path / "cells.csv").read_text().splitlines())
    assert [*first][:4] == ["samples", "seed", "run_seed", "phase"]
    assert [first[x] for x in ("samples", "seed", "run_seed", "run_samples")] == ["BN", "1", "0", "2800"]
    assert second["run_seed"] == "1"
    assert (last["samples"], last["seed"]) == ("GN", "10")
    header, rows = whole_table(found, brief=True)
    assert (header[:2], rows[0][:2]) == (["samples", "seed"], ["BN", "1"])
    header, rows = whole_table(found, columns=["samples"])
    assert (header, rows[0]) == (["samples", "seed", "samples"], ["BN", "1", "2,800"])


def test_frames_have_the_same_numbers(tmp_path):
    pytest.importorskip("pandas")
    study = load_study(write_study(tmp_path / "runs"))
    frame = study.frame()
    assert [*frame["seed"]] == [0, 1] * 4
    means = frame.groupby(["method", "model.E"])["test/accuracy"].mean()
    assert means["BN", "1"] == (0.125 + 0.1875) / 2
    rounds = load_run(study.cells[0].directory).frame()
    assert rounds.index.name == "round"
    assert [*rounds["val/accuracy"]] == [0.0, 0.25, 0.5]


def test_without_pandas_a_frame_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    study = load_study(write_study(tmp_path / "runs"))
    for loaded, plain in ((study, "cells"), (load_run(study.cells[0].directory), "metrics")):
        with pytest.raises(ConfigurationError, match=rf"^frame: pandas is not installed; .* use \.{plain}"):
            loaded.frame()


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
    bn, fedbn, clients = study.cells
    result = load_run(fedbn.directory).values
    names = [name for name in result if name.startswith(("test/personal_", "test/own_"))]
    assert {"test/personal_accuracy", "test/own_accuracy", "test/personal_f1"} <= {*names}
    local = {name: result[name] for name in names}
    server = {"server/test/accuracy": result["test/accuracy"]}
    assert fedbn.values == {**{name: result[name] for name in metrics}, **local, **server}
    personal = {name: result[name.replace("/", "/personal_")] for name in ("test/accuracy", "test/f1")}
    assert clients.values == {**personal, **local, **server}
    assert bn.values == {name: load_run(bn.directory).values[name] for name in metrics}
    assert clients.metric == "test/personal_accuracy"
