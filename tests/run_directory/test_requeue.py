"""What a scheduler does to a run: it starts the same command again, however early it killed the last one."""

import json
import shutil
from pathlib import Path

import pytest

from fl_lightning.experiments.run_directory import checkpoint_io
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.round.module import FederatedModule
from tests.support.command_line import message_of, rows, run, write_config


class Killed(BaseException):
    """Stands for SIGKILL: nothing may be done any more."""


def killed_in_round(number, monkeypatch, *arguments):
    """Start a run that vanishes in the middle of a round, as far as its folder can tell."""
    start = FederatedModule.start_round

    def strike(self):
        if self.round == number:
            raise Killed
        return start(self)

    with monkeypatch.context() as patch:
        patch.setattr(FederatedModule, "start_round", strike)
        patch.setattr(
            "fl_lightning.experiments.run_directory.start.Start.discard_untrained", lambda self: None
        )
        with pytest.raises(Killed):
            run(*arguments)


@pytest.mark.slow
def test_one_command_starts_goes_on_and_ends(monkeypatch):
    whole = rows(run("--name", "whole").attempt)
    auto = ("--ckpt_path", "auto")
    for number in (1, 1, 2, 4):
        killed_in_round(number, monkeypatch, *auto)
    attempt = run(*auto).attempt
    before = json.loads(attempt.result.read_text())
    assert rows(attempt) == whole
    assert run(*auto).attempt.path.samefile(attempt.path)
    after = json.loads(attempt.result.read_text())
    assert after | {"process_seconds": 0} == before | {"process_seconds": 0}
    assert [*Path("runs/tiny").glob("*/result.json")] == [attempt.result]


def test_killed_after_its_first_round_a_run_has_a_checkpoint(monkeypatch):
    killed_in_round(2, monkeypatch)
    assert [row["round"] for row in rows(run("--ckpt_path", "last").attempt)] == [0, 1, 2, 3, 4]


def test_trained_rounds_whose_checkpoints_are_gone_are_kept(monkeypatch):
    killed_in_round(3, monkeypatch)
    (killed,) = [Attempt(path) for path in Path("runs/tiny").iterdir()]
    shutil.rmtree(killed.checkpoints)
    before = killed.metrics.read_bytes()
    assert run().attempt.path.name == f"{killed.path.name}.2"
    assert killed.metrics.read_bytes() == before


def test_a_folder_is_locked_before_its_checkpoint_is_read(monkeypatch, capsys):
    attempt = run("--trainer.max_epochs", 2).attempt
    load = checkpoint_io.AtomicCheckpointIO.load_checkpoint

    def other(*arguments, **settings):
        with pytest.raises(Exception, match="another process is training in"), attempt.lock():
            pass
        return load(*arguments, **settings)

    monkeypatch.setattr(checkpoint_io.AtomicCheckpointIO, "load_checkpoint", other)
    run("--ckpt_path", "last", "--trainer.max_epochs", 3)
    with attempt.lock():
        message = message_of(capsys, lambda: run("--ckpt_path", "last", "--trainer.max_epochs", 4))
    assert message == (
        f"error: ckpt_path: another process is training in {attempt.path}; wait for its end or stop it\n"
    )


def test_how_often_a_run_is_evaluated_does_not_change_its_name():
    first = run("--trainer.max_epochs", 2).attempt
    again = run("--trainer.check_val_every_n_epoch", 1, "--ckpt_path", "last").attempt
    assert again.path.samefile(first.path)
    assert ["val/accuracy" in row for row in rows(again)] == [True, False, True, True, True]


def test_auto_evaluates_no_untrained_model(capsys):
    write_config()
    message = message_of(capsys, lambda: run("--ckpt_path", "auto", command="test"))
    assert message == "error: ckpt_path: test needs a trained model; use --ckpt_path last or a file\n"


def test_auto_says_when_it_leaves_another_run_of_the_same_name_alone(capsys):
    first = run("--trainer.max_epochs", 1).attempt
    capsys.readouterr()
    run("--trainer.max_epochs", 1, "--ckpt_path", "auto", "--model.client_optimizer.lr", 0.5)
    checkpoint = f"{first.checkpoints}/last.ckpt"
    line = f"--ckpt_path auto starts a new run; {checkpoint} has another seed or other settings"
    assert line in capsys.readouterr().out
    run("--trainer.max_epochs", 1, "--ckpt_path", "auto", "--name", "of-no-other")
    assert "auto" not in capsys.readouterr().out


def test_auto_resumes_no_attempt_of_another_number_of_rounds(capsys):
    """Milestones and the decay of learning rates depend on the number of planned rounds."""
    short = run("--trainer.max_epochs", 2).attempt
    capsys.readouterr()
    whole = run("--trainer.max_epochs", 4, "--ckpt_path", "auto").attempt
    line = (
        f"{short.checkpoints}/last.ckpt is of a run planned for 2 rounds, not 4: --ckpt_path auto ignores it"
    )
    assert line in capsys.readouterr().out
    assert not whole.path.samefile(short.path)
    assert [row["round"] for row in rows(whole)] == [0, 1, 2, 3, 4]
    assert run("--trainer.max_epochs", 4, "--ckpt_path", "auto").attempt.path.samefile(whole.path)
    assert run("--trainer.max_epochs", 2, "--ckpt_path", "auto").attempt.path.samefile(short.path)
