"""Digests of a run's data, for checkpoints. Equal data have equal digests in every process."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, strided, uint8
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from fl_lightning.randomness import seeded

LARGE = 2**30
"""Size of a data set's files in bytes, above which their contents are not read for a digest."""


def digest(*parts: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of tensors, arrays, images, numbers and text.

    An argument may also be a tree of such objects. For objects of other types, only the class name
    is hashed.
    """
    state = hashlib.sha256()
    for part in parts:
        _feed(state, part)
    return state.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the digest of a file's content, cached until the file changes."""
    status = path.stat()
    return _file_digest(path.resolve(), status.st_size, status.st_mtime_ns)


@cache
def _file_digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _feed(state: Any, part: Any) -> None:
    if isinstance(part, Tensor):
        state.update(f"{part.dtype}{list(part.shape)}".encode())
        part = part.detach().cpu().to_dense() if part.layout != strided else part.detach().cpu()
        state.update(part.contiguous().flatten().view(uint8).numpy())
    elif hasattr(part, "__array_interface__") and np.asarray(part).dtype != object:  # arrays and images
        array = np.asarray(part)
        state.update(f"{array.dtype}{array.shape}".encode())
        state.update(array.tobytes())
    elif isinstance(part, Mapping):
        _feed(state, list(part.items()))
    elif isinstance(part, list | tuple | np.ndarray):
        if all(isinstance(item, int | float | str) for item in part):
            state.update(repr(list(part)).encode())
            return
        state.update(f"{len(part)} parts".encode())
        for item in part:
            _feed(state, item)
    else:
        known = isinstance(part, int | float | str | bytes | None)
        state.update(repr(part).encode() if known else type(part).__name__.encode())


def dataset_digest(dataset: Any, known: dict[int, str]) -> str:
    """Return the digest of a data set.

    For a ``TensorDataset``, the tensors are hashed. For any other data set, the digest includes:

    - Its length.
    - Its labels: the attribute ``targets`` or ``labels``.
    - Paths and contents of its files. The paths come from the pairs (path, class) in the attribute
      ``samples``, as in torchvision, or from the attribute ``files``.
    - Eight samples, but only for the first 32 data sets.

    Args:
        dataset: The data set.
        known: Digests of data sets that have already been read, keyed by ``id()``. A data set that
            several clients share is therefore read only once.
    """
    if id(dataset) not in known:
        known[id(dataset)] = digest(_parts(dataset, known))
    return known[id(dataset)]


def _parts(dataset: Any, known: dict[int, str]) -> list[Any]:
    if isinstance(dataset, TensorDataset):
        return list(dataset.tensors)
    if isinstance(dataset, Subset):
        return [dataset_digest(dataset.dataset, known), list(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        return [dataset_digest(part, known) for part in dataset.datasets]
    size = len(dataset) if hasattr(dataset, "__len__") else None
    labels = [getattr(dataset, name, None) for name in ("targets", "labels")]
    items = None
    if size and not isinstance(dataset, IterableDataset) and len(known) < 32:
        indices = np.linspace(0, size - 1, 8).astype(int).tolist()
        items = sample(lambda: [dataset[index] for index in indices])
    return [size, labels, _files(dataset), items]


def _files(dataset: Any) -> str | None:
    files = getattr(dataset, "files", None)
    pairs, root = getattr(dataset, "samples", None), Path(str(getattr(dataset, "root", "")))
    if files is None and isinstance(pairs, list) and all(isinstance(pair, tuple) and pair for pair in pairs):
        files = [Path(part) for pair in pairs for part in pair if isinstance(part, str | Path)]
    return files_digest([x for x in files if x.is_file()], root) if isinstance(files, list) else None


def files_digest(files: Sequence[Path], root: Path) -> str:
    """Return the digest of files: their paths below ``root``, and their contents.

    If the files have more than :data:`LARGE` bytes in total, their sizes stand for their contents.
    """
    names = [str(x.relative_to(root)) if x.is_relative_to(root) else x.name for x in files]
    sizes = [path.stat().st_size for path in files]
    contents = map(file_digest, files) if sum(sizes) <= LARGE else sizes
    return digest(list(zip(names, contents, strict=True)))


def sample(read: Callable[[], Any]) -> str | None:
    """Read samples twice with the same seed. Return their digest.

    If the two reads differ, return None.
    """

    def once() -> str:
        with seeded(0):
            return digest(read())

    first = once()
    return first if first == once() else None
