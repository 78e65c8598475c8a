"""A folder tree of images, decoded once into a file that later runs read instead."""

import fcntl
import hashlib
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image, ImageOps
from torch import Tensor

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import atomic_write, missing_folders, remove_empty, unwritable

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def list_images(folder: Path) -> list[Path]:
    """All image files below a folder, in alphabetical order; hidden files are not images."""
    return sorted(
        Path(parent, name)
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(SUFFIXES) and not name.startswith(".")
    )


def decode(path: Path, size: int) -> Image.Image:
    """Read an image as RGB; resize its shorter side to ``size`` pixels and keep the central square.

    Raises:
        ConfigurationError: The file is no image or a damaged one.
    """
    try:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigurationError(
            f"data_dir holds {path}, which cannot be read as an image ({type(error).__name__}); "
            "replace or remove it"
        ) from error
    return square(rgb, size)


def square(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side of an image to ``size`` pixels and keep the central square."""
    if image.size == (size, size):
        return image
    return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)


def cached_images(paths: Sequence[Path], root: Path, size: int, cache: Path) -> Tensor:
    """Decode images, or read them from the cache where it belongs to just these files and is intact.

    The cache belongs to the files if their paths below ``root``, sizes and modification times are the same;
    it is intact if its content has the SHA-256 that was written with it. In any other case it is built anew.
    Processes that start together wait for the first to build it.

    Args:
        paths: The image files, all below ``root``.
        root: The folder of the data set.
        size: Height and width of the result in pixels.
        cache: The cache file.

    Returns:
        uint8, shape ``[N, 3, size, size]``, in the order of ``paths``.

    Raises:
        ConfigurationError: An image cannot be read or the cache cannot be written.
    """
    fingerprint = _fingerprint(paths, root, size)
    with locked(cache):
        images = _read(cache, fingerprint)
        if images is None:
            rank_zero_info(f"Decoding {len(paths)} images of {root} into {cache}")
            images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)
            pixels = images.numpy()
            for index, path in enumerate(paths):
                pixels[index] = np.asarray(decode(path, size)).transpose(2, 0, 1)
            content = {"fingerprint": fingerprint, "sha256": _digest(images), "images": images}
            with atomic_write(cache) as file:
                torch.save(content, file)
    return images


def _fingerprint(paths: Sequence[Path], root: Path, size: int) -> str:
    digest = hashlib.sha256(f"{size}".encode())
    for path in paths:
        status = path.stat()
        digest.update(f"\0{path.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _digest(images: Tensor) -> str:
    return hashlib.sha256(images.numpy().data).hexdigest()


def _read(cache: Path, fingerprint: str) -> Tensor | None:
    try:
        content = torch.load(cache, weights_only=True)
        images: Tensor = content["images"]
        current = content["fingerprint"] == fingerprint and content["sha256"] == _digest(images)
    except (
        OSError,
        EOFError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        pickle.UnpicklingError,
    ):
        return None  # missing, cut short or no cache at all
    return images if current else None


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Let one process at a time build a file, through a lock file beside it.

    Where that fails, the lock file goes again, and so do the folders that were made for it.

    Raises:
        ConfigurationError: The folder cannot be written.
    """
    lock = cache.with_name(f".{cache.name}.lock")
    try:
        made = missing_folders(lock.parent)
        file = _locked_file(lock)
    except OSError as error:
        raise unwritable(cache, error) from error
    with file:
        try:
            yield
        except BaseException:
            lock.unlink(missing_ok=True)
            remove_empty(made)
            raise
        finally:
            fcntl.flock(
                file, fcntl.LOCK_UN
            )  # closing is not enough: a forked process may hold the file as well


def _locked_file(lock: Path) -> TextIO:
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # the process that had it failed and removed it
