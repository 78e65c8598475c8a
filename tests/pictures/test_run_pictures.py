"""The pictures in a run's folder: drawn of the right numbers, and never in the way of its result."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from fl_lightning.clients.tasks import Segmentation
from fl_lightning.experiments.run_directory import drawings
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.run_directory.predictions import overlays
from fl_lightning.pictures.style import DOTS_PER_INCH, WIDTH
from tests.support.command_line import attempts, run, write_config

PICTURES = ("partition.png", "learning_curve.png", "class_accuracy.png")

pytestmark = pytest.mark.pictures


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        return Attempt(run().attempt.path.resolve())


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been written, by the name of their file."""
    figures = {}
    monkeypatch.setattr(drawings, "write_figure", lambda path, figure: figures.update({path.name: figure}))
    return figures


def read(path):
    return json.loads(path.read_text())


@pytest.mark.slow
def test_finished_run_has_every_picture_and_an_equal_run_equal_bytes(finished):
    again = run().attempt
    for name in PICTURES:
        with Image.open(finished.path / name) as picture:
            assert picture.width == WIDTH * DOTS_PER_INCH
            assert len(picture.convert("L").getcolors()) > 10
        assert (again.path / name).read_bytes() == (finished.path / name).read_bytes()
    assert not list(finished.path.glob("*.tmp"))


@pytest.mark.parametrize("ignored", [255, 0, -1, -100])
def test_ignored_pixels_are_black_whatever_their_label(ignored):
    class OnlyRoad(torch.nn.Module):
        def forward(self, images):
            return torch.eye(2)[1][None, :, None, None].expand(len(images), 2, 1, 2)

    labels = torch.tensor([[[ignored, 1]]])
    data = SimpleNamespace(palette=[(10, 10, 10), (20, 20, 20)], class_names=["car", "road"])
    data.test_dataloader = lambda: [(torch.zeros(1, 3, 1, 2), labels)]
    task = Segmentation(ignored)
    module = SimpleNamespace(task=task, model=OnlyRoad(), data=data, on_device=lambda batch: batch)
    figure = overlays(module, [])
    shown = [axes.images[0].get_array()[..., 0].tolist() for axes in figure.axes[1:]]
    assert shown == [[[0, 20]], [[0, 20]]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["road"]


@pytest.mark.slow
def test_stopped_run_has_its_curve_and_the_resumed_run_draws_them_all(tmp_path, monkeypatch):
    (tmp_path / "stop.py").write_text(
        "import os\nfrom fl_lightning import FederatedCallback\n"
        "class Stop(FederatedCallback):\n"
        "    def on_round_start(self, trainer, pl_module, cohort):\n"
        "        if cohort.round == 3:\n"
        f"            os.kill(os.getpid(), {int(signal.SIGTERM)})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fixbn = {"class_path": "FixBN", "init_args": {"freeze_round": 2}}
    write_config({"trainer.callbacks": [fixbn, {"class_path": "stop.Stop"}]})
    with pytest.raises(SystemExit):
        run()
    (folder,) = Path("runs/tiny").iterdir()
    assert {path.name for path in folder.glob("*.png")} == {"partition.png", "learning_curve.png"}
    before = (folder / "learning_curve.png").read_bytes()
    run("--ckpt_path", "last")
    assert {path.name for path in folder.glob("*.png")} == set(PICTURES)
    assert (folder / "learning_curve.png").read_bytes() != before


@pytest.mark.slow
def test_run_taken_further_drops_the_class_accuracy_of_the_shorter_one(monkeypatch):
    attempt = run("--trainer.max_epochs", 2).attempt
    assert (attempt.path / "class_accuracy.png").exists()
    monkeypatch.setattr("fl_lightning.experiments.run_directory.finish_run.draw_pictures", lambda *_: None)
    run("--ckpt_path", "last", "--trainer.max_epochs", 3)
    assert not (attempt.path / "class_accuracy.png").exists()


def test_result_names_the_accuracy_of_each_class_on_the_test_set(finished):
    result = read(finished.result)
    found = result["class_accuracy"]
    assert found["split"] == "test"
    assert found["classes"] == list("0123456789")
    assert sum(found["samples"]) == 359
    right = sum(a * n for a, n in zip(found["accuracy"], found["samples"], strict=True))
    assert right / 359 == pytest.approx(result["test/accuracy"], abs=1e-6)


def test_picture_that_cannot_be_drawn_costs_nothing_but_itself(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no ink")

    monkeypatch.setattr(drawings, "write_figure", fail)
    attempt = run("--trainer.max_epochs", 1).attempt
    assert read(attempt.result)["rounds"] == 1
    assert not list(attempt.path.glob("*.png"))
    printed = capsys.readouterr()
    assert "Result" in printed.out
    for name in PICTURES:
        assert f"{attempt.path / name} was not written: RuntimeError: no ink\n" in printed.err


def test_result_is_written_before_its_pictures(monkeypatch, capsys):
    def look(attempt, module):
        assert attempt.result.exists()
        assert "Result" in capsys.readouterr().out
        seen.append(attempt)

    seen = []
    monkeypatch.setattr("fl_lightning.experiments.run_directory.finish_run.draw_pictures", look)
    assert [run("--trainer.max_epochs", 1).attempt] == seen


def test_fast_dev_run_draws_nothing():
    run("--trainer.fast_dev_run", "true")
    assert attempts() == []
    assert not list(Path().rglob("*.png"))


def test_pictures_of_a_run_say_what_it_is_and_show_its_numbers(drawn):
    options = ("--seed_everything", 3, "--model.model.init_args.norm", "gn", "--trainer.callbacks", "[]")
    attempt = run(*options).attempt
    assert set(drawn) == set(PICTURES)
    title = "FedAvg\nLeNet (GN); Digits: Shards(class_fraction=0.4), 3 clients; seed 3"
    assert all(figure.get_suptitle().startswith(title) for figure in drawn.values())
    cells = drawn["partition.png"].axes[0]
    assert cells.images[0].get_array().tolist() == read(attempt.partition)["class_histogram"]
    (curve,) = drawn["learning_curve.png"].axes[0].lines
    rows = [row for row in read_metrics(attempt.metrics) if "val/accuracy" in row]
    assert curve.get_xdata().tolist() == [row["round"] for row in rows]
    assert curve.get_ydata().tolist() == [row["val/accuracy"] for row in rows]
    bars = drawn["class_accuracy.png"].axes[0].patches
    assert [bar.get_width() for bar in bars] == read(attempt.result)["class_accuracy"]["accuracy"]


def test_curve_of_a_run_marks_the_round_in_which_statistics_freeze(drawn):
    policy = read(run().attempt.policy)
    assert policy["mean"] == [[1, "averaged"], [3, "frozen"]]
    for axes in drawn["learning_curve.png"].axes:
        (mark,) = axes.collections
        assert [segment[0][0] for segment in mark.get_segments()] == [3]


def test_regression_on_own_data_gets_loss_and_client_sizes(tmp_path, monkeypatch, drawn):
    (tmp_path / "own.py").write_text(
        "import torch\nfrom fl_lightning.testing import ArrayClient\nfrom fl_lightning import FederatedDataModule\n"
        "class Own(FederatedDataModule):\n"
        "    def __init__(self, seed: int = 0) -> None:\n"
        "        x = torch.linspace(-1, 1, 60).view(30, 2)\n"
        "        parts = [ArrayClient(x[:n], x[:n].sum(1, keepdim=True), 5) for n in (10, 30, 20)]\n"
        "        super().__init__(parts, parts[1], seed)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    linear = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 1}}
    write_config(
        {
            "data": {"class_path": "own.Own"},
            "model.model": linear,
            "model.loss": {"class_path": "torch.nn.MSELoss"},
            "trainer.callbacks": None,
        }
    )
    assert read(run().attempt.result)["class_accuracy"] is None
    assert set(drawn) == {"partition.png", "learning_curve.png"}
    assert [bar.get_height() for bar in drawn["partition.png"].axes[0].patches] == [10, 30, 20]
    (loss,) = drawn["learning_curve.png"].axes
    assert loss.get_ylabel().startswith("loss")
