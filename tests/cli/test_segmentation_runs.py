"""A segmentation from the command line: what the run's folder holds, predictions, resume and ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fl_lightning
from fl_lightning.__main__ import main as program
from fl_lightning.datamodules import Cityscapes
from tests.support.command_line import main, rows
from tests.support.street_scenes import write_scenes

CONFIG = Path(fl_lightning.__file__).parents[1] / "configs" / "camvid_small_bn.yaml"


def fit(name, *arguments):
    if not Path("data").exists():
        write_scenes(Path("data/camvid"), {"train/0016e5": 6, "train/0001tp": 4, "train/seq05vd": 3})
    small = ["--data.batch_size", 2, "--data.image_size", "[16, 24]", "--data.crop_size", "[16, 16]"]
    small += [
        "--model.model.init_args.width",
        4,
        "--model.local_steps",
        2,
        "--trainer.check_val_every_n_epoch",
        1,
    ]
    given = ["fit", "--config", CONFIG, "--name", name, "--trainer.max_epochs", 4, *small, *arguments]
    return main([str(argument) for argument in given])


@pytest.mark.slow
@pytest.mark.pictures
def test_a_run_leaves_its_metrics_pictures_and_predictions():
    cli = fit("scenes")
    attempt = cli.attempt
    result = json.loads(attempt.result.read_text())
    assert 0 < result["test/mean_iou"] < 1
    assert result["class_iou"]["classes"] == list(Cityscapes.class_names)
    known = [value for value in result["class_iou"]["iou"] if value is not None]
    assert result["test/mean_iou"] == pytest.approx(sum(known) / len(known), rel=1e-6)
    sources = ("batch", "test_set", "silobn", "static_pooled")
    assert all(f"test/mean_iou_{source}" in rows(attempt)[-1] for source in sources)
    for picture in ("overlays.png", "class_iou.png", "learning_curve.png"):
        with Image.open(attempt.path / picture) as image:
            assert min(image.size) > 200
    program(["predict", str(attempt.path), "--checkpoint", "last"])
    (folder,) = attempt.path.glob("predictions_*_last_round_4")
    predictions = sorted(folder.iterdir())
    assert [path.name for path in predictions] == ["00000.png", "00001.png", "00002.png"]
    with Image.open(predictions[0]) as image:
        colours = {tuple(colour) for colour in np.asarray(image).reshape(-1, 3).tolist()}
    assert colours <= set(Cityscapes.palette)


@pytest.mark.slow
def test_a_resumed_run_and_one_on_two_ranks_have_the_numbers_of_one_that_was_not_stopped():
    whole = fit("whole", "--trainer.devices", 1, "--checkpoint.keep_rounds", "[2]").attempt
    path = whole.checkpoints / "round_2.ckpt"
    assert rows(fit("parts", "--trainer.devices", 1, "--ckpt_path", path).attempt)[-2:] == rows(whole)[-2:]
    assert rows(fit("two", "--trainer.devices", 2).attempt) == rows(whole)
