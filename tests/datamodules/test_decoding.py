"""Images of every mode become the same 8-bit RGB, whoever reads them."""

import numpy as np
import pytest
from PIL import Image

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import Cityscapes, ImageDomains, ImageFolder, TinyImageNet
from fl_lightning.datamodules.image_files import converted, read_image
from tests.support.street_scenes import write_scenes

GREY = np.add.outer(np.arange(8), np.arange(8)).astype(np.uint8) * 17
"""8 bits, 0 to 238."""
COLOUR = np.stack([GREY, 255 - GREY, GREY.T // 2], 2)


def palette():
    image = Image.fromarray(GREY).convert("P")
    image.info["transparency"] = bytes(range(256))
    return image


def transparent():
    return Image.fromarray(np.dstack([COLOUR, GREY]))


MODES = {
    "grey": (lambda: Image.fromarray(GREY), "png"),
    "16 bits": (lambda: Image.fromarray(GREY.astype(np.uint16) * 257), "png"),
    "16 bits, big-endian": (lambda: Image.fromarray((GREY.astype(np.uint16) * 257).astype(">u2")), "tiff"),
    "32 bits": (lambda: Image.fromarray(GREY.astype(np.int32) * 257), "tiff"),
    "CMYK": (lambda: Image.fromarray(COLOUR).convert("CMYK"), "tiff"),
    "palette with transparency": (palette, "png"),
    "RGBA": (transparent, "png"),
    "grey with alpha": (lambda: Image.merge("LA", [Image.fromarray(GREY)] * 2), "png"),
    "black and white": (lambda: Image.fromarray(GREY > 100), "png"),
}
COLOURED = ("CMYK", "RGBA")


def expected(mode):
    if mode == "black and white":
        return np.stack([(GREY > 100).astype(np.uint8) * 255] * 3, 2)
    return COLOUR if mode in COLOURED else np.stack([GREY] * 3, 2)


def in_class_folders(root, image, kind):
    for split in ("train", "test"):
        (root / split / "ant").mkdir(parents=True)
        image.save(root / split / "ant" / f"0.{kind}", kind)


def image_folder(root, image, kind):
    in_class_folders(root, image, kind)
    return ImageFolder(str(root), 8, pixel_range=(0, 65535)).load().train_images[0]


def image_domains(root, image, kind):
    in_class_folders(root / "one", image, kind)
    return ImageDomains(str(root), 8, pixel_range=(0, 65535)).load().test_images[0]


def tiny_imagenet(root, image, kind):
    for folder in ("train/n01/images", "val/images"):
        (root / folder).mkdir(parents=True)
        image.save(root / folder / f"0.{kind}", kind)
    (root / "val/val_annotations.txt").write_text(f"0.{kind}\tn01\t0\t0\t1\t1\n")
    return TinyImageNet(str(root), 8, pixel_range=(0, 65535)).load().test_images[0]


def cityscapes(root, image, kind):
    write_scenes(root, size=(8, 8))
    image.save(root / "leftImg8bit/val/lindau/lindau_000000_leftImg8bit.png", kind)
    data = Cityscapes(str(root), batch_size=2)
    data.setup("fit")
    return data.picture(data.evaluation_images[0][0]).permute(2, 0, 1)


@pytest.mark.parametrize("reader", [image_folder, image_domains, tiny_imagenet, cityscapes])
@pytest.mark.parametrize("mode", MODES)
def test_every_reader_makes_8_bit_rgb_of_every_mode(mode, reader, tmp_path):
    make, kind = MODES[mode]
    found = reader(tmp_path / "data", make(), kind)
    assert found.permute(1, 2, 0).tolist() == expected(mode).tolist()


def test_floating_point_pixels_are_refused(tmp_path):
    Image.fromarray(GREY.astype(np.float32) / 255).save(tmp_path / "0.tiff")
    with pytest.raises(ConfigurationError, match=r"0\.tiff has floating-point pixels .* 8 or 16 bits"):
        read_image(tmp_path / "0.tiff")


def test_16_bits_are_rounded_to_8_and_32_bits_beyond_them_are_white():
    values = np.array([[0, 128, 129, 257, 385, 386, 65535]])
    eight = [[0, 0, 1, 1, 1, 2, 255]]
    assert np.asarray(converted(Image.fromarray(values.astype(np.uint16)), "L")).tolist() == eight
    beyond = np.array([[-5, 70000]], dtype=np.int32)
    assert np.asarray(converted(Image.fromarray(beyond), "L")).tolist() == [[0, 255]]
