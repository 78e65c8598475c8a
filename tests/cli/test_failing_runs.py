"""Mistakes that show when the run is under way, and settings that another one decides."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning.experiments.run_directory.runs_frame import runs_frame
from tests.support.command_line import attempts, main, message_of, run, write_config
from tests.support.helpers import write_cifar10_folders


def test_early_stopping_on_a_misspelt_metric_ends_the_run_in_a_line(capsys):
    write_config(
        {"trainer.callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/losss"}}]}
    )
    message = message_of(capsys, run)
    assert "val/losss" in message
    assert "val/accuracy" in message
    keeper = ("--checkpoint.monitor", "test/loss")
    message = message_of(capsys, lambda: run(*keeper, config=write_config(path="plain.yaml")))
    assert "error: checkpoint.monitor: 'test/loss' was never logged; logged are: " in message


def test_settings_that_agree_with_what_decides_them_are_taken():
    write_config({"data.init_args.seed": 3, "model.model.init_args": {"num_classes": 10, "in_channels": 1}})
    plain, given = (
        run("--seed_everything", 3, config=write_config(path="plain.yaml")),
        run("--seed_everything", 3),
    )
    assert plain.attempt.path.name.partition("-s")[0] == given.attempt.path.name.partition("-s")[0]
    assert given.datamodule.seed == given.model.seed == 3


@pytest.mark.slow
def test_a_model_setting_that_the_data_do_not_decide_is_the_users(capsys, tmp_path, monkeypatch):
    Path("silent.py").write_text(
        "from fl_lightning.datamodules import Digits\nclass Silent(Digits):\n    num_classes = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    message = message_of(capsys, lambda: run("--data.class_path", "silent.Silent"))
    assert "set model.model.init_args.num_classes, or num_classes in the data module" in message
    settings = ("--data.class_path", "silent.Silent", "--model.model.init_args.num_classes", 12)
    assert run(*settings).model.model.state_dict().popitem()[1].shape == (12,)


def test_what_the_data_decide_is_refused_wherever_it_is_given(capsys):
    Path("model.yaml").write_text("class_path: LeNet\ninit_args: {num_classes: 5}\n")
    write_config({"model.model": "model.yaml"})
    words = "model.model.init_args.num_classes: 5 contradicts the data set"
    assert words in message_of(capsys, run)
    settings = yaml.safe_load(Path(write_config({"model.model.init_args": {"num_classes": 5}})).read_text())
    Path("all.yaml").write_text(yaml.safe_dump({"fit": settings}))
    assert words in message_of(capsys, lambda: main(["--config", "all.yaml", "fit"]))
    assert attempts() == []


def test_a_setting_of_a_model_that_another_one_replaced_contradicts_nothing(tmp_path, monkeypatch):
    write_config({"model.model.init_args": {"num_classes": 5}})
    Path("net.py").write_text(
        "import torch\nclass Net(torch.nn.Sequential):\n    def __init__(self, width: int = 4):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.BatchNorm1d(width),\n"
        "                         torch.nn.Linear(width, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cli = run("--model.model", "net.Net", "--trainer.fast_dev_run", "true")
    assert type(cli.model.model).__name__ == "Net"


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "torch.nn.CrossEntropyLoss"])
def test_losses_of_torch_are_known_by_their_names(name):
    loss = run("--model.loss", name, "--model.loss.label_smoothing", 0.1).model.loss
    assert (type(loss).__name__, loss.label_smoothing) == ("CrossEntropyLoss", 0.1)


def test_class_weights_are_a_list_of_numbers(capsys):
    weights = [1, 2.5, *[1] * 8]
    config = write_config(
        {"model.loss": {"class_path": "CrossEntropyLoss", "init_args": {"weight": weights}}}, "weighted.yaml"
    )
    cli = run("--trainer.max_epochs", 1, config=config)
    assert cli.model.loss.weight.tolist() == weights
    cli = run("--ckpt_path", "last", "--trainer.max_epochs", 2, config=str(cli.attempt.config))
    assert cli.model.loss.weight.tolist() == weights
    words = message_of(capsys, lambda: run("--model.loss.init_args.weight", "[a, 2]", config=config))
    assert "CrossEntropyLoss.weight: [a, 2] is not valid" in words


def test_a_loss_may_be_a_function():
    assert run("--model.loss", "torch.nn.functional.cross_entropy").model.loss.__name__ == "cross_entropy"


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluation_without_a_checkpoint_asks_for_one(capsys, command):
    assert "--ckpt_path last" in message_of(capsys, lambda: run(command=command))


def test_truncated_checkpoint_is_named_and_the_run_stays_as_it_is(capsys):
    attempt = run("--trainer.max_epochs", 1).attempt
    checkpoint = attempt.checkpoints / "last.ckpt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    before = {path: path.read_bytes() for path in attempt.path.rglob("*") if path.is_file()}
    capsys.readouterr()
    for command in ("fit", "test"):
        message = message_of(capsys, lambda command=command: run("--ckpt_path", "last", command=command))
        assert (
            f"{checkpoint} is truncated, damaged or holds more than tensors and plain values (5,000 bytes"
            in message
        )
    assert {path: path.read_bytes() for path in attempt.path.rglob("*") if path.is_file()} == before
    assert attempts() == [attempt.path.name]


def test_run_that_diverges_at_once_leaves_nothing_and_has_a_status_of_its_own(capsys):
    message = message_of(capsys, lambda: run("--model.client_optimizer.init_args.lr", 1e30), status=3)
    assert message.startswith("error: round 1: the update of client 0 is not finite")
    assert "lr (now 1e+30)" in message
    assert attempts() == []


def test_run_that_diverges_in_the_middle_keeps_its_rows_and_has_no_result(capsys, tmp_path, monkeypatch):
    Path("late.py").write_text(
        "from fl_lightning import FederatedCallback\n"
        "class Explode(FederatedCallback):\n"
        "    def on_before_aggregate(self, trainer, pl_module, cohort):\n"
        "        if cohort.round == 3:\n"
        "            next(iter(cohort.params.values()))[1] = float('nan')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    write_config({"trainer.callbacks": [{"class_path": "late.Explode"}]})
    message = message_of(capsys, run, status=3)
    assert "round 3: the update of client 1 is not finite" in message
    (folder,) = Path("runs/tiny").iterdir()
    assert [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
    ]
    assert not (folder / "result.json").exists()
    (row,) = runs_frame(Path("runs")).to_dict("records")
    assert (row["state"], row["rounds"]) == ("diverged", 2)
    assert (folder / "error.txt").read_text().startswith("Diverged: round 3: the update of client 1")


@pytest.mark.parametrize("name", ["..", "../../x", "a/../b", "/abs", "a\nb", "a\x1b[31mb"])
def test_name_that_leads_out_of_the_folder_of_runs_is_refused(name, capsys):
    write_config()
    message = message_of(capsys, lambda: run("--name", name))
    assert message == f"error: name: {name!r} is no folder below run_root runs; use a name such as mine\n"
    assert [path.name for path in Path().iterdir()] == ["tiny.yaml"]


def test_only_the_command_line_lets_a_checkpoint_run_code(capsys):
    attempt = run("--trainer.max_epochs", 1).attempt
    checkpoint = attempt.checkpoints / "last.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, "code": Runs()}, checkpoint)
    Path("file.yaml").write_text(f"weights_only: false\nckpt_path: {checkpoint}\n")
    capsys.readouterr()
    for command in ("fit", "test"):
        message = message_of(capsys, lambda command=command: run("--config", "file.yaml", command=command))
        assert message == (
            "error: weights_only: false in a file would run code from a checkpoint; remove it from the file\n"
        )
    refused = message_of(capsys, lambda: run("--ckpt_path", "last", command="test"))
    assert (
        f"checkpoint {checkpoint} is truncated, damaged or holds more than tensors and plain values"
        in refused
    )
    assert not Path("executed").exists()
    run("--config", "file.yaml", "--weights_only", "false", command="test")
    assert Path("executed").exists()


class Runs:
    """What runs where it is unpickled."""

    def __reduce__(self):
        return os.makedirs, ("executed", 0o777, True)


HOSPITALS = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule


class Hospital(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(20, 1, 8, 8), torch.arange(20) % 10), 10)


class WithValidation(Hospital):
    val_dataloader = Hospital.train_dataloader


class Hospitals(FederatedDataModule):
    num_classes, in_channels, image_size = 10, 1, 8

    def __init__(self, server: bool, seed: int = 0) -> None:
        super().__init__([Hospital(), Hospital()], WithValidation() if server else Hospital(), seed)
"""


@pytest.mark.pictures
@pytest.mark.parametrize("validates", [True, False])
def test_own_data_without_test_data_end_in_a_result(validates, tmp_path, monkeypatch):
    Path("hospitals.py").write_text(HOSPITALS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hospitals", raising=False)
    data = {"class_path": "hospitals.Hospitals", "init_args": {"server": validates}}
    write_config({"data": data, "trainer.max_epochs": 2, "trainer.callbacks": None})
    cli = run()
    result = json.loads(cli.attempt.result.read_text())
    assert [name for name in result if "/" in name] == (["val/loss", "val/accuracy"] if validates else [])
    assert cli.attempt.learning_curve.exists()


def test_images_that_vanish_while_training_are_in_memory():
    write_cifar10_folders()
    write_config(
        {
            "data": {
                "class_path": "CIFAR10",
                "init_args": {"image_size": 8, "num_clients": 2, "batch_size": 4},
            },
            "trainer.max_epochs": 2,
            "trainer.callbacks": [{"class_path": "tests_vanish.Vanish"}],
        }
    )
    Path("tests_vanish.py").write_text(
        "import shutil\nimport lightning as L\n"
        "class Vanish(L.Callback):\n"
        "    def on_train_start(self, trainer, pl_module):\n"
        "        shutil.rmtree('data/cifar10')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path.cwd())
        cli = run()
    assert "test/accuracy" in json.loads(cli.attempt.result.read_text())
