"""A run at W&B that is resumed, breaks off, fails at W&B or has a logger of the user's own."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.loggers import WandbLogger

from fl_lightning import FederatedCallback, FederatedModule
from fl_lightning.experiments.run_directory.describe import clients_table
from tests.support.command_line import run, write_config
from tests.support.helpers import SGD, blobs, small_cnn
from tests.support.wandb_files import metrics, offline_runs, read_run, run_id


@pytest.mark.slow
def test_resumed_run_keeps_its_id_and_leaves_one_offline_run_with_all_rounds(offline):
    attempt = run("--trainer.max_epochs", 2).attempt
    (first,) = offline_runs(attempt)
    time.sleep(1)  # W&B calls its folders by the second
    run("--ckpt_path", "last", "--trainer.max_epochs", 4)
    (second,) = offline_runs(attempt)
    assert first != second
    before, after = run_id(first), read_run(second)
    assert after.run.run_id == before == attempt.wandb_id.read_text().strip()
    logged, written = metrics(after.history, attempt)
    assert logged == written
    assert [row["round"] for row in written] == [0, 1, 2, 3, 4]
    (path,) = second.glob("files/media/table/clients_*.table.json")
    assert [row[2:4] for row in json.loads(path.read_text())["data"]] == [[8, 4]] * 3


def test_run_that_goes_on_in_a_new_attempt_is_a_new_run_with_all_rounds(offline):
    first = run("--trainer.max_epochs", 2).attempt
    last = first.checkpoints / "last.ckpt"
    second = run("--ckpt_path", last, "--trainer.max_epochs", 3, "--model.local_steps", 1).attempt
    assert second.path != first.path
    assert first.wandb_id.read_text() != second.wandb_id.read_text()
    (folder,) = offline_runs(second)
    logged, written = metrics(read_run(folder).history, second)
    assert logged == written
    assert len(offline_runs(first)) == 1


class Stopped(FederatedCallback):
    """Breaks off a round."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if cohort.round == 3:
            raise RuntimeError("stopped")


@pytest.mark.pictures
def test_run_that_breaks_off_is_marked_and_holds_its_rounds(offline):
    stop = {"class_path": f"{__name__}.Stopped"}
    write_config({"trainer.callbacks": [stop]})
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 1
    (folder,) = Path("runs").glob("*/*/wandb/offline-run-*")
    logged = read_run(folder)
    assert logged.exit_code == 1
    assert [row["round"] for row in logged.history] == [0, 1, 2]
    assert list(folder.parents[1].glob("learning_curve.png"))
    assert list(folder.glob("files/media/images/learning_curve_*.png"))


def test_own_wandb_logger_gets_the_rows_and_no_second_run_is_started(offline, monkeypatch):
    import wandb

    wandb.teardown()  # it read the environment when it was first used
    monkeypatch.setenv("WANDB_MODE", "offline")
    own = {
        "class_path": "lightning.pytorch.loggers.WandbLogger",
        "init_args": {"project": "mine", "save_dir": "own"},
    }
    Path("own").mkdir()
    write_config({"trainer.logger": own})
    attempt = run().attempt
    wandb.finish()
    wandb.teardown()
    assert not (attempt.path / "wandb").exists()
    (folder,) = Path("own").glob("wandb/offline-run-*")
    logged = read_run(folder)
    assert logged.run.project == "mine"
    assert [row["round"] for row in logged.history if "round" in row] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_run_goes_on_where_wandb_fails_and_a_resume_brings_everything_back(offline, monkeypatch, capsys):
    from wandb import Run

    log = Run.log

    def fail_in_round_2(self, row, step):
        if step == 2:
            raise ConnectionResetError("Connection lost")
        log(self, row, step=step)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", fail_in_round_2)
        attempt = run("--trainer.max_epochs", 4).attempt
    shown = capsys.readouterr()
    (told,) = [line for line in (shown.err + shown.out).splitlines() if "W&B" in line]
    remedy = f"the run continues without it, all metrics are in {attempt.metrics}"
    assert told == f"W&B failed: Connection lost; {remedy}"
    run("--ckpt_path", "last", "--trainer.max_epochs", 5)
    (folder,) = offline_runs(attempt)
    found = read_run(folder)
    logged, written = metrics(found.history, attempt)
    assert logged == written
    assert len(written) == 6
    assert "final/test/accuracy" in found.summary


def test_rows_that_the_server_has_are_not_sent_again(monkeypatch):
    sent = []
    resumed = SimpleNamespace(
        id="abc", starting_step=3, dir="there/files", offline=False, url="https://there", summary={},
        config=SimpleNamespace(update=lambda *_, **__: None),
        define_metric=lambda *_, **__: None, log=lambda row, step: sent.append((step, row.get("round"))),
        finish=lambda exit_code: None,
    )  # fmt: skip
    monkeypatch.setattr(
        "fl_lightning.experiments.weights_and_biases.logger.open_run", lambda mode, **init: resumed
    )
    run("--wandb.mode", "online")
    assert sent == [(3, 3), (4, 4), (4, None)]


def test_rows_have_the_values_of_lightnings_monitors(offline):
    monitor = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}
    write_config({"trainer.callbacks": [monitor]})
    attempt = run("--trainer.max_epochs", 3).attempt
    (folder,) = offline_runs(attempt)
    logged, written = metrics(read_run(folder).history, attempt)
    assert logged == written
    assert ["lr-SGD/server" in row for row in written] == [False, True, True, True]


class LogsTables(FederatedCallback):
    """Logs a table in each round, as with any W&B logger of Lightning."""

    def on_round_end(self, trainer, pl_module, cohort):
        (logger,) = [logger for logger in pl_module.loggers if isinstance(logger, WandbLogger)]
        logger.log_table("mine", ["round"], [[cohort.round]])


def test_table_of_a_callback_belongs_to_its_round(offline):
    write_config({"trainer.callbacks": [{"class_path": f"{__name__}.LogsTables"}]})
    attempt = run("--trainer.max_epochs", 3).attempt
    (folder,) = offline_runs(attempt)
    logged = read_run(folder).history
    assert [row["round"] for row in logged] == [0, 1, 2, 3]
    paths = [row.get("mine.path") or row.get("mine", {}).get("path") for row in logged]
    assert paths[0] is None
    tables = [json.loads((folder / "files" / path).read_text())["data"] for path in paths[1:]]
    assert tables == [[[1]], [[2]], [[3]]]


def test_divergence_is_no_obstacle(offline):
    large = ("--model.client_optimizer.init_args.lr", 1e30)
    attempt = run("--trainer.max_epochs", 2, "--model.on_divergence", "record", *large).attempt
    (folder,) = offline_runs(attempt)
    logged = read_run(folder)
    assert [row["round"] for row in logged.history] == [0, 1, 2]
    assert math.isnan(logged.history[-1]["train/loss"])
    assert logged.summary["diverged"] is True


class Losses(FederatedCallback):
    """Keeps the clients' losses of each round, as they are before the aggregation."""

    def __init__(self):
        self.seen = []

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.seen.append((list(cohort.client_ids), cohort.losses.tolist(), float(cohort.mean(cohort.losses))))


def test_losses_of_the_cohort_average_to_the_training_loss_and_clients_are_counted():
    seen = Losses()
    module = FederatedModule(small_cnn().double(), SGD, local_epochs=1, participation=2)
    trainer = L.Trainer(
        logger=False, max_epochs=3, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[seen],
    )  # fmt: skip
    trainer.fit(module, datamodule=blobs())
    assert module.metrics["train/loss"] == pytest.approx(seen.seen[-1][2], rel=1e-6)
    logged = {row[0]: row for row in clients_table(module)[1]}
    for client, row in logged.items():
        rounds = [losses[ids.index(client)] for ids, losses, _ in seen.seen if client in ids]
        assert row[3] == len(rounds)
        assert row[2] == 5 * len(rounds)
        assert row[4] == (rounds[-1] if rounds else None)
