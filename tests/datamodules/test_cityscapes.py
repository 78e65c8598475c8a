"""Cityscapes' layout: who the clients are, which label counts, what augmentation does, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import Cityscapes
from fl_lightning.datamodules.streamed import augmentation
from tests.support.street_scenes import IDS, scene, write_scenes


@pytest.fixture
def root(tmp_path):
    return write_scenes(tmp_path / "city")


def made(root, **settings):
    data = Cityscapes(str(root), **{"batch_size": 2, **settings})
    data.setup("fit")
    return data


def test_each_city_is_a_client_and_val_is_the_evaluation(root):
    data = made(root)
    assert data.client_names == ["aachen", "bochum", "ulm"]
    assert [data.num_examples(client) for client in range(3)] == [5, 4, 4]
    assert len(data.test_dataloader().dataset) == 3
    assert data.describe_partition() == "3 cities, one client each"
    assert data.partition_record()["clients"] == data.client_names
    data = made(root, evaluation_cities=["bochum"])
    assert data.client_names == ["aachen", "ulm"]
    assert len(data.test_dataloader().dataset) == 4


def test_what_was_loaded_is_told_by_names_and_sizes_whatever_the_seed(root):
    before = made(root).loaded
    assert before == made(root, seed=1, horizontal_flip=True).loaded
    (root / "leftImg8bit/train/ulm/ulm_000001_leftImg8bit.png").write_bytes(b"")
    assert before != made(root).loaded


def test_images_are_normalised_and_label_ids_become_the_19_classes(root):
    image, labels = made(root).test_dataloader().dataset[0]
    expected, ids = scene(np.random.default_rng(3), (16, 24))
    torch.testing.assert_close(image, torch.from_numpy(expected).permute(2, 0, 1) / 255 * 2 - 1)
    classes = {7: 0, 11: 2, 23: 10, 26: 13, 0: 255}
    assert labels.tolist() == [[classes[value] for value in line] for line in ids.tolist()]
    assert set(classes) == set(IDS)
    assert made(root).picture(image).numpy().tolist() == expected.tolist()


def test_all_19_classes_are_those_of_the_authors(root):
    data = made(root)
    table = data.test_dataloader().dataset.labels
    ids = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    assert table[ids].tolist() == list(range(19))
    others = sorted({*range(34), 255} - set(ids))
    assert table[others].tolist() == [255] * len(others)
    assert (data.class_names[0], data.class_names[13], data.class_names[18]) == ("road", "car", "bicycle")


def test_resized_masks_have_no_labels_between_two(root):
    image, labels = made(root, image_size=(7, 11)).test_dataloader().dataset[0]
    assert (image.shape, labels.shape) == ((3, 7, 11), (7, 11))
    assert set(labels.unique().tolist()) <= {0, 2, 10, 13, 255}


def test_augmentation_moves_image_and_mask_together():
    augment = augmentation((20, 20), (0.5, 1.5), True, 0.0)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(24), indexing="ij")
    pattern = (40 + 2 * rows + 3 * columns).to(torch.uint8)
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        image, mask = augment(tv_tensors.Image(pattern.expand(3, -1, -1)), tv_tensors.Mask(pattern))
        assert (image.shape, mask.shape) == ((3, 20, 20), (20, 20))
        inside = mask < 255
        near = (image[0].float() - mask.float()).abs()[inside]
        assert near.max() <= 8  # the nearest pixel beside a mean of neighbours
        assert not image[:, ~inside].any()
        assert mask.min() >= 40  # what pads a mask is no label
        seen.add(tuple(mask.flatten()[::37].tolist()))
    assert len(seen) == 20


@pytest.mark.parametrize("size", [(90, 120), (120, 90), (90, 90)])
def test_images_of_any_shape_are_scaled_by_the_given_factors(size):
    pixels = torch.zeros(3, *size, dtype=torch.uint8)
    augment = augmentation(None, (0.75, 1.5), False, 0.0)
    factors = []
    for _ in range(60):
        image, mask = augment(tv_tensors.Image(pixels), tv_tensors.Mask(pixels[0]))
        assert image.shape[1:] == mask.shape
        height, width = (found / given for found, given in zip(image.shape[1:], size, strict=True))
        assert height == pytest.approx(width, abs=0.01)
        factors.append(height)
    assert 0.74 < min(factors) < 0.85
    assert 1.35 < max(factors) < 1.51


def test_an_image_of_the_split_file_cannot_be_evaluation_data(root, tmp_path):
    x = [f"train/ulm/ulm_{n:06}_leftImg8bit.png" for n in range(2)]
    user = {"x": x, "y": [name.replace("leftImg8bit", "gtFine_labelIds") for name in x]}
    split = tmp_path / "all_data_0.json"
    split.write_text(json.dumps({"users": ["ulm0"], "num_samples": [2], "user_data": {"ulm0": user}}))
    with pytest.raises(
        ConfigurationError, match=r"^split_file: .*ulm_000000_.* is also evaluation data; leave it out"
    ):
        made(root, split_file=str(split), evaluation_cities=["ulm"])


def test_batches_are_functions_of_seed_client_and_step(root):
    settings = {"crop_size": (8, 8), "scale": (0.5, 1.5), "horizontal_flip": True, "color_jitter": 0.4}
    first, second, other = (made(root, seed=seed, **settings) for seed in (0, 0, 1))
    ahead = [first.cohort_batch([0, 1], [step, 0]).batches() for step in (0, 1, 5)]
    for step, (images, labels) in zip((5, 1, 0), [own[0] for own in reversed(ahead)], strict=True):
        again = second.cohort_batch([0], [step]).batches()[0]
        assert torch.equal(images, again[0])
        assert torch.equal(labels, again[1])
    assert not torch.equal(ahead[0][0][0], ahead[1][0][0])
    assert not torch.equal(ahead[0][0][0], other.cohort_batch([0], [0]).batches()[0][0])


def test_threads_change_no_batch(root):
    settings = {"crop_size": (8, 8), "scale": (0.5, 1.5), "horizontal_flip": True, "color_jitter": 0.4}
    for step in range(3):
        one, four = (made(root, threads=n, **settings).cohort_batch([0], [step]).batches()[0] for n in (1, 4))
        assert all(map(torch.equal, one, four))


def test_users_of_a_split_file_are_the_clients(root, tmp_path):
    def files(city, numbers):
        x = [f"train/{city}/{city}_{n:06}_leftImg8bit.png" for n in numbers]
        return {"x": x, "y": [name.replace("leftImg8bit", "gtFine_labelIds") for name in x]}

    users = {
        "aachen0": files("aachen", [0, 1]),
        "aachen1": files("aachen", [2, 3, 4]),
        "ulm0": files("ulm", [1, 2]),
    }
    split = tmp_path / "all_data_0.json"
    split.write_text(json.dumps({"users": list(users), "num_samples": [2, 3, 2], "user_data": users}))
    data = made(root, split_file=str(split))
    assert data.client_names == list(users)
    assert [data.num_examples(client) for client in range(3)] == [2, 3, 2]
    assert data.describe_partition() == "3 users of all_data_0.json, one client each"
    (tmp_path / "train").mkdir()
    with pytest.raises(ConfigurationError, match=r"split_file: .*train names no user"):
        made(root, split_file=str(tmp_path / "train"))
    for number, chosen in enumerate((("ulm0",), ("aachen0", "aachen1"))):
        part = {"user_data": {user: users[user] for user in chosen}}
        (tmp_path / "train" / f"all_data_{number}.json").write_text(json.dumps(part))
    folder = made(root, split_file=str(tmp_path / "train"))
    assert folder.client_names == ["ulm0", "aachen0", "aachen1"]
    assert [folder.num_examples(client) for client in range(3)] == [2, 2, 3]
    for text, error in (("{}", "KeyError"), ("[" * 100_000, "RecursionError")):
        split.write_text(text)
        with pytest.raises(
            ConfigurationError, match=rf"split_file: .*all_data_0.json cannot be read \({error}"
        ):
            made(root, split_file=str(split))
    users["ulm0"]["x"][0] = "train/ulm/none.png"
    split.write_text(json.dumps({"user_data": users}))
    with pytest.raises(ConfigurationError, match=r"train/ulm/none.png is missing"):
        made(root, split_file=str(split))


def test_a_city_smaller_than_a_batch_has_all_its_images_in_one_batch(root):
    data = made(root, batch_size=5)
    assert data.cohort_batch(range(3), [0] * 3).sizes() == [5, 4, 4]
    (note,) = data.notes
    assert note.endswith("as one batch: client 1 (bochum): 4, client 2 (ulm): 4")


def test_wrong_settings_and_layouts_are_one_line(root, tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"data_dir=.*nowhere does not exist; expected the layout leftImg8bit"
    ):
        Cityscapes(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=r"holds no leftImg8bit/train/"):
        Cityscapes(str(tmp_path))
    with pytest.raises(
        ConfigurationError, match=r"evaluation_cities: 'bern' is not a city of train; use aachen"
    ):
        made(root, evaluation_cities=["bern"])
    with pytest.raises(ConfigurationError, match=r"scale must be two factors"):
        Cityscapes(str(root), scale=(2.0, 1.0))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda image, mask: mask.unlink(), r"ulm_000001_gtFine_labelIds.png is missing"),
        (
            lambda image, mask: image.write_bytes(b"no image"),
            r"ulm_000001_leftImg8bit.png cannot be read as an image",
        ),
        (
            lambda image, mask: mask.write_bytes(mask.read_bytes()[:60]),
            r"labelIds.png cannot be read as an image",
        ),
        (
            lambda image, mask: Image.new("RGB", (24, 16)).save(mask),
            r"labelIds.png is an image of mode RGB, but a mask",
        ),
        (
            lambda image, mask: Image.new("L", (8, 8)).save(mask),
            r"labelIds.png has \[8, 8\] pixels, its image \[16, 24\]",
        ),
        (lambda image, mask: Image.new("L", (24, 16), 77).save(mask), r"labelIds.png has the label id 77"),
    ],
)
def test_a_damaged_file_is_named(root, damage, message):
    image = root / "leftImg8bit/train/ulm/ulm_000001_leftImg8bit.png"
    damage(image, root / "gtFine/train/ulm/ulm_000001_gtFine_labelIds.png")
    with pytest.raises(ConfigurationError, match=message):
        made(root, batch_size=4).cohort_batch([2], [0])


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P"])
def test_images_of_other_modes_become_rgb(root, mode):
    path = root / "leftImg8bit/val/lindau/lindau_000000_leftImg8bit.png"
    found = Image.open(path).convert(mode)
    found.save(path, "tiff" if mode == "CMYK" else "png")
    assert made(root).test_dataloader().dataset[0][0].shape == (3, 16, 24)
