"""What nobody foresaw ends in one line too, below its traceback: what went wrong, and what was being done."""

import re
import sys
from pathlib import Path

import pytest
from command_line import attempts, message_of, run, write_config

OWN = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fl_lightning import FederatedCallback, FederatedDataModule


class Images(Dataset):
    def __init__(self, odd):
        self.odd = odd

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if self.odd == "disk":
            raise OSError(5, "Input/output error", "x.png")
        image, label = torch.ones(1, 8, 8), torch.tensor(i % 10)
        odd = {"double": (image.double(), label), "float label": (image, label.float()), "255": (image, label * 0 + 255)}
        return odd.get(self.odd, (image * float("nan") if self.odd == "nan" else image, label))


class Hospital(L.LightningDataModule):
    def __init__(self, odd=""):
        super().__init__()
        self.odd = odd

    def train_dataloader(self):
        return DataLoader(Images(self.odd), 10)

    val_dataloader = train_dataloader


class Hospitals(FederatedDataModule):
    num_classes, in_channels, image_size = 10, 1, 8

    def __init__(self, client: str = "", server: str = "", table: str = "", seed: int = 0):
        if table:
            raise KeyError(table)
        super().__init__([Hospital(), Hospital(client)], Hospital(server), seed)


class Net(nn.Sequential):
    def __init__(self, classes: int = 10):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))


class Hook(FederatedCallback):
    def on_round_start(self, trainer, pl_module, cohort):
        if cohort.round == 2:
            raise ZeroDivisionError("division\\nby zero")
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    Path("own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)


def data(**settings):
    return {"data": {"class_path": "own_parts.Hospitals", "init_args": settings}}


def net(**settings):
    return {"model.model": {"class_path": "own_parts.Net", "init_args": settings}}


BATCH = "model Net of float32, loss cross_entropy, a batch of "
WANTED = "wanted: inputs of the model's type and, for cross-entropy, integer labels below the number of its outputs"
EVALUATION = "evaluating the server after round 0, batch 1"

TABLE = {
    "a file that cannot be read": (
        data(client="disk"),
        "OSError: [Errno 5] Input/output error: 'x.png' (reading the data of client 1)",
    ),
    "images of another type": (
        data(client="double") | net(),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float "
        f"({BATCH}float64 [10, 1, 8, 8] and int64 [10] from 0 to 9; {WANTED}; computing client 1; round 1, local step 1)"),
    ),
    "labels that are no classes": (
        data(client="float label") | net(),
        ("RuntimeError: expected target dtype to be Long or Byte, but got Float "
        f"({BATCH}float32 [10, 1, 8, 8] and float32 [10]; {WANTED}; computing client 1; round 1, local step 1)"),
    ),
    "a label of no class": (
        data(client="255") | net(),
        ("IndexError: Target 255 is out of bounds. "
        f"({BATCH}float32 [10, 1, 8, 8] and int64 [10] from 255 to 255; {WANTED}; computing client 1; round 1, local step 1)"),
    ),
    "a label of no class in the evaluation": (
        data(server="255") | net(),
        f"IndexError: Target 255 is out of bounds. ({BATCH}float32 [10, 1, 8, 8] and int64 [10] from 255 to 255; {WANTED}; {EVALUATION})",
    ),
    "too few classes": (
        data() | net(classes=5),
        f"IndexError: Target 5 is out of bounds. ({BATCH}float32 [10, 1, 8, 8] and int64 [10] from 0 to 9; {WANTED}; {EVALUATION})",
    ),
    "a loss that takes no labels": (
        data() | net() | {"model.loss": "BCEWithLogitsLoss"},
        ("ValueError: Target size (torch.Size([10])) must be the same as input size (torch.Size([10, 10])) "
        f"({BATCH.replace('cross_entropy', 'BCEWithLogitsLoss')}float32 [10, 1, 8, 8] and int64 [10] from 0 to 9; {WANTED}; {EVALUATION})"),
    ),
    "a data set that cannot be made": (
        data(table="data.csv"),
        "KeyError: 'data.csv' (making Hospitals(client='', server='', table='data.csv', seed=0))",
    ),
    "a model that cannot be made": (
        data() | net(classes=-1),
        "RuntimeError: Trying to create tensor with negative dimension -1: [-1, 8] (making Net(classes=-1))",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), TABLE.values(), ids=TABLE)
def test_traceback_ends_in_a_line_that_says_what_was_being_done(changes, line, capsys):
    write_config(changes)
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 1
    trace, _, message = capsys.readouterr().err.rpartition("\nerror: ")
    assert message == f"{line}\n"
    assert trace.startswith("Traceback (most recent call last):\n")
    assert line.partition(":")[0] in trace
    assert [path.name for path in Path().iterdir() if path.suffix != ".py"] == ["tiny.yaml"]


def test_rounds_before_the_error_are_kept(capsys):
    write_config(
        {
            "trainer.callbacks": [{"class_path": "own_parts.Hook"}],
            "trainer.max_epochs": 3,
            "checkpoint": {"every_n_rounds": 1},
        }
    )
    with pytest.raises(SystemExit):
        run()
    line = "error: ZeroDivisionError: division by zero (Hook.on_round_start, round 2)\n"
    assert capsys.readouterr().err.endswith(line)
    Path("own_parts.py").write_text(OWN.replace("cohort.round == 2", "False"))
    sys.modules.pop("own_parts")
    assert run("--ckpt_path", "last").attempt.path.name == attempts()[0]


def test_traceback_of_any_error_is_shown_where_the_environment_asks_for_it(capsys, monkeypatch):
    monkeypatch.setenv("FL_LIGHTNING_TRACEBACK", "1")
    with pytest.raises(SystemExit):
        run("--model.local_steps", 0)
    shown = capsys.readouterr().err
    assert re.search(r"^Traceback .*\n(.*\n)*error: local_steps: 0 must be at least 1", shown)


def test_images_that_are_not_numbers_are_not_blamed_on_the_learning_rate(capsys):
    write_config(data(client="nan") | net())
    message = message_of(capsys, run)
    assert message == (
        "error: round 1: the update of client 1 is not finite, since its data are not: its batch of local step 1 has NaN or "
        "infinity; mend the data of client 1\n"
    )
    assert attempts() == []
