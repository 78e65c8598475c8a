"""Tiny-ImageNet's own layout."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import TinyImageNet
from fl_lightning import ConfigurationError

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
            r"line 2 of .* has val_1.JPEG, which val/images/ has not",
        ),
        (
            lambda root: (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t0\t1\t1\n"),
            r"line 1 of .* has the class 'n09', which train/ has not",
        ),
        (lambda root: (root / "val/val_annotations.txt").write_text(""), r"names no image"),
        (
            lambda root: (root / "train/n01/images/n01_2.JPEG").write_bytes(b"no"),
            r"n01_2.JPEG, which cannot be read",
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


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason=f"the archive {REAL.name} is not here")
def test_real_images(tmp_path):
    with zipfile.ZipFile(REAL) as archive:
        archive.extractall(tmp_path)
    data = made(tmp_path / "tiny-imagenet-200", image_size=32, num_clients=5)
    data.setup("fit")
    assert data.num_classes == 200
    assert data.test_images.labels.bincount().tolist() == [20] * 200
    assert torch.tensor(data.class_histograms()).sum(0).tolist() == [100] * 200
    assert len(os.listdir(tmp_path / "cache")) == 1
