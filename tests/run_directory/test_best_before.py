"""The best of all rounds of a run that goes on in another folder, those before included."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fl_lightning import FederatedModule
from fl_lightning.callbacks import FedBN
from fl_lightning.cohort import client_memory
from fl_lightning.cohort.client_memory import ClientMemory, contents, locate
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from tests.support.command_line import run, write_config
from tests.support.helpers import SGD, blobs, fit, small_cnn

MONITOR = (
    "--checkpoint.monitor",
    "val/loss",
    "--checkpoint.mode",
    "max",
)  # it falls: the first round is the best
OTHER = ("--model.client_optimizer.lr", 0.04)
GONE = "best.ckpt: the best checkpoint before"


def load(path):
    return AtomicCheckpointIO().load_checkpoint(path)


@pytest.fixture
def source():
    """The folder of the checkpoints of four rounds."""
    write_config({"trainer.check_val_every_n_epoch": 1, "checkpoint": {"keep_rounds": [2]}})
    return run("--trainer.max_epochs", 4, *MONITOR).attempt.checkpoints


def best_after(checkpoint, *options):
    """The round of ``best.ckpt`` of a new attempt that goes on from a checkpoint."""
    attempt = run("--ckpt_path", checkpoint, "--trainer.max_epochs", 6, *MONITOR, *OTHER, *options).attempt
    rows = [json.loads(line) for line in attempt.metrics.read_text().splitlines()]
    losses = {row["round"]: row["val/loss"] for row in rows[1:]}
    found = load(attempt.checkpoints / "best.ckpt")["global_step"]
    return found, max(losses, key=losses.get), attempt


@pytest.mark.parametrize("name", ["round_2", "last"])
def test_the_best_of_a_run_in_a_new_folder_is_the_best_of_all_its_rounds(source, name, capsys):
    found, best, attempt = best_after(source / f"{name}.ckpt")
    assert found == best == 1
    assert GONE not in capsys.readouterr().out
    states = [load(folder / "best.ckpt")["state_dict"] for folder in (source, attempt.checkpoints)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    again = run("--ckpt_path", "last", "--trainer.max_epochs", 7, *MONITOR, *OTHER)
    assert again.trainer.checkpoint_callback.best_round == 1


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # Lightning's, of the other metric
@pytest.mark.parametrize("lost", ["best.ckpt", "metric", "data"])
def test_a_best_that_is_not_known_any_more_is_said_in_a_line(source, lost, capsys):
    if lost == "best.ckpt":
        (source / "best.ckpt").unlink()
    options = {
        "best.ckpt": (),
        "metric": ("--checkpoint.mode", "min"),
        "data": ("--data.max_examples", 299, "--accept_data"),
    }[lost]
    found, *_ = best_after(source / "last.ckpt", *options)
    assert found > 4
    line = f"{GONE} {source / 'last.ckpt'} is missing; only rounds after 4 count"
    assert line in capsys.readouterr().out.splitlines()


def test_a_run_without_an_evaluation_yet_has_no_best_to_lose(capsys):
    write_config({"trainer.check_val_every_n_epoch": 3})
    source = run("--trainer.max_epochs", 2, "--checkpoint.keep_rounds=[1]", *MONITOR).attempt.checkpoints
    assert not (source / "round_1_best.ckpt").exists()
    run("--ckpt_path", source / "round_1.ckpt", "--trainer.max_epochs", 3, *MONITOR, *OTHER)
    assert GONE not in capsys.readouterr().out


def test_the_memories_of_clients_go_along(tmp_path, monkeypatch):
    monkeypatch.setattr(client_memory, "LIMIT", 0)

    def train(folder, rounds, ckpt_path=None):
        module = FederatedModule(small_cnn(), client_optimizer=SGD, local_steps=2, participation=2)
        keeper = RoundCheckpoint(monitor="val/loss", mode="max", keep_rounds=[3])
        fit(
            module, blobs(5, (24, 40, 32)), rounds, [FedBN(), keeper], ckpt_path, default_root_dir=folder,
            plugins=[AtomicCheckpointIO()], limit_val_batches=1.0, check_val_every_n_epoch=1,
        )  # fmt: skip
        return keeper

    one = train(tmp_path / "one", 4)
    two = train(tmp_path / "two", 5, tmp_path / "one/checkpoints/round_3.ckpt")
    assert one.best_round == two.best_round <= 3
    shutil.rmtree(tmp_path / "one")
    kept = load(Path(two.best_model_path))["callbacks"]["FedBN"]
    locate(kept, two.best_model_path)
    assert contents(ClientMemory(kept["memory"]))
