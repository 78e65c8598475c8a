"""A folder tree of images, decoded once into a file that later runs read instead."""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.datamodules.decoding import decode
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import atomic_write, missing_folders, remove_empty, unwritable

DECODER = 3
"""What the pixels of a cache were read by: 1 cut 16 bits off at 255; 2 named each file, where there is a digest now."""


def cached_images(paths: Sequence[Path], root: Path, size: int, cache: Path) -> Tensor:
    """Decode images, or read them from the cache where it belongs to just these files and is intact.

    It belongs to them if their paths below ``root``, sizes and modification times are the same; it is intact if its pixels
    have the CRC-32 that was written with them. In any other case it is built anew. Processes that start together wait for the
    first to build it.

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

    def decoded() -> dict[str, Tensor]:
        images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)
        pixels = images.numpy()
        for index, path in enumerate(paths):
            pixels[index] = np.asarray(decode(path, size)).transpose(2, 0, 1)
        return {"images": images}

    return cached_tensors(paths, root, cache, decoded)["images"]


def cached_tensors(
    paths: Sequence[Path], root: Path, cache: Path, read: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Read what files hold, or take it from the cache where it belongs to just these files and is intact.

    Args:
        paths: The files, all below ``root``.
        root: The folder of the data set.
        cache: The cache file; what is read from it lies there until it is used (it is mapped into memory).
        read: Reads the files.

    Returns:
        Tensors by name.

    Raises:
        ConfigurationError: A file cannot be read or the cache cannot be written.
    """
    files = _digest(paths, root)
    tensors = _read(cache, files)
    if tensors is not None:
        return tensors
    with building(cache):
        tensors = _read(cache, files)  # of a process that was first
        if tensors is None:
            rank_zero_info(f"Decoding {len(paths)} files of {root} into {cache}")
            tensors = read()
            with atomic_write(cache) as file:
                content = {"decoder": DECODER, "files": files, "crc32": _checksum(tensors)}
                torch.save({**content, "tensors": tensors}, file)
    return tensors


def _digest(paths: Sequence[Path], root: Path) -> str:
    """Of the files' paths below the root, sizes and modification times."""
    found, start = sha256(), len(os.fspath(root)) + 1
    for path in map(os.fspath, paths):
        with suppress(OSError):
            status = os.stat(path)
            if S_ISREG(status.st_mode):
                found.update(os.fsencode(f"{path[start:]}\0{status.st_size}\0{status.st_mtime_ns}\0"))
                continue
        raise ConfigurationError(
            f"data_dir holds {path}, which is no file that can be read (a link to nothing, a pipe); remove it"
        )
    return found.hexdigest()


def _read(cache: Path, files: str) -> dict[str, Tensor] | None:
    try:
        content = torch.load(cache, weights_only=True, mmap=True)
        tensors: dict[str, Tensor] = content["tensors"]
        current = (content["decoder"], content["files"]) == (DECODER, files)
        current = current and content["crc32"] == _checksum(tensors)
    except Exception:  # noqa: BLE001  # missing, damaged anywhere, no cache at all: torch.load has no list of what it raises
        return None
    return tensors if current else None


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    found = 0
    for name, tensor in tensors.items():
        found = crc32(tensor.numpy().data, crc32(name.encode(), found))
    return found


@contextmanager
def building(target: Path) -> Iterator[None]:
    """Let one process at a time build a file: a lock on its folder, which goes again where it is new and the building fails.

    Raises:
        ConfigurationError: The folder cannot be made.
    """
    made = missing_folders(target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(target.parent, os.O_RDONLY)
    except OSError as error:
        raise unwritable(target, error) from error
    try:
        with suppress(OSError):  # some network file systems cannot lock a folder
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    except BaseException:
        remove_empty(made)
        raise
    finally:
        os.close(folder)
