import signal
from pathlib import Path

import pytest
from command_line import rows, run, write_config

from fl_lightning.run_directory import Attempt

CTRL_C = """
import os, signal
from fl_lightning import FederatedCallback

class CtrlC(FederatedCallback):
    def __init__(self, at: int, times: int = 1):
        self.at, self.times = at, times

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        if cohort.round == self.at and step == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
"""
FIXBN = {"class_path": "FixBN", "init_args": {"freeze_round": 2}}


@pytest.fixture(autouse=True)
def ctrl_c(tmp_path, monkeypatch):
    (tmp_path / "ctrl_c.py").write_text(CTRL_C)
    monkeypatch.syspath_prepend(tmp_path)


def interrupted(times=1):
    """A run of 8 rounds, evaluated every fourth, in whose third round Ctrl-C is pressed."""
    presses = {"class_path": "ctrl_c.CtrlC", "init_args": {"at": 3, "times": times}}
    changes = {"trainer.max_epochs": 8, "trainer.check_val_every_n_epoch": 4}
    write_config({**changes, "trainer.callbacks": [FIXBN, presses]})
    with pytest.raises(SystemExit) as stop:
        run()
    (folder,) = Path("runs/tiny").iterdir()
    return Attempt(folder), stop.value.code


def test_ctrl_c_finishes_the_round_and_the_resumed_run_equals_an_uninterrupted_one(capsys):
    attempt, status = interrupted()
    assert status == 128 + signal.SIGINT
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2, 3]
    assert "stopped after round 3; the same command with --ckpt_path last goes on" in capsys.readouterr().err
    assert not attempt.result.exists()
    run("--ckpt_path", "last")
    write_config({"trainer.max_epochs": 8, "trainer.check_val_every_n_epoch": 4})
    assert rows(attempt) == rows(run("--name", "whole").attempt)


def test_a_second_ctrl_c_stops_at_once():
    attempt, status = interrupted(times=2)
    assert status != 0
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2]


def test_ctrl_c_is_given_back_after_training():
    before = signal.getsignal(signal.SIGINT)
    run("--trainer.max_epochs", 1)
    assert signal.getsignal(signal.SIGINT) is before
