"""The cache of decoded images on disk."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import atomic_write, locked, unwritable

DECODER = 5
"""Version of the decoding and of the cache's format. Another version makes every cache invalid."""


def cached_tensors(
    paths: Sequence[Path],
    root: Path,
    cache: Path,
    read: Callable[[], dict[str, Tensor]],
    settings: str = "",
) -> dict[str, Tensor]:
    """Return the tensors that ``read`` creates from files, or load them from a valid cache.

    A cache is valid until a file changes its path below ``root``, its size or its modification
    time. One process rebuilds an invalid or unreadable cache, and other processes wait.

    Args:
        paths: The files, all below ``root``.
        root: The folder of the data set.
        cache: The cache file. It is memory-mapped. Its name contains settings of ``read``.
        read: Function that reads the files and returns tensors by name.
        settings: Other settings of ``read``. Caches with different settings replace each other.

    Raises:
        ConfigurationError: A file cannot be read or the cache cannot be written.
    """
    key = _key(paths, root, f"{cache.name}\0{settings}")
    tensors = _load(cache, key)
    if tensors is not None:
        return tensors
    with building(cache):
        tensors = _load(cache, key)  # another process may have built the cache
        if tensors is None:
            rank_zero_info(f"Decoding {len(paths)} files of {root} into {cache}")
            tensors = read()
            with atomic_write(cache) as file:
                torch.save({"key": key, "tensors": tensors}, file)
    return tensors


def _key(paths: Sequence[Path], root: Path, settings: str) -> str:
    key = sha256(f"{DECODER}\0{settings}\0".encode())
    start = len(os.fspath(root)) + 1
    for path in map(os.fspath, paths):
        with suppress(OSError):
            status = os.stat(path)
            if S_ISREG(status.st_mode):
                key.update(os.fsencode(f"{path[start:]}\0{status.st_size}\0{status.st_mtime_ns}\0"))
                continue
        raise ConfigurationError(
            f"data_dir holds {path}, which is no readable file (a broken link, a pipe); remove it"
        )
    return key.hexdigest()


def _load(cache: Path, key: str) -> dict[str, Tensor] | None:
    try:
        content = torch.load(cache, weights_only=True, mmap=True)
        tensors: dict[str, Tensor] | None = content["tensors"] if content["key"] == key else None
    except Exception:  # noqa: BLE001  # torch.load does not document what a damaged file raises
        return None
    return tensors


@contextmanager
def building(target: Path) -> Iterator[None]:
    """Lock the folder of a file while the ``with`` block builds the file.

    The folder is created if it is missing.

    Raises:
        ConfigurationError: The folder cannot be created.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(target, error) from error
    with locked(target.parent.resolve(), folder=True):
        yield
