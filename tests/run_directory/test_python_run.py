"""A run from Python has all that one of the command line has."""

import json
import multiprocessing
import re
import time
from contextlib import ExitStack
from multiprocessing import active_children
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, EarlyStopping, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import (
    Classification,
    ConfigurationError,
    FederatedDataModule,
    FederatedModule,
    LocalState,
    RoundProgress,
    Run,
    load_model,
)
from fl_lightning.callbacks import FixBN, MaintainedMomentum
from fl_lightning.datamodules import Digits, Shards
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.experiments.run_directory.describe import run_title
from fl_lightning.files import locked
from fl_lightning.models import LeNet
from tests.support.command_line import rows
from tests.support.helpers import SGD, blobs, small_cnn

QUIET = {"enable_progress_bar": False, "accelerator": "cpu"}


def a_run(max_epochs, name="mine", lr=0.1, callbacks=None, data=None, **settings):
    """As a new process makes it."""
    torch.manual_seed(0)
    data = data or Digits(num_clients=3, max_examples=300, val_fraction=0.2, partition=Shards(0.4))
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    module = FederatedModule(LeNet(num_classes=10, in_channels=1, image_size=8), optimizer, local_steps=2)
    callbacks = [FixBN(freeze_round=2), MaintainedMomentum()] if callbacks is None else callbacks
    return Run(module, data, name=name, callbacks=callbacks, max_epochs=max_epochs, **{**QUIET, **settings})


def state(run):
    return AtomicCheckpointIO().load_checkpoint(run.attempt.checkpoints / "last.ckpt")["state_dict"]


def test_callbacks_that_only_train_do_not_keep_a_model_from_being_loaded():
    """The arguments of EarlyStopping are not in config.yaml."""
    run = a_run(2, name="stopping", callbacks=[FixBN(freeze_round=1), EarlyStopping("val/loss", patience=3)])
    run.fit()
    callbacks = yaml.safe_load(run.attempt.config.read_text())["trainer"]["callbacks"]
    assert callbacks[1]["init_args"] == {}
    assert load_model(run.path)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


class OwnMean(LocalState):
    kinds = ("mean",)


def test_the_result_says_which_statistics_are_local():
    result = a_run(2, callbacks=[OwnMean()]).fit()
    assert result["bn_statistics"] == [[1, "mean local, variance averaged"]]


class Halves(Classification):
    """A task of a user's own, with a quality that no shipped task has."""

    quality = "half_accuracy"
    by_class = "half_accuracy"

    def metrics(self, counts):
        found = super().metrics(counts)
        return {"half_accuracy": found["accuracy"] / 2} if found else {}


@pytest.mark.pictures
def test_the_quality_of_an_own_task_is_shown_like_accuracy(capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "fl_lightning.experiments.run_directory.drawings.write_figure",
        lambda path, figure: drawn.append([axes.get_ylabel() for axes in figure.axes]),
    )
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    module = FederatedModule(
        LeNet(num_classes=10, in_channels=1, image_size=8), optimizer, local_steps=1, task=Halves()
    )
    data = Digits(num_clients=3, max_examples=300, val_fraction=0.2, partition=Shards(0.4))
    trainer = {"accelerator": "cpu", "callbacks": [RoundProgress(every_n_seconds=0)]}
    run = Run(module, data, name="halves", max_epochs=2, **trainer)
    result = run.fit()
    assert 0 < result["test/half_accuracy"] <= 0.5
    out = capsys.readouterr().out
    assert f"val/half_accuracy {rows(run.attempt)[1]['val/half_accuracy']:.4g}" in out
    assert re.search(rf"test/half_accuracy +{result['test/half_accuracy']:.4f}", out)
    assert ["half accuracy", "loss"] in drawn


def test_the_table_of_the_state_names_the_buffers_outside_of_bn_layers(capsys):
    model = torch.nn.Sequential(torch.nn.InstanceNorm2d(2, track_running_stats=True), *small_cnn())
    torch.nn.utils.parametrizations.spectral_norm(model[-1])
    trainer = {**QUIET, "fast_dev_run": True}
    Run(FederatedModule(model.double(), SGD, local_steps=1), blobs(), precision="64-true", **trainer).fit()
    names = (
        "InstanceNorm2d.running_mean, InstanceNorm2d.running_var, InstanceNorm2d.num_batches_tracked: maximum"
    )
    assert (
        f"other buffers        averaged ({names}, _SpectralNorm._u, _SpectralNorm._v)"
        in capsys.readouterr().out
    )


@pytest.mark.pictures
def test_three_lines_give_a_folder_with_metrics_pictures_checkpoints_and_a_result(capsys):
    run = a_run(4)
    result = run.fit()
    assert run.path.parent == Path("runs/mine")
    assert {path.name for path in run.path.iterdir()} == {
        "checkpoints", "class_accuracy.png", "config.yaml", "learning_curve.png", "metrics.jsonl", "participation.csv", ".lock",
        "partition.json", "partition.png", "policy.json", "result.json", "run.json",
    }  # fmt: skip
    with Image.open(run.path / "learning_curve.png") as picture:
        assert len(picture.convert("L").getcolors()) > 10
    assert json.loads((run.path / "result.json").read_text()) == result
    assert result["method"] == "FedAvg + FixBN(freeze_round=2) + MaintainedMomentum()"
    assert result["learning_rates"] == {"client/lr": 0.1, "server/lr": 1.0}
    assert 0 < result["test/accuracy"] < 1
    assert [row["round"] for row in rows(run.attempt)] == [0, 1, 2, 3, 4]
    assert f"files            {run.path}" in capsys.readouterr().out


def test_a_method_that_freezes_nothing_is_called_so_in_the_result_the_table_and_pictures(capsys):
    run = a_run(3, callbacks=[FixBN(freeze_round=3), MaintainedMomentum()])
    result = run.fit()
    name = "FedAvg + FixBN(freeze_round=3), nothing frozen + MaintainedMomentum()"
    assert result["method"] == json.loads((run.path / "run.json").read_text())["method"] == name
    assert run_title(run.module)[0] == name
    assert f"method           {name}\n" in capsys.readouterr().out
    # a run that goes on for longer freezes
    again = a_run(5, callbacks=[FixBN(freeze_round=3), MaintainedMomentum()])
    assert (
        again.fit(run.attempt.checkpoints / "last.ckpt")["method"]
        == "FedAvg + FixBN(freeze_round=3) + MaintainedMomentum()"
    )
    assert "nothing is frozen" not in capsys.readouterr().out


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit():
    whole, part = a_run(6, "whole"), a_run(3)
    whole.fit()
    part.fit()
    resumed = a_run(6)  # of another process
    result = resumed.fit(resume=part.attempt.checkpoints / "last.ckpt")
    assert resumed.path.samefile(part.path)
    assert rows(resumed.attempt)[1:] == rows(whole.attempt)[1:]
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(resumed).items())
    assert result["rounds"] == 6
    assert result["continued_from"] == []
    again = resumed.fit(
        resume=resumed.attempt.checkpoints / "last.ckpt"
    )  # in the same process: nothing is left
    assert again | {"process_seconds": 0} == result | {"process_seconds": 0}


def test_one_keeper_of_checkpoints_serves_several_runs_each_in_its_own_folder():
    keeper = RoundCheckpoint(monitor="val/accuracy")
    runs = [a_run(2, f"lr{lr}", lr, checkpoint=keeper) for lr in (0.1, 1e-6)]
    for run in runs:
        run.fit()
        assert {path.name for path in run.attempt.checkpoints.iterdir()} == {"last.ckpt", "best.ckpt"}
    found = [AtomicCheckpointIO().load_checkpoint(run.attempt.checkpoints / "best.ckpt") for run in runs]
    scores = [next(v["best_score"] for k, v in one["callbacks"].items() if "Round" in k) for one in found]
    assert scores[1] < scores[0]


def test_arguments_of_the_trainer_are_taken_as_lightning_takes_them():
    run = a_run(
        1, logger=CSVLogger("csv"), plugins=[], callbacks=[TQDMProgressBar()], enable_progress_bar=True
    )
    run.fit("auto")  # nothing to go on from: a new run
    assert list(Path("csv").rglob("metrics.csv"))
    assert run.fit("auto")["rounds"] == 1
    assert a_run(1, "other", logger=True).fit()["rounds"] == 1


def test_what_cannot_be_done_is_one_line():
    run = a_run(1)
    with pytest.raises(ConfigurationError, match=r"ckpt_path 'last' found no last\.ckpt in runs/mine/"):
        run.fit(resume=True)
    assert not Path("runs").exists()
    with pytest.raises(ConfigurationError, match=r"path: the run has no folder yet; call fit\(\)"):
        run.path  # noqa: B018
    run.fit()
    with pytest.raises(ConfigurationError, match="FixBN holds the state of an earlier run; make a new FixBN"):
        run.fit()
    with pytest.raises(ConfigurationError, match="was trained on other data"):
        a_run(2, data=Digits(num_clients=3, max_examples=299)).fit(run.attempt.checkpoints / "last.ckpt")
    assert [path.name for path in Path("runs/mine").iterdir()] == [run.path.name]


def test_a_run_that_fails_before_its_first_round_leaves_nothing():
    with pytest.raises(ConfigurationError, match="not finite"):
        a_run(2, lr=1e30).fit()
    assert not Path("runs").exists()


def number_of_threads(run):
    return json.loads((run.path / "result.json").read_text())["computed_by"]["threads"]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_are_one_unless_given_and_the_process_has_its_number_back(two_threads):
    usual, given = a_run(1), a_run(1, threads=3)
    for run, threads in ((usual, 1), (given, 3)):
        run.fit()
        assert number_of_threads(run) == threads
        assert yaml.safe_load((run.path / "config.yaml").read_text())["threads"] == threads
        assert torch.get_num_threads() == 2
    assert given.path.name == f"{usual.path.name}.2"  # one hash


def test_threads_are_given_back_after_an_error_and_several_of_them_are_one_process(two_threads, monkeypatch):
    ranks = []

    class Stop(Callback):
        def on_train_start(self, trainer, pl_module):
            ranks.append((trainer.world_size, torch.get_num_threads()))
            raise ValueError("stop")

    monkeypatch.setattr("fl_lightning.experiments.run.training.cpu_ranks", lambda: 2)
    monkeypatch.setattr("fl_lightning.experiments.run.number_of_ranks._WORTH_RANKS", 1)
    for threads in (2, None):
        with pytest.raises((ValueError, ConfigurationError), match="stop"):
            a_run(1, callbacks=[Stop()], threads=threads).fit()
        assert torch.get_num_threads() == 2
    assert ranks == [(1, 2), (2, 1)]


@pytest.mark.parametrize("threads", [0, 1025, 2.0, True])
def test_a_number_of_threads_that_there_is_not_is_an_error(threads):
    with pytest.raises(ConfigurationError, match=f"threads: {threads} must be a whole number from 1 to 1024"):
        a_run(1, threads=threads)


class WithWorkers(L.LightningDataModule):
    """A data module whose loaders have worker processes."""

    samples = TensorDataset(torch.zeros(8, 1, 8, 8), torch.arange(8))

    def train_dataloader(self):
        return DataLoader(self.samples, 2, num_workers=1, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.samples, 4, num_workers=1, persistent_workers=True)


def test_worker_processes_do_not_lock_the_folder_after_the_fit():
    def start(rounds):
        return a_run(
            rounds, data=FederatedDataModule([WithWorkers()], server=WithWorkers()), callbacks=[], devices=1
        )

    first = start(1)
    first.fit()
    assert not first.attempt.is_locked()
    assert active_children() == []
    again = start(2)
    again.fit(resume=str(first.path / "checkpoints/last.ckpt"))
    assert [row["round"] for row in rows(again.attempt)] == [0, 1, 2]


def test_a_lock_ends_with_its_block_whatever_was_started_in_it(tmp_path):
    with locked(tmp_path / "lock", wait=False):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        with pytest.raises(BlockingIOError), locked(tmp_path / "lock", wait=False):
            pass
    with locked(tmp_path / "lock", wait=False):
        assert child.is_alive()
    child.kill()
    child.join()


def test_a_process_that_was_started_in_the_block_does_not_release_the_lock(tmp_path):
    with ExitStack() as held:
        held.enter_context(locked(tmp_path / "lock", wait=False))
        child = multiprocessing.get_context("fork").Process(target=held.close)
        child.start()
        child.join()
        assert child.exitcode == 0
        with pytest.raises(BlockingIOError), locked(tmp_path / "lock", wait=False):
            pass
