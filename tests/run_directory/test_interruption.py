import os
import signal
from pathlib import Path

import pytest
from command_line import attempts, rows, run, write_config

from fl_lightning.round.module import FederatedModule
from fl_lightning.run_directory.directory import Attempt

CTRL_C = """
import os
from fl_lightning import FederatedCallback

class Press(FederatedCallback):
    def __init__(self, at: int, times: int = 1, signal: int = 2):
        self.at, self.times, self.signal = at, times, signal

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        if cohort.round == self.at and step == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), self.signal)
"""
FIXBN = {"class_path": "FixBN", "init_args": {"freeze_round": 2}}


@pytest.fixture(autouse=True)
def ctrl_c(tmp_path, monkeypatch):
    (tmp_path / "ctrl_c.py").write_text(CTRL_C)
    monkeypatch.syspath_prepend(tmp_path)


def interrupted(number, times=1):
    """A run of 8 rounds, evaluated every fourth, that gets a signal in the middle of its third round."""
    presses = {
        "class_path": "ctrl_c.Press",
        "init_args": {"at": 3, "times": times, "signal": int(number)},
    }
    changes = {"trainer.max_epochs": 8, "trainer.check_val_every_n_epoch": 4}
    write_config({**changes, "trainer.callbacks": [FIXBN, presses]})
    with pytest.raises(SystemExit) as stop:
        run()
    (folder,) = Path("runs/tiny").iterdir()
    return Attempt(folder), stop.value.code


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_finishes_the_round_and_the_resumed_run_equals_an_uninterrupted_one(number, expected, capsys):
    attempt, status = interrupted(number)
    assert status == expected
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2, 3]
    assert "stopped after round 3; the same command with --ckpt_path last goes on" in capsys.readouterr().err
    assert not attempt.result.exists()
    run("--ckpt_path", "last")
    write_config({"trainer.max_epochs": 8, "trainer.check_val_every_n_epoch": 4})
    assert rows(attempt) == rows(run("--name", "whole").attempt)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_a_second_signal_stops_at_once(number, expected):
    handler = signal.getsignal(signal.SIGINT)
    attempt, status = interrupted(number, times=2)
    signal.signal(signal.SIGINT, handler)  # Lightning leaves it ignored
    assert status == expected
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2]


def test_termination_before_the_first_round_tells_it_and_leaves_nothing(capsys, monkeypatch):
    start = FederatedModule.on_validation_epoch_start

    def terminate(self):
        os.kill(os.getpid(), signal.SIGTERM)
        start(self)

    monkeypatch.setattr(FederatedModule, "on_validation_epoch_start", terminate)
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert attempts() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_given_back_after_training(number):
    before = signal.getsignal(number)
    run("--trainer.max_epochs", 1)
    assert signal.getsignal(number) is before
