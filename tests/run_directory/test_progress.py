import sys
import time
from datetime import timedelta

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run.progress import RoundProgress
from tests.support.command_line import run


class Rounds(L.LightningModule):
    """Rounds of three local steps that report themselves; every third round is evaluated."""

    def __init__(self, total_rounds=None):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.metrics = {}
        self.total_rounds = total_rounds

    def training_step(self, batch):
        for step in range(3):
            self.trainer.progress_bar_callback.local_step(step + 1, 3)
        self.weight.grad = torch.zeros(1)
        self.optimizers().step()

    def validation_step(self, batch):
        return None

    test_step = validation_step

    def predict_step(self, batch):
        return batch

    def on_train_epoch_end(self):
        done = self.global_step
        self.metrics = {"train/loss": torch.tensor(1.0 / done), "time/samples_per_s": 1234.4}
        if done % 3 == 0:
            self.metrics["val/accuracy"] = done / 10

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return DataLoader([0], batch_size=None)

    def val_dataloader(self):
        return DataLoader([0, 1], batch_size=None)

    test_dataloader = predict_dataloader = val_dataloader


def start(tmp_path, progress, stage="fit", module=None, rounds=5):
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[progress],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    getattr(trainer, stage)(module or Rounds())
    return trainer


def test_pipe_gets_plain_lines_that_pair_each_round_with_its_own_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fl_lightning.experiments.run.progress.time.monotonic", lambda: 0.0)
    start(tmp_path, RoundProgress(every_n_seconds=0.0))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ") for line in lines] == [
        ["round 1/5", "loss 1", "1,234 samples/s"],
        ["round 2/5", "loss 0.5", "1,234 samples/s", "ETA 0:00:00"],
        ["round 3/5", "loss 0.3333", "val/accuracy 0.3", "1,234 samples/s", "ETA 0:00:00"],
        ["round 4/5", "loss 0.25", "val/accuracy 0.3", "1,234 samples/s", "ETA 0:00:00"],
        ["round 5/5", "loss 0.2", "val/accuracy 0.3", "1,234 samples/s", "in 0:00:00"],
    ]


def test_pipe_gets_the_last_round_alone_from_a_short_run(tmp_path, capsys):
    start(tmp_path, RoundProgress())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("round 5/5  loss 0.2  ")


@pytest.mark.parametrize("planned", [3, 11520])
def test_rounds_to_come_are_those_of_this_fit_and_not_of_the_plan(tmp_path, capsys, planned):
    start(tmp_path, RoundProgress(), module=Rounds(total_rounds=planned), rounds=4)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("round 4/4  ")
    assert "in 0:0" in line


class Timed(Rounds):
    """Rounds of a minute and an evaluation of ten seconds; the first round of each fit takes an hour."""

    now = 0.0

    def on_train_start(self):
        self.now += 3540

    def training_step(self, batch):
        super().training_step(batch)
        self.now += 60

    def on_validation_start(self):
        self.now += 10


def test_time_left_is_that_of_usual_rounds_with_their_evaluations(tmp_path, capsys, monkeypatch):
    module = Timed()
    monkeypatch.setattr("fl_lightning.experiments.run.progress.time.monotonic", lambda: module.now)
    trainer = L.Trainer(
        default_root_dir=tmp_path,
        max_epochs=100,
        accelerator="cpu",
        callbacks=[RoundProgress(every_n_seconds=0.0)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=-1,
    )
    for first, rounds in ((0, 100), (100, 111)):
        trainer.fit_loop.max_epochs = rounds
        trainer.fit(module)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"round {first + 1:3}/{rounds}  loss {1 / (first + 1):.4g}  1,234 samples/s"
        for line in lines[1:-1]:
            done = int(line[6:9])
            assert line.endswith(f"ETA {timedelta(seconds=70 * (rounds - done))}")
    assert lines[-1].endswith(f"in {timedelta(seconds=3540 + 11 * 70)}")


def test_terminal_shows_local_steps_and_gets_its_cursor_back(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("fl_lightning.experiments.run.progress._REFRESH_SECONDS", 0.0)
    start(tmp_path, RoundProgress())
    shown = capsys.readouterr().out
    for text in ("step 2/3", "loss 0.25", "val/accuracy 0.3", "round 5/5"):
        assert text in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def test_terminal_is_given_back_when_a_round_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    module = Rounds()
    module.optimizers = None  # called in the round
    with pytest.raises(TypeError, match="not callable"):
        start(tmp_path, RoundProgress(), module=module)
    shown = capsys.readouterr().out
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def test_commands_that_evaluate_show_lightnings_bar_on_a_terminal_and_none_elsewhere(capsys, monkeypatch):
    run("--trainer.max_epochs", 1)
    capsys.readouterr()
    for terminal, shown in ((False, False), (True, True)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        run("--trainer.max_epochs", 1, "--ckpt_path", "last", command="test")
        assert ("Testing" in capsys.readouterr().out) is shown


def test_terminal_shows_the_last_round_and_ten_refreshes_a_second_at_most(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    started = time.monotonic()
    start(tmp_path, RoundProgress(), rounds=200)
    shown = capsys.readouterr().out
    assert "round 200/200" in shown
    assert shown.count("round ") <= 10 * (time.monotonic() - started) + 4


def test_negative_period_is_refused():
    with pytest.raises(ConfigurationError, match="every_n_seconds must be >= 0, found -1"):
        RoundProgress(every_n_seconds=-1)
