"""Image files: which files they are, and their pixels in 8 bits, square and of one size."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from fl_lightning.errors import ConfigurationError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def is_image(name: str) -> bool:
    """Whether a file is an image by its name; hidden files are not."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def image_names(folder: Path) -> Iterator[str]:
    """All image files below a folder, as paths relative to it; hidden files are not images, links are followed.

    Raises:
        ConfigurationError: A link leads back to a folder that it lies in.
    """
    for parent, _, names in os.walk(folder, followlinks=True):
        if os.path.islink(parent) and (here := Path(parent)).parent.resolve().is_relative_to(here.resolve()):
            raise ConfigurationError(
                f"data_dir holds {here}, a link to the folder {here.resolve()} that it lies in; remove it"
            )
        place = "" if parent == str(folder) else os.path.relpath(parent, folder)
        yield from (os.path.join(place, name) for name in names if is_image(name))


def list_images(folder: Path) -> list[Path]:
    """The paths of :func:`image_names`, in alphabetical order."""
    return [folder / name for name in sorted(image_names(folder), key=lambda name: name.split(os.sep))]


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, in alphabetical order, none where there is no such folder; hidden ones do not count."""
    if not folder.is_dir():
        return []
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def converted(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """An image in 8 bits, ``"RGB"`` or ``"L"``: of 16 bits 65535 becomes 255, transparency is left out."""
    if image.mode.startswith("I"):
        values = np.asarray(image).clip(0, 65535) / 257
        image = Image.fromarray(np.rint(values).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # what Pillow advises
    return image.convert(mode)


def read_image(file: Path | BinaryIO, mode: str | None = "RGB", name: str | None = None) -> Image.Image:
    """Read an image as :func:`converted`, or as it is where ``mode`` is None.

    Args:
        file: Its path, or the open file.
        mode: ``"RGB"``, ``"L"`` or None.
        name: What an open file is called in messages.

    Raises:
        ConfigurationError: The file is no image or a damaged one, or its pixels are floating-point numbers.
    """
    try:
        with Image.open(file) as image:
            if image.mode == "F":
                raise ConfigurationError(
                    f"data: {name or file} has floating-point pixels, of which nobody knows what is white; save it with 8 or 16 bits"
                )
            return image.copy() if mode is None else converted(image, mode)
    except ConfigurationError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigurationError(
            f"data: {name or file} cannot be read as an image ({type(error).__name__}); replace or remove it"
        ) from error


def decode(path: Path, size: int) -> Image.Image:
    """Read an image as RGB, and make it :func:`square`."""
    return square(read_image(path), size)


def square(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side of an image to ``size`` pixels and keep the central square."""
    if image.size == (size, size):
        return image
    return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
