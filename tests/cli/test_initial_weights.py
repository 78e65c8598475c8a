"""A run that starts from another run's model."""

from pathlib import Path

import pytest

from benchmarks.faults import same
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from tests.support.command_line import message_of, rows, run, write_config

STAGE_1 = ("--trainer.callbacks", "[]", "--trainer.max_epochs", 2)


def final(cli):
    checkpoint = AtomicCheckpointIO().load_checkpoint(cli.attempt.checkpoints / "last.ckpt")
    return checkpoint["state_dict"]


@pytest.fixture
def shared():
    """The checkpoint of a shared stage I."""
    write_config()
    write_config(path="one.yaml")
    last = run(*STAGE_1, config="one.yaml").attempt.checkpoints / "last.ckpt"
    Path("shared.ckpt").write_bytes(last.read_bytes())
    return last


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_stage_starts_from_a_checkpoint_and_a_resume_from_its_own(shared, devices, capsys):
    start = ("--model.initial_weights", "shared.ckpt", "--trainer.devices", devices)
    whole = run(*start, "--run_root", "whole")
    assert "initial_weights: the model starts from shared.ckpt\n" in capsys.readouterr().out
    first, last = rows(whole.attempt)[0], rows(run(*STAGE_1, "--run_root", "again").attempt)[-1]
    assert first["val/loss"] == pytest.approx(last["val/loss"], rel=1e-6)
    last = run(*start, "--trainer.max_epochs", 2).attempt.checkpoints / "last.ckpt"
    Path("shared.ckpt").unlink()  # a resume does not need it, but the run's name does
    capsys.readouterr()
    resumed = run(*start, "--ckpt_path", last)
    assert resumed.model.record.continued_from[0]["differs"] == {}
    assert "initial_weights" not in capsys.readouterr().out
    assert same(final(resumed), final(whole))


def test_a_checkpoint_of_another_model_is_one_line_and_leaves_no_run(shared, capsys):
    settings = ("--model.initial_weights", "shared.ckpt", "--model.model.norm", "gn", *STAGE_1)
    line = message_of(capsys, lambda: run(*settings))
    assert line.startswith(
        "error: initial_weights: shared.ckpt does not fit model.model LeNet: only in the file: features.2.running_mean, "
    )
    assert not Path("runs/tiny").exists()
