"""Tiny-ImageNet's own layout."""

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import TinyImageNet

REAL = Path(__file__).parents[3] / "shared" / "data" / "tiny-imagenet-200-subset.zip"


@pytest.fixture
def root(tmp_path):
    """Two classes of four images, one of them greyscale; three validation images in no order."""
    root = tmp_path / "tiny-imagenet-200"
    for label, wnid in ((1, "n02"), (0, "n01")):
        folder = root / "train" / wnid / "images"
        folder.mkdir(parents=True)
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("n01_0.JPEG\t0\t0\t62\t62\n")
        for index in range(4):
            pixels = np.full((64, 64, 3), (200 * label, 50 * index, 7), dtype=np.uint8)
            image = Image.fromarray(pixels)
            (image.convert("L") if index == 3 else image).save(folder / f"{wnid}_{index}.JPEG", quality=95)
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for index, wnid in enumerate(("n02", "n01", "n02")):
        pixels = np.full((64, 64, 3), 80 * index, dtype=np.uint8)
        Image.fromarray(pixels).save(root / "val" / "images" / f"val_{index}.JPEG")
        lines.append(f"val_{index}.JPEG\t{wnid}\t0\t44\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (root / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn03\tcat\n")
    return root


def made(root, **settings):
    return TinyImageNet(str(root), cache_dir=str(root.parent / "cache"), **settings)


def test_classes_labels_and_names_are_those_of_the_layout(root):
    data = made(root)
    found = data.load()
    assert data.class_names == ["goldfish", "n02"]
    assert data.num_classes == 2
    assert found.train_labels.tolist() == [0] * 4 + [1] * 4
    assert found.test_labels.tolist() == [1, 0, 1]
    assert found.train_images.shape == (8, 3, 64, 64)
    red = found.train_images[:, 0].float().mean((1, 2))
    assert (red[[4, 5, 6]] > 150).all()
    assert (red[:3] < 60).all()
    assert [round(float(image.float().mean()) / 80) for image in found.test_images] == [0, 1, 2]
    assert made(root, image_size=16).load().train_images.shape == (8, 3, 16, 16)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda root: (root / "val/val_annotations.txt").unlink(),
            r"holds no val/val_annotations.txt; expected the layout",
        ),
        (
            lambda root: (root / "val/images/val_1.JPEG").unlink(),
            r"line 2 of .* names val_1.JPEG of class 'n01'; the file must be in val/images/",
        ),
        (
            lambda root: (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t0\t1\t1\n"),
            r"line 1 of .* names val_0.JPEG of class 'n09'; .* the class in train/",
        ),
        (lambda root: (root / "val/val_annotations.txt").write_text(""), r"names no image"),
        (
            lambda root: (root / "train/n01/images/n01_2.JPEG").write_bytes(b"no"),
            r"n01_2.JPEG cannot be read",
        ),
    ],
)
def test_what_is_missing_or_damaged_is_named(root, damage, message):
    damage(root)
    with pytest.raises(ConfigurationError, match=message):
        made(root).load()


def test_a_missing_folder_says_what_is_expected(tmp_path):
    with pytest.raises(ConfigurationError, match=r"does not exist; expected the layout train/<wnid>/images"):
        made(tmp_path / "none")
    with pytest.raises(ConfigurationError, match=r"holds no train/<wnid>/"):
        made(tmp_path)


@pytest.fixture
def archive(root, monkeypatch):
    """An archive of the folder, which goes, at the address that it is fetched from."""
    found = Path(shutil.make_archive(str(root.parent / "archive"), "zip", root.parent, root.name))
    shutil.rmtree(root)
    monkeypatch.setattr(TinyImageNet, "md5", hashlib.md5(found.read_bytes()).hexdigest())
    monkeypatch.setattr(TinyImageNet, "url", found.as_uri())
    return found


def test_it_is_fetched_once_on_request(root, archive):
    with pytest.raises(
        ConfigurationError, match=r"does not exist; .* unpack file:.*zip .*or set download: true"
    ):
        made(root)
    data = made(root, download=True)
    assert (data.num_classes, root.exists()) == (200, False)
    data.prepare_data()
    data.load()
    assert (data.num_classes, data.class_names) == (2, ["goldfish", "n02"])
    archive.unlink()
    again = made(root, download=True)
    again.prepare_data()
    assert again.load().test_labels.tolist() == [1, 0, 1]
    assert sorted(path.name for path in root.parent.iterdir()) == ["cache", root.name]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda archive: archive.unlink(),
            r"could not be fetched into .* \(.*No such file.*\); try again, or",
        ),
        (lambda archive: archive.write_bytes(archive.read_bytes()[:-9]), r"\(it has another MD5"),
    ],
)
def test_what_is_no_archive_leaves_nothing(root, archive, spoil, message):
    spoil(archive)
    before = sorted(root.parent.iterdir())
    with pytest.raises(ConfigurationError, match=message) as refused:
        made(root, download=True).prepare_data()
    assert "\n" not in str(refused.value)
    assert sorted(root.parent.iterdir()) == before


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason=f"the archive {REAL.name} is not here")
def test_real_images(tmp_path):
    with zipfile.ZipFile(REAL) as archive:
        archive.extractall(tmp_path)
    data = made(tmp_path / "tiny-imagenet-200", image_size=32, num_clients=5)
    data.setup("fit")
    assert data.num_classes == 200
    assert data.samples.labels[data.distribution.test].bincount().tolist() == [20] * 200
    assert torch.tensor(data.class_histograms()).sum(0).tolist() == [100] * 200
    assert len(os.listdir(tmp_path / "cache")) == 1
