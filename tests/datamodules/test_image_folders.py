"""Images in class folders: layout, decoding, and real photographs where they are at hand."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import ImageFolder
from tests.support.colour_folders import load, save

REAL_IMAGES = Path(__file__).parents[3] / "shared" / "data" / "cifar10-jpeg.zip"


def test_classes_are_the_train_folders_in_alphabetical_order(tree):
    datamodule = ImageFolder(str(tree), 8)
    assert datamodule.class_names == ["ant", "zebra"]
    assert (datamodule.num_classes, datamodule.in_channels, datamodule.image_size) == (2, 3, 8)


def test_images_and_labels_belong_together(tree):
    data = load(tree)
    assert data.train_labels.tolist() == [0] * 6 + [1] * 6
    assert data.test_labels.tolist() == [0] * 3 + [1] * 3
    for images, labels, count in (
        (data.train_images, data.train_labels, 6),
        (data.test_images, data.test_labels, 3),
    ):
        assert images.dtype == torch.uint8
        index = torch.arange(len(labels)) % count
        colours = torch.stack([10 * index, 100 * labels, 7 + index], 1)
        assert torch.equal(images.long(), colours[:, :, None, None].expand(-1, -1, 8, 8))


def test_the_data_module_trains_and_evaluates_on_them(tree):
    datamodule = ImageFolder(str(tree), 8, num_clients=3, batch_size=2, crop_padding=1, horizontal_flip=True)
    datamodule.prepare_data()
    datamodule.setup("fit")
    x, y = datamodule.cohort_batch([0, 1, 2], [0, 1, 2]).stack()
    assert x.shape == (3, 2, 3, 8, 8)
    assert y.shape == (3, 2)
    assert [len(y) for _, y in datamodule.test_dataloader()] == [6]


def test_val_is_the_test_set_where_there_is_no_test_folder(tree):
    expected = load(tree)
    (tree / "test").rename(tree / "val")
    assert torch.equal(load(tree).test_images, expected.test_images)


def test_other_sizes_and_modes_become_square_rgb(tree):
    wide = np.zeros((16, 40))
    wide[:, 10:30] = 200
    save(tree / "train" / "ant" / "wide.png", wide)
    Image.new("CMYK", (8, 8)).save(tree / "train" / "ant" / "cmyk.jpg")
    images = load(tree).train_images
    assert images[7].unique().tolist() == [200], "the shorter side is resized and the centre kept"
    assert images[6].float().mean() > 250, "no ink is white"


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_a_broken_image_is_named(tree, content):
    (tree / "train" / "ant" / "2.png").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"train/ant/2\.png cannot be read"):
        load(tree)


def test_a_truncated_image_is_named(tree):
    file = tree / "test" / "zebra" / "photo.jpg"
    save(file, np.random.default_rng(0).integers(0, 255, (64, 64, 3)))
    file.write_bytes(file.read_bytes()[:1500])
    with pytest.raises(ConfigurationError, match=r"test/zebra/photo\.jpg cannot be read"):
        load(tree)


def _remove(folder):
    for file in folder.rglob("*.png"):
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "place", "what"),
    [
        (lambda path: path.symlink_to("gone.png"), "train/ant/odd.png", "which is no readable file"),
        (os.mkfifo, "train/ant/odd.png", "which is no readable file"),
        (lambda path: path.symlink_to(".."), "train/ant/back", "a link to the folder .* that contains it"),
        (lambda path: path.symlink_to("."), "train/ant/back", "a link to the folder .* that contains it"),
    ],
)
def test_what_is_no_image_is_named(tree, spoil, place, what):
    spoil(tree / place)
    with pytest.raises(ConfigurationError, match=f"data_dir holds .*{place}, {what}.*; remove "):
        load(tree)


def test_a_link_to_images_elsewhere_is_followed(tree, tmp_path):
    save(tmp_path / "elsewhere" / "6.png", np.zeros((8, 8, 3)))
    (tree / "train" / "ant" / "more").symlink_to(tmp_path / "elsewhere")
    assert load(tree).train_labels.bincount().tolist() == [7, 6]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda root: root.rename(root.with_name("moved")),
            r"data_dir=.*tree does not exist; expected the layout",
        ),
        (lambda root: (root / "train").rename(root / "training"), r"holds no train/; expected the layout"),
        (
            lambda root: (root / "test").rename(root / "testing"),
            r"holds no image in test/; expected train/<class>",
        ),
        (lambda root: (root / "test" / "ant").rename(root / "test" / "bee"), r"test/bee without a train/bee"),
        (lambda root: _remove(root / "train" / "ant"), r"no image in train/ant"),
        (lambda root: _remove(root / "test"), r"no image in test/"),
    ],
)
def test_another_layout_is_refused_with_the_one_expected(tree, spoil, message):
    spoil(tree)
    with pytest.raises(ConfigurationError, match=message) as raised:
        load(tree)
    assert "\n" not in str(raised.value)


def test_an_impossible_size_is_refused(tree):
    with pytest.raises(ConfigurationError, match="image_size must be at least 1, found 0"):
        ImageFolder(str(tree), 0)


def test_data_and_cache_may_lie_in_the_home_of_the_user(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree.parent))
    datamodule = ImageFolder("~/tree", 8, cache_dir="~/cache")
    datamodule.load()
    assert len(list((tree.parent / "cache").glob("tree-8px-*.pt"))) == 1
    assert not Path("~").exists()


@pytest.mark.skipif(not REAL_IMAGES.exists(), reason=f"needs the CIFAR-10 photographs in {REAL_IMAGES.name}")
def test_real_photographs_are_decoded_as_they_are(tmp_path):
    with zipfile.ZipFile(REAL_IMAGES) as archive:
        names = [
            name for name in archive.namelist() if name.endswith(tuple(f"/00{i:02}.jpg" for i in range(25)))
        ]
        archive.extractall(tmp_path / "cifar", names)
    datamodule = ImageFolder(str(tmp_path / "cifar"), 32, num_clients=5, batch_size=10)
    datamodule.setup("fit")
    assert datamodule.num_classes == 10
    assert datamodule.class_names[0] == "airplane"
    assert datamodule.partition_record()["sizes"] == [50] * 5
    data = datamodule.load()
    assert len(data.test_labels) == 250
    with Image.open(tmp_path / "cifar" / "train" / "cat" / "0003.jpg") as image:
        expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(data.train_images[datamodule.class_names.index("cat") * 25 + 3], expected)


def test_class_folders_without_a_test_part_are_split_by_the_seed(tree):
    root = tree / "train"
    data = load(root, test_fraction=0.5)
    assert data.train_labels.tolist() == data.test_labels.tolist() == [0] * 3 + [1] * 3
    both = torch.cat([data.train_images, data.test_images])
    assert len({tuple(image[:, 0, 0].tolist()) for image in both}) == 12
    chosen = [load(root, test_fraction=0.5, seed=seed).test_images for seed in (0, 1)]
    assert torch.equal(chosen[0], data.test_images)
    assert not torch.equal(chosen[1], data.test_images)
    with pytest.raises(ConfigurationError, match=r"for both training and test with test_fraction=1;"):
        load(root, test_fraction=1)
    with pytest.raises(ConfigurationError, match=r"holds train/; leave test_fraction out"):
        load(tree, test_fraction=0.5)
    with pytest.raises(
        ConfigurationError,
        match=r"no image for both training and test with test_fraction=0.01; expected <class>",
    ):
        load(root, test_fraction=0.01)
