"""Cells of other code are named, or computed anew by word. Cells of other data run again."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.support.study_in_process import finished_study, found, study, write


@pytest.mark.slow
def test_results_of_other_code_are_kept_and_named_in_one_line_or_computed_anew(ran, capsys):
    finished_study()
    folder = Path(found().rows[0].runs[0]["directory"])
    result = json.loads((folder / "result.json").read_text())
    now = result["provenance"][0]["fl_lightning"]
    result["provenance"][0]["fl_lightning"] = "0ld"
    (folder / "result.json").write_text(json.dumps(result))
    capsys.readouterr()
    why = f"fl_lightning 0ld, now {now}"
    study("--dry-run")
    assert f"done     T*=2 method=BN seed=0: {why}  " in capsys.readouterr().out
    study()
    assert len(ran) == 6
    said = f"computed by other code: T* = 2, BN, seed 0 ({why})\n"
    assert said in capsys.readouterr().out
    assert f"- {said}" in next(Path("runs/studies").glob("*/table.md")).read_text()
    study("--rerun", "--dry-run")
    assert (
        f"stale    T*=2 method=BN seed=0, after round 2 of T*=4 method=BN seed=0: {why}  "
        in capsys.readouterr().out
    )
    study("--rerun")
    assert len(ran) == 7
    again = Path(found().rows[0].runs[0]["directory"])
    assert again.name == f"{folder.name}.2"
    assert json.loads((again / "result.json").read_text())["test/accuracy"] == result["test/accuracy"]
    out = capsys.readouterr().out
    assert f"stale, runs again: T*=2 method=BN seed=0: {why}" in out
    assert "other code" not in out
    study("--rerun")
    assert len(ran) == 7


@pytest.mark.slow
def test_a_cell_continues_from_shared_rounds_of_the_same_code_only(ran):
    """A parent of other code counts as a result, but not as the first rounds of a new cell."""
    finished_study()
    child, parent = (Path(found().rows[index].runs[0]["directory"]) for index in (0, 2))
    shutil.rmtree(child)
    result = json.loads((parent / "result.json").read_text())
    result["provenance"][0]["fl_lightning"] = "0ld"
    (parent / "result.json").write_text(json.dumps(result))
    study()
    assert len(ran) == 7
    again = json.loads(Path(found().rows[0].runs[0]["directory"], "result.json").read_text())
    assert again["continued_from"] == []
    assert len(again["provenance"]) == 1


def trained_on_others(one, written):
    """Let a run be one of other data, written at another time."""
    file = Path(one["directory"], "result.json")
    result = json.loads(file.read_text())
    result["data"]["training"] = "others"
    file.write_text(json.dumps(result))
    os.utime(file, (written, written))


@pytest.mark.slow
def test_a_cell_on_other_data_than_newer_ones_is_run_again(ran, capsys):
    finished_study()
    old = found().rows[0].runs[0]
    trained_on_others(old, 1)
    capsys.readouterr()
    why = "other data than newer cells: training"
    study("--dry-run")
    out = capsys.readouterr().out
    assert out.startswith(f"stale    T*=2 method=BN seed=0, after round 2 of T*=4 method=BN seed=0: {why}")
    study()
    assert len(ran) == 7
    assert f"stale, runs again: T*=2 method=BN seed=0: {why}" in capsys.readouterr().out
    assert Path(found().rows[0].runs[0]["directory"]).name == f"{Path(old['directory']).name}.2"


@pytest.mark.slow
def test_the_data_of_now_count_where_a_newer_cell_had_others(ran):
    """One that was trained while ``data_dir`` held something else costs no valid cell but the one that shows it."""
    finished_study()
    newest = found().rows[1].runs[0]
    trained_on_others(newest, time.time())
    trained_on_others(found().rows[1].runs[1], time.time())
    study()
    assert len(ran) == 6 + 2 * 2  # of each seed one that shows it, and the odd one
    runs = [run for group in found().rows for run in group.runs]
    assert {run["phase"] for run in runs} == {"done"}
    assert all(run["data"]["training"] != "others" for run in runs)
    study()
    assert len(ran) == 10


@pytest.mark.slow
@pytest.mark.parametrize("left", ["checkpoints", "error.txt"])
def test_a_cell_that_was_stopped_when_it_ran_again_goes_on(ran, left):
    finished_study()
    old = found().rows[0].runs[0]
    trained_on_others(old, 1)
    again = Path(f"{old['directory']}.2")
    shutil.copytree(old["directory"], again)
    (again / "result.json").unlink()
    if left == "error.txt":
        shutil.rmtree(again / "checkpoints")
        (again / left).write_text("ValueError: too large\n")
    study()
    assert len(ran) == 7
    assert {run["phase"] for group in found().rows for run in group.runs} == {"done"}


@pytest.mark.slow
def test_who_goes_on_from_a_cell_on_other_data_waits_for_it(ran):
    finished_study()
    child, parent = (found().rows[index].runs[0] for index in (0, 2))
    trained_on_others(child, 1)
    trained_on_others(parent, 1)
    study()
    assert len(ran) == 8
    result = json.loads(Path(found().rows[0].runs[0]["directory"], "result.json").read_text())
    assert [origin["round"] for origin in result["continued_from"]] == [2]


@pytest.mark.slow
def test_a_rate_that_was_tried_on_other_data_is_tried_again_before_it_chooses(ran):
    lr, steps = "model.client_optimizer.lr", "model.local_steps"
    axes = {lr: [0.05, 0.1], steps: [1, 2]}
    write(
        axes=axes, choose=[{"axis": lr, "at": {steps: "1"}, "extend": 0}], without=[], published=[], claims=[]
    )
    study()
    trials = list(Path("runs/cells/6").glob("*-s1000"))
    newest = max(trials, key=lambda path: (path / "result.json").stat().st_mtime)
    for path in trials:
        if path != newest:
            trained_on_others({"directory": path}, 1)
    count = len(ran)
    study()
    assert len(ran) == count + 1
    study()
    assert len(ran) == count + 1


def test_code_that_changes_while_a_study_runs_is_named(ran, capsys, monkeypatch):
    monkeypatch.setattr(
        "fl_lightning.experiments.run_directory.start_files.provenance",
        lambda config: {"fl_lightning": "edited"},
    )
    one = {"quick": {"base": "tiny.yaml", "seeds": [0]}}
    write(axes={"method": {"BN": {}}}, without=[], published=[], claims=[], scales=one)
    study()
    assert "computed by other code: all cells (fl_lightning edited, now " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        study("--rerun")
    assert (
        "seed=0: code or data have changed since the study was started (fl_lightning edited, now "
        in capsys.readouterr().out
    )
