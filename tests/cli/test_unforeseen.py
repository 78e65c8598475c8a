"""What nobody foresaw is one line too: what went wrong, what was being done, and where the traceback is."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.command_line import attempts, message_of, run, write_config

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
        odd = {"double": (image.double(), label), "255": (image, label * 0 + 255)}
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


BATCH = "model Net of float32, loss Classification.loss, a batch of "
WANTED = "expected: inputs of the model's type and, for cross-entropy, integer labels below the number of its outputs"
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
    "a label of no class": (
        data(client="255") | net(),
        ("IndexError: Target 255 is out of bounds. "
        f"({BATCH}float32 [10, 1, 8, 8] and int64 [10] from 255 to 255; {WANTED}; computing client 1; round 1, local step 1)"),
    ),
    "a label of no class in the evaluation": (
        data(server="255") | net(),
        f"IndexError: Target 255 is out of bounds. ({BATCH}float32 [10, 1, 8, 8] and int64 [10] from 255 to 255; {WANTED}; {EVALUATION})",
    ),
    "a loss that takes no labels": (
        data() | net() | {"model.loss": "BCEWithLogitsLoss"},
        ("ValueError: Target size (torch.Size([10])) must be the same as input size (torch.Size([10, 10])) "
        f"({BATCH.replace('Classification.loss', 'BCEWithLogitsLoss')}float32 [10, 1, 8, 8] and int64 [10] from 0 to 9; {WANTED}; {EVALUATION})"),
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
def test_line_says_what_was_being_done_and_the_traceback_is_in_a_file(changes, line, capsys):
    write_config(changes)
    message = message_of(capsys, run, status=1)
    assert message == f"error: {line[:-1]}; the traceback is in error.txt)\n"
    trace = Path("error.txt").read_text()
    assert trace.startswith("Traceback (most recent call last):\n")
    assert line.partition(":")[0] in trace
    assert attempts() == []


def test_traceback_is_beside_a_run_that_is_kept_and_goes_when_it_is_resumed(capsys):
    write_config(
        {
            "trainer.callbacks": [{"class_path": "own_parts.Hook"}],
            "trainer.max_epochs": 3,
            "checkpoint": {"every_n_rounds": 1},
        }
    )
    message = message_of(capsys, run, status=1)
    (name,) = attempts()
    path = Path("runs", "tiny", name, "error.txt")
    assert (
        message
        == f"error: ZeroDivisionError: division by zero (Hook.on_round_start, round 2; the traceback is in {path})\n"
    )
    assert 'raise ZeroDivisionError("division\\nby zero")' in path.read_text()
    assert not Path("error.txt").exists()
    Path("own_parts.py").write_text(OWN.replace("cohort.round == 2", "False"))
    sys.modules.pop("own_parts")
    run("--ckpt_path", "last")
    assert not path.exists()


def test_traceback_is_shown_where_the_environment_asks_for_it(capsys, monkeypatch):
    monkeypatch.setenv("FL_LIGHTNING_TRACEBACK", "1")
    write_config(data(table="data.csv"))
    with pytest.raises(SystemExit):
        run()
    shown = capsys.readouterr().err
    assert re.search(r"^Traceback .*\n(.*\n)*error: KeyError: 'data.csv' \(making Hospitals", shown)


def test_traceback_is_shown_where_no_file_takes_it(capsys):
    write_config(data(table="data.csv"))
    os.mkdir("error.txt")
    with pytest.raises(SystemExit):
        run()
    shown = capsys.readouterr().err
    assert "Traceback (most" in shown
    assert shown.endswith("; the traceback is above, since error.txt cannot be written: Is a directory)\n")


def test_images_that_are_not_numbers_are_not_blamed_on_the_learning_rate(capsys):
    write_config(data(client="nan") | net())
    message = message_of(capsys, run, status=2)
    assert message == (
        "error: round 1: the update of client 1 is not finite, since its data are not: its batch of local step 1 has NaN or "
        "infinity; mend the data of client 1\n"
    )
    assert attempts() == []
