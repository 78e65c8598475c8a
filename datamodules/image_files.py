"""Data sets of image files, decoded once and cached as tensors on disk."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fl_lightning.client_data.new_samples import NewSamples
from fl_lightning.datamodules.class_folders import Sample
from fl_lightning.datamodules.image_cache import cached_tensors
from fl_lightning.datamodules.images import ImageData
from fl_lightning.datamodules.in_memory import InMemoryDataModule
from fl_lightning.datamodules.new_images import new_images
from fl_lightning.errors import ConfigurationError, check_at_least

FULL = (0.0, 65535.0)
"""Values of 16 bits."""


def checked_range(pixels: Sequence[float] | None) -> Sequence[float] | None:
    """Return the setting ``pixel_range``.

    Raises:
        ConfigurationError: The setting is no pair of finite numbers, of which the first is smaller.
    """
    if pixels is not None and not (len(pixels) == 2 and -inf < pixels[0] < pixels[1] < inf):
        raise ConfigurationError(
            f"data.pixel_range must be two numbers, the smaller first, such as [0, 4095], found {list(pixels)}"
        )
    return pixels


def converted(image: Image.Image, mode: str = "RGB", pixels: Sequence[float] = FULL) -> Image.Image:
    """Convert an image to 8 bits and mode ``"RGB"`` or ``"L"`` (greyscale), and turn it upright.

    The orientation comes from the image's EXIF data. Transparency is discarded.

    Args:
        image: The image.
        mode: Mode of the result.
        pixels: Values of images of more than 8 bits that become 0 and 255.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        low, high = pixels
        values = (np.asarray(image, np.float64) - low) / ((high - low) or 1) * 255
        image = Image.fromarray(np.rint(values.clip(0, 255)).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # as Pillow advises for palettes with transparency
    return image.convert(mode)


@contextmanager
def _opened(file: Path | BinaryIO, name: str | None) -> Iterator[Image.Image]:
    try:
        with Image.open(file) as image:
            if image.mode == "F":
                raise ConfigurationError(
                    f"data: {name or file} has floating-point pixels of unknown range; save it with 8 or 16 bits"
                )
            yield image
    except ConfigurationError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigurationError(
            f"data: {name or file} cannot be read as an image ({type(error).__name__}); replace or remove it"
        ) from error


def read_image(
    file: Path | BinaryIO,
    mode: str | None = "RGB",
    name: str | None = None,
    pixels: Sequence[float] | None = None,
) -> Image.Image:
    """Read an image in 8 bits, upright as its EXIF data say.

    Args:
        file: Path of the image, or an open file.
        mode: Mode of the result, ``"RGB"`` or ``"L"``. None: no conversion.
        name: Name of the file in messages. Default: ``file``.
        pixels: See :func:`converted`. None: images of more than 8 bits are refused.

    Raises:
        ConfigurationError: The file is not an image, is damaged, has floating-point pixels, or has
            more than 8 bits without ``pixels``.
    """
    with _opened(file, name) as image:
        if mode is None:
            return ImageOps.exif_transpose(image)
        if image.mode.startswith("I") and pixels is None:
            raise ConfigurationError(
                f"data: {name or file} has pixels of more than 8 bits, but no training image gives their range; save it with 8 bits, "
                "or set data.pixel_range"
            )
        return converted(image, mode, pixels or FULL)


def value_range(files: Iterable[tuple[Path | BinaryIO, str | None]]) -> list[float]:
    """Return the smallest and the largest value in images of more than 8 bits; [] if there are none.

    Args:
        files: Files of images, and their names in messages.
    """
    values = list[float]()
    for file, name in files:
        with _opened(file, name) as image:
            if image.mode.startswith("I"):
                pixels = np.asarray(image)
                values += [float(pixels.min()), float(pixels.max())]
    return [min(values), max(values)] if values else []


def decode(
    file: Path | BinaryIO, size: int, name: str | None = None, pixels: Sequence[float] | None = None
) -> Image.Image:
    """Read an image with :func:`read_image` as RGB and resize it with :func:`square`."""
    return square(read_image(file, name=name, pixels=pixels), size)


def square(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side of an image to ``size`` pixels and crop the central square."""
    if image.size == (size, size):
        return image
    return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)


def stacked(images: Iterable[Image.Image], count: int, channels: int, size: int) -> Tensor:
    """Return square images as uint8 ``[count, channels, size, size]``."""
    stack = torch.empty(count, channels, size, size, dtype=torch.uint8)
    pixels = stack.numpy()
    for index, image in enumerate(images):
        pixels[index] = np.asarray(image).reshape(size, size, channels).transpose(2, 0, 1)
    return stack


class ImageFiles(InMemoryDataModule):
    """Base class of data sets of image files.

    A subclass sets ``num_classes`` and calls :meth:`read` in ``load()``. Images are turned upright as
    their EXIF data say, and converted to RGB with 8 bits. Of colours with 16 bits, only the upper 8
    bits are read. The shorter side of an image is resized to ``image_size``, and the centre is
    cropped. The decoded images are cached on disk. Every start checks whether the cache still fits
    the files. Images are normalised by the mean and standard deviation of the training images.

    Args:
        data_dir: The folder of the files.
        image_size: Height and width of the images in pixels.
        cache_dir: Folder of the decoded images. None: ``data/cache``.
        pixel_range: Values of images of more than 8 bits that become 0 and 255, such as [0, 4095].
            Values beyond them also become 0 or 255. Default: the smallest and the largest value of
            the training images. If these have 8 bits, other images of more bits are refused. With
            ``held_out``, there is no default.
        **settings: Settings of :class:`~fl_lightning.datamodules.in_memory.InMemoryDataModule`.

    Raises:
        ConfigurationError: A setting is out of its range. In ``setup``: an image cannot be read.
    """

    in_channels = 3
    image_size: int
    _paths: Sequence[str] = ()  # path of each sample below data_dir

    def __init__(
        self,
        data_dir: str,
        image_size: int,
        *,
        cache_dir: str | None = None,
        pixel_range: tuple[float, float] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_at_least(1, image_size=image_size)
        self.pixel_range = checked_range(pixel_range)
        self.data_dir, self.image_size = Path(data_dir).expanduser(), image_size
        self.cache_dir = Path("data/cache" if cache_dir is None else cache_dir).expanduser()

    @classmethod
    def new_samples(cls, path: Path, known: Any, labelled: bool) -> NewSamples:
        """Read a folder of new images. For targets, it needs a folder for each class."""
        channels, size, _ = known.input_shape

        def read(file: Path) -> Tensor:
            image = square(read_image(file, "L" if channels == 1 else "RGB", pixels=known.pixel_range), size)
            return stacked([image], 1, channels, size)[0]

        return new_images(path, known.class_names, labelled, read)

    def cache_file(self, kind: str) -> Path:
        """Return the path of the cache.

        Args:
            kind: Part of the file name. It must differ between caches with different settings.
        """
        place = hashlib.sha256(str(self.data_dir.resolve()).encode()).hexdigest()[:8]
        return self.cache_dir / f"{self.data_dir.resolve().name}-{kind}-{place}.pt"

    def _identified(self, samples: Tensor) -> dict[str, Sequence[str | int]]:
        return (
            {"file": [self._paths[x] for x in samples.tolist()]}
            if self._paths
            else super()._identified(samples)
        )

    def read(
        self,
        train: Sequence[Sample],
        test: Sequence[Sample],
        train_groups: Sequence[int] | None = None,
        test_groups: Sequence[int] | None = None,
        group_names: Sequence[str] = (),
        subjects: Sequence[str] = (),
    ) -> ImageData:
        """Read images, from the cache if it is valid.

        Args:
            train: Training images, files below ``data_dir``.
            test: Test images, files below ``data_dir``.
            train_groups: Group of each training image. None: no groups.
            test_groups: Group of each test image. None: all groups share the test images.
            group_names: Names of the groups 0, 1, ...
            subjects: Subject of each training image, then of each test image, such as a column of
                a CSV. Empty: each image is a subject.

        Raises:
            ConfigurationError: An image cannot be read.
        """
        size, count = self.image_size, len(train)
        paths = [path for path, _ in (*train, *test)]
        self._paths = [path.relative_to(self.data_dir).as_posix() for path in paths]

        def decoded() -> dict[str, Tensor]:
            pixels = self.pixel_range or value_range((path, None) for path in paths[:count])
            images = (decode(path, size, pixels=pixels or None) for path in paths)
            return {"images": stacked(images, len(paths), 3, size), "pixels": torch.tensor(pixels)}

        settings = f"{count} {self.pixel_range}"
        tensors = cached_tensors(paths, self.data_dir, self.cache_file(f"{size}px"), decoded, settings)
        images = tensors["images"]
        self.use_range(tensors["pixels"].tolist())
        labels = torch.tensor([label for _, label in (*train, *test)])
        groups, of_test = (None if g is None else torch.tensor(g) for g in (train_groups, test_groups))
        parts = images[:count], labels[:count], images[count:], labels[count:]
        return ImageData(*parts, groups, of_test, group_names, subjects)
