"""Orientation and depth of image files: what is seen is what is trained on."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import Cityscapes, ImageDomains, ImageFolder, StreamedImages
from fl_lightning.datamodules.image_files import ImageFiles, converted, read_image
from tests.support.colour_folders import load
from tests.support.street_scenes import write_scenes

SCENE = (np.add.outer(np.arange(8) * 20, np.arange(8) * 11) % 256).astype(np.uint8)
SCENE[:3, :2] = 255
TURNS = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.T,
    6: lambda x: np.rot90(x, 1),
    7: lambda x: x[::-1, ::-1].T,
    8: lambda x: np.rot90(x, -1),
}
"""How a camera stores an image that is to be turned by the tag's value, for each value."""


def exif(tag):
    settings = Image.Exif()
    settings[0x0112] = tag
    return settings


def in_class_folders(root, image, **settings):
    for split in ("train", "test"):
        (root / split / "ant").mkdir(parents=True, exist_ok=True)
        image.save(root / split / "ant/0.png", **settings)


def image_folder(root, image, **settings):
    in_class_folders(root, image, **settings)
    return ImageFolder(str(root), 8).load().train_images[0, 0]


def image_domains(root, image, **settings):
    in_class_folders(root / "one", image, **settings)
    return ImageDomains(str(root), 8).load().test_images[0, 0]


def streamed(root, image, **settings):
    in_class_folders(root, image, **settings)
    data = StreamedImages(str(root), 8, num_clients=1, batch_size=1, mean=(0, 0, 0), std=(1, 1, 1))
    data.setup("fit")
    return data.images.picture(
        data.images.finish((data.images.read(0)[0].resize((9, 9), 0).crop((0, 0, 8, 8)), 0))[0]
    )[:, :, 0]


def predicted(root, image, **settings):
    in_class_folders(root, image, **settings)
    known = SimpleNamespace(input_shape=(3, 8, 8), class_names=["ant"], pixel_range=None)
    return ImageFolder.new_samples(root / "test", known, True).inputs(slice(None))[0, 0]


def greyscale_prediction(root, image, **settings):
    in_class_folders(root, image, **settings)
    known = SimpleNamespace(input_shape=(1, 8, 8), class_names=["ant"], pixel_range=None)
    return ImageFolder.new_samples(root / "test", known, True).inputs(slice(None))[0, 0]


def street(root, image, **settings):
    write_scenes(root, size=(8, 8))
    image.convert("RGB").save(root / "leftImg8bit/val/lindau/lindau_000000_leftImg8bit.png", **settings)
    data = Cityscapes(str(root), batch_size=2)
    data.setup("fit")
    return data.picture(data.evaluation_images[0][0])[:, :, 0]


def mask(root, image, **settings):
    write_scenes(root, size=(8, 8))
    ids = Image.fromarray(np.asarray(image) // 8)
    ids.save(root / "gtFine/val/lindau/lindau_000000_gtFine_labelIds.png", **settings)
    data = Cityscapes(str(root), batch_size=2)
    data.setup("fit")
    return data.evaluation_images[0][1]


READERS = [image_folder, image_domains, predicted, greyscale_prediction, street, mask]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("tag", TURNS)
def test_every_reader_turns_an_image_as_its_exif_data_say(tag, reader, tmp_path):
    turned = Image.fromarray(np.ascontiguousarray(TURNS[tag](SCENE)))
    upright = reader(tmp_path / "upright", Image.fromarray(SCENE))
    assert torch.equal(reader(tmp_path / "turned", turned, exif=exif(tag)), upright)


def test_streamed_and_converted_images_are_turned(tmp_path):
    for tag, turn in TURNS.items():
        image = Image.fromarray(np.ascontiguousarray(turn(SCENE)))
        in_class_folders(tmp_path, image, exif=exif(tag))
        data = StreamedImages(str(tmp_path), 8, num_clients=1, batch_size=1)
        data.setup("fit")
        assert np.array_equal(np.asarray(data.images.read(0)[0])[:, :, 0], SCENE)
        with Image.open(tmp_path / "test/ant/0.png") as opened:  # as torchvision's data sets give it
            assert np.array_equal(np.asarray(converted(opened.convert("RGB"), "L")), SCENE)


def test_photos_that_are_stored_turned_have_the_size_and_crop_of_upright_photos(tmp_path):
    wide = np.tile(np.arange(24, dtype=np.uint8) * 10, (8, 1))
    image_folder(tmp_path / "upright", Image.fromarray(wide))
    stored = Image.fromarray(np.ascontiguousarray(np.rot90(wide, 1)))
    found = image_folder(tmp_path / "turned", stored, exif=exif(6))
    assert torch.equal(found, image_folder(tmp_path / "upright", Image.fromarray(wide)))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_leave_the_image(tmp_path):
    Image.fromarray(SCENE).save(tmp_path / "0.png", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0")
    assert np.array_equal(np.asarray(read_image(tmp_path / "0.png", "L")), SCENE)


# images of more than 8 bits


def write(root, values, kind="png", count=4, dtype=np.uint16, test=None):
    """Write training images of ``values(index)``, and the test image ``test``."""
    for split, number in (("train", count), ("test", 1)):
        (root / split / "ant").mkdir(parents=True, exist_ok=True)
        for index in range(number):
            pixels = values(index) if split == "train" or test is None else test
            Image.fromarray(np.asarray(pixels, dtype)).save(root / split / "ant" / f"{index}.{kind}")
    return root


def ramp(low, high):
    return np.linspace(low, high, 64).reshape(8, 8).round()


@pytest.mark.parametrize(
    ("low", "high", "kind", "dtype"),
    [
        (920, 1110, "png", np.uint16),
        (0, 4095, "png", np.uint16),
        (0, 65535, "png", np.uint16),
        (20_000, 20_001, "tiff", np.uint16),
        (-1024, 3071, "tiff", np.int32),
        (-5, 1_000_000, "tiff", np.int32),
        (70_000, 70_100, "tiff", np.int32),
        (900, 1100, "tiff", ">u2"),
    ],
)
def test_deep_images_keep_the_contrast_of_the_training_images(low, high, kind, dtype, tmp_path):
    half = (low + high) // 2
    values = lambda index: ramp(low, half) if index else ramp(half, high)
    test = ramp(low - 10 if low < 0 else low, high)
    data = ImageFolder(
        str(write(tmp_path, values, kind, dtype=dtype, test=test)), 8, num_clients=1, batch_size=2
    )
    data.setup("fit")
    images = data.samples.inputs[:, :, :, 0]
    scaled = lambda x: np.rint((x - low) / (high - low) * 255).clip(0, 255)
    assert images[0].tolist() == scaled(ramp(half, high)).tolist()
    assert images[1].tolist() == scaled(ramp(low, half)).tolist()
    assert images[-1].tolist() == scaled(test).tolist()
    assert tuple(data.pixel_range) == tuple(data.facts()["pixel_range"]) == (low, high)
    (said,) = [note for note in data.notes if "pixels" in note]
    assert (
        said
        == f"pixels of more than 8 bits: {low} to {high}, the range of the training images, become 0 to 255 (data.pixel_range)"
    )


@pytest.mark.parametrize("kind", [ImageFolder, StreamedImages])
def test_the_range_of_pixels_is_a_setting_and_kept_for_prediction(kind, tmp_path):
    root = write(tmp_path, lambda index: ramp(900, 1100))
    settings = {"num_clients": 1, "batch_size": 2}
    found, given = (kind(str(root), 8, **settings, **x) for x in ({}, {"pixel_range": (0, 2000)}))
    for data, (low, high) in ((found, (900, 1100)), (given, (0, 2000))):
        data.setup("fit")
        assert tuple(data.facts()["pixel_range"]) == (low, high)
        known = SimpleNamespace(**data.facts())
        (new,) = kind.new_samples(root / "test", known, True).inputs(slice(None))
        ((inputs, _),) = (
            [data._loader(data.distribution.test).dataset[0]] if kind is StreamedImages else [(None, 0)]
        )
        if kind is ImageFolder:
            assert torch.equal(new, data.samples.inputs[-1].permute(2, 0, 1))
        else:
            assert torch.equal(data.normalize(new), inputs)
        assert int(new.max()) == round((1100 - low) / (high - low) * 255) if kind is ImageFolder else True


@pytest.mark.parametrize("kind", [ImageFolder, StreamedImages])
@pytest.mark.parametrize("wrong", [(400, 100), (5, 5), (0, float("nan")), (0, float("inf")), (1, 2, 3), ()])
def test_a_range_that_is_none_is_refused(kind, wrong, tmp_path):
    write(tmp_path, lambda index: ramp(900, 1100))
    with pytest.raises(ConfigurationError, match=r"data.pixel_range must be two numbers, the smaller first"):
        kind(str(tmp_path), 8, num_clients=1, batch_size=2, pixel_range=wrong)


def test_streamed_images_are_not_read_at_the_start_if_the_range_is_set(tmp_path):
    write(tmp_path, lambda index: ramp(900, 1100))
    Path(tmp_path, "train/ant/1.png").write_bytes(b"no image")
    settings = {"num_clients": 1, "batch_size": 2}
    StreamedImages(str(tmp_path), 8, pixel_range=(900, 1100), **settings).setup("fit")
    with pytest.raises(ConfigurationError, match=r"train/ant/1.png cannot be read as an image"):
        StreamedImages(str(tmp_path), 8, **settings).setup("fit")


def test_8_bit_images_beside_deep_images_stay_as_they_are(tmp_path):
    write(tmp_path, lambda index: ramp(900, 1100))
    Image.fromarray(SCENE).save(tmp_path / "train/ant/9.png")
    assert np.array_equal(load(tmp_path).train_images[-1, 0], SCENE)


def test_constant_deep_images_are_black(tmp_path):
    assert not load(write(tmp_path, lambda index: np.full((8, 8), 700))).train_images.any()


def test_the_cache_is_that_of_the_range(tmp_path):
    root = write(tmp_path, lambda index: ramp(900, 1100))
    first = load(root).train_images.clone()
    other = load(root, pixel_range=(0, 2200)).train_images.clone()
    assert not torch.equal(first, other)
    assert torch.equal(load(root).train_images, first)


def test_the_cache_is_that_of_the_training_images(tmp_path):
    root = write(tmp_path, lambda index: ramp(900, 1000 * (index + 2)), count=3) / "train/ant"

    class Files(ImageFiles):
        num_classes = 1

        def load(self):
            samples = [(root / f"{index}.png", 0) for index in range(3)]
            return self.read(samples[: self.count], samples[self.count :])

    for count, high in ((2, 3000), (1, 2000)):  # the same files in the same order
        data = Files(str(tmp_path), 8)
        data.count = count
        data.load()
        assert list(data.pixel_range) == [900, high]


def test_a_deep_image_without_a_deep_training_image_is_refused(tmp_path):
    root = write(tmp_path, lambda index: ramp(0, 255), dtype=np.uint8)
    Image.fromarray(ramp(0, 4000).astype(np.uint16)).save(root / "test/ant/0.png")
    told = r"test/ant/0.png has pixels of more than 8 bits, but no training image gives their range; save it with 8 bits, or set data.pi"
    with pytest.raises(ConfigurationError, match=told):
        load(root)
    assert load(root, pixel_range=(0, 4000)).test_images[0, 0, -1, -1] == 255
    known = SimpleNamespace(input_shape=(3, 8, 8), class_names=["ant"], pixel_range=None)
    with pytest.raises(ConfigurationError, match=told):
        ImageFolder.new_samples(root / "test", known, True).inputs(slice(None))


def test_held_out_clients_do_not_decide_the_range(tmp_path):
    for domain, level in (("a", 900), ("b", 900), ("c", 3000)):
        write(tmp_path / "set" / domain, lambda index, level=level: ramp(level, level + 100))
    settings = {"batch_size": 2, "held_out": ["c"]}
    with pytest.raises(
        ConfigurationError,
        match=r"data.pixel_range: held-out clients must not decide it; set it to the range of the ",
    ):
        ImageDomains(str(tmp_path / "set"), 8, **settings).setup("fit")
    data = ImageDomains(str(tmp_path / "set"), 8, pixel_range=(900, 1000), **settings)
    data.setup("fit")
    assert data.samples.inputs[:8].max() == 255
    assert data.num_clients == 2


def test_a_damaged_image_is_named_as_before(tmp_path):
    write(tmp_path, lambda index: ramp(900, 1100))
    Path(tmp_path, "train/ant/1.png").write_bytes(b"no image")
    with pytest.raises(ConfigurationError, match=r"train/ant/1.png cannot be read as an image"):
        load(tmp_path)
