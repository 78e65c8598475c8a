"""Attempts that went on from another run: none is a study's cell, but for those that share a first stage, and a report says so."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli.study import cells_of
from fl_lightning.experiments.studies.reading import read_study
from tests.support.command_line import run
from tests.support.study_in_process import finished_study, found, study, write

RATES = {"axes": {"model.client_optimizer.lr": [0.1, 0.2]}, "without": [], "published": [], "claims": []}


def folders():
    """The folder of the first seed's run of each combination."""
    return [Path(group.runs[0]["directory"]) for group in found().rows]


def go_on(checkpoint, folder):
    """Let another attempt at a run go on from a checkpoint."""
    return run("--ckpt_path", checkpoint, config=str(folder / "config.yaml")).attempt


def first_cell():
    cells = cells_of(read_study(Path("s.yaml"), "quick"), [])
    return cells.table([])[0]


def origins(folder):
    return json.loads((folder / "result.json").read_text())["continued_from"]


@pytest.mark.slow
def test_an_attempt_that_went_on_from_another_learning_rate_is_not_the_cell(ran, capsys):
    write(**RATES)
    finished_study("--checkpoint.keep_rounds=[3]")
    one, other = folders()
    foreign = go_on(other / "checkpoints/round_3.ckpt", one)
    assert foreign.path.name == f"{one.name}.2"
    study()
    assert (len(ran), folders()[0]) == (4, one)
    shutil.rmtree(one)
    words = f"continued from round 3 of {other.name}: model.client_optimizer.lr 0.2 -> 0.1"
    capsys.readouterr()
    study("--dry-run")
    assert f"missing  lr=0.1 seed=0: {words}" in capsys.readouterr().out
    study()
    assert f"missing, runs again: lr=0.1 seed=0: {words}" in capsys.readouterr().out
    assert (len(ran), folders()[0].name) == (5, f"{one.name}.3")
    assert origins(folders()[0]) == []


@pytest.mark.slow
def test_a_study_does_not_go_on_with_what_another_run_began(ran):
    write(**RATES)
    finished_study("--checkpoint.keep_rounds=[3]")
    one, other = folders()
    foreign = go_on(other / "checkpoints/round_3.ckpt", one)
    foreign.result.unlink()
    shutil.rmtree(one)
    cell = first_cell()
    assert (cell.state().phase, cell.checkpoint()) == ("missing", None)
    with foreign.lock():  # it is waited for
        assert cell.state().phase == "running"


@pytest.mark.slow
def test_a_shared_first_stage_is_the_cells_own_in_every_study(ran, capsys):
    finished_study("--checkpoint.keep_rounds=[4]")
    early, _, late = folders()
    assert [entry["round"] for entry in origins(early)] == [2]
    write(
        axes={"T*": yaml.safe_load(Path("s.yaml").read_text())["axes"]["T*"]},
        without=[],
        published=[],
        claims=[],
    )
    for scale in ({"T*": ["2"]}, {}):
        content = yaml.safe_load(Path("s.yaml").read_text())
        content["scales"]["quick"]["axes"] = scale
        Path("s.yaml").write_text(yaml.safe_dump(content))
        study()
        assert folders()[0] == early
    assert len(ran) == 6
    go_on(early / "checkpoints/round_4.ckpt", late)  # which froze after round 2
    study()
    assert folders() == [early, late]
