"""The example of public weights for private training: its data, its weights and its study."""

from pathlib import Path

import pytest
import torch
import yaml

from examples.privacy import public_digits
from fl_lightning.cli.study import cells_of
from fl_lightning.experiments.studies.reading import read_study
from fl_lightning.models import ResNet8
from tests.support.command_line import run

STUDY = Path(public_digits.__file__).with_name("study.yaml")
FEW = [
    "--trainer.max_epochs=1",
    "--trainer.check_val_every_n_epoch=1",
    "--data.batch_size=16",
    "--wandb.mode=disabled",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_its_digits_have_the_format_of_the_private_ones_and_its_scale_is_theirs():
    images, labels = public_digits.public_digits(per_class=100)
    assert images.shape == (1000, 1, 8, 8)
    assert labels.bincount().tolist() == [100] * 10
    assert images.min() == 0
    assert images.max() == 16
    assert images.flatten(1).max(1).values.min() > 8  # a font without digits would draw nothing
    assert (images / 16).mean() == pytest.approx(public_digits.MEAN, abs=0.01)
    assert (images / 16).std() == pytest.approx(public_digits.STD, abs=0.01)
    assert torch.equal(images, public_digits.public_digits(per_class=100)[0])


def test_no_private_sample_decides_the_scale_of_the_private_inputs():
    data = public_digits.PrivateDigits(num_clients=2)
    data.setup("fit")
    assert data.normalize.mean.flatten().tolist() == pytest.approx([public_digits.MEAN])
    assert data.normalize.std.flatten().tolist() == pytest.approx([public_digits.STD])


def test_weights_from_public_digits_know_public_digits():
    images, labels = public_digits.public_digits(per_class=60)
    model = public_digits.pretrained("bn", images, labels, epochs=6).eval()
    with torch.no_grad():
        guesses = model((images / 16 - public_digits.MEAN) / public_digits.STD).argmax(1)
    assert (guesses == labels).float().mean() > 0.8


@pytest.mark.slow
def test_every_label_of_its_study_runs_a_round():
    study = read_study(STUDY, "full")
    for norm in public_digits.NORMS:
        path = Path(f"data/public_digits/{norm}.pt")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(ResNet8(in_channels=1, norm=norm, width=8).state_dict(), path)
    cells, seen = cells_of(study, []), set()
    for labels in study.combinations():
        if labels["method"] not in {one for one, _ in seen} or labels["epsilon"] not in {
            one for _, one in seen
        }:
            seen.add((labels["method"], labels["epsilon"]))
            Path("cell.yaml").write_text(yaml.safe_dump(cells.cell(labels, 0).config))
            cli = run(*FEW, config="cell.yaml")
            names = [type(callback).__name__ for callback in cli.trainer.callbacks]
            assert "PrivateSGD" in names
            assert ("FixBN" in names) == (labels["method"] == "FixBN")
    assert {one for one, _ in seen} == {*study.axes["method"]}
    assert {one for _, one in seen} == {*study.axes["epsilon"]}
