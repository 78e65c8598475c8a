import os
import signal
import sys
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from fl_lightning.datamodules import Digits
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.round.module import FederatedModule
from tests.support.command_line import attempts, rows, run, write_config

CTRL_C = """
import os
from fl_lightning import FederatedCallback

class Press(FederatedCallback):
    def __init__(self, at: int, times: int = 1, signal: int = 2):
        self.at, self.times, self.signal = at, times, signal

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        if cohort.round == self.at and step == 0:
            for _ in range(self.times - 1):
                os.kill(os.getpid(), self.signal)
            self.press()

    def press(self, *_):
        os.kill(os.getpid(), self.signal)
"""
WAYS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
FIXBN = {"class_path": "FixBN", "init_args": {"freeze_round": 2}}


@pytest.fixture(autouse=True)
def ctrl_c(tmp_path, monkeypatch):
    (tmp_path / "ctrl_c.py").write_text(CTRL_C)
    monkeypatch.syspath_prepend(tmp_path)
    # where the tests run in the background or under nohup these are ignored, and a run leaves it at that
    handlers = signal.SIG_DFL, signal.default_int_handler
    before = [signal.signal(*pair) for pair in zip((signal.SIGHUP, signal.SIGINT), handlers, strict=True)]
    yield
    for number, handler in zip((signal.SIGHUP, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_finishes_the_round_and_the_resumed_run_equals_an_uninterrupted_one(number, expected, capsys):
    attempt, status = interrupted(number)
    assert status == expected
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2, 3]
    assert capsys.readouterr().err == (
        f"\nstopping after this round; {WAYS[number]} again stops at once\n"
        f"stopped by {WAYS[number]}; {attempt.path} keeps round 3; the same command with --ckpt_path last resumes the run\n"
    )
    assert not attempt.result.exists()
    run("--ckpt_path", "last")
    write_config({"trainer.max_epochs": 8, "trainer.check_val_every_n_epoch": 4})
    assert rows(attempt) == rows(run("--name", "whole").attempt)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_stops_at_once(number, expected, capsys):
    attempt, status = interrupted(number, times=2)
    assert status == expected
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2]
    kept = f"{attempt.path} keeps round 1; the same command with --ckpt_path last resumes the run"
    assert capsys.readouterr().err.endswith(f"\nstopped by {WAYS[number]}; {kept}\n")


@pytest.mark.parametrize("number", WAYS)
@pytest.mark.parametrize(
    ("owner", "method"), [(Digits, "setup"), (FederatedModule, "on_validation_epoch_start")]
)
def test_signal_before_the_first_round_tells_it_and_leaves_nothing(
    owner, method, number, capsys, monkeypatch
):
    start = getattr(owner, method)

    def strike(*arguments, **settings):
        os.kill(os.getpid(), number)
        return start(*arguments, **settings)

    monkeypatch.setattr(owner, method, strike)
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 128 + number
    assert capsys.readouterr().err == f"stopped by {WAYS[number]}; nothing new is kept\n"
    assert attempts() == []


def test_signal_before_the_batch_of_a_round_trains_that_round(monkeypatch):
    start = FederatedModule.on_train_epoch_start

    def strike(module):
        start(module)
        if module.round == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(FederatedModule, "on_train_epoch_start", strike)
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 143
    (name,) = attempts()
    assert [row["round"] for row in rows(Attempt(Path("runs/tiny", name)))] == [0, 1, 2, 3]


def test_signal_while_the_result_is_found_says_what_is_kept(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            FederatedModule, "on_test_epoch_start", lambda self: os.kill(os.getpid(), signal.SIGINT)
        )
        with pytest.raises(SystemExit) as stop:
            run()
    assert stop.value.code == 130
    (name,) = attempts()
    assert capsys.readouterr().err == (
        f"stopped by Ctrl-C; runs/tiny/{name} keeps round 4; the same command with --ckpt_path last resumes the run\n"
    )
    assert run("--ckpt_path", "last").attempt.result.exists()


def test_ctrl_c_while_torch_is_imported_is_one_line(capsys, monkeypatch):
    class Press:
        def find_spec(self, name, *others):
            if name == "fl_lightning.cli.command_line":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "fl_lightning.cli.command_line")
    monkeypatch.setattr(sys, "meta_path", [Press(), *sys.meta_path])
    with pytest.raises(SystemExit) as stop:
        main(["fit"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C; nothing new is kept\n"


def test_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        changes = {"class_path": "ctrl_c.Press", "init_args": {"at": 3, "signal": int(signal.SIGHUP)}}
        write_config({"trainer.callbacks": [FIXBN, changes]})
        assert run().attempt.result.exists()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", WAYS)
def test_signals_are_given_back_after_training(number):
    before = signal.getsignal(number)
    run("--trainer.max_epochs", 1)
    assert signal.getsignal(number) is before
