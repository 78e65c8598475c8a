"""Functions for files: atomic writing, locks, checks of users' paths, CSV and JSON."""

import csv
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from fl_lightning.errors import ConfigurationError
from fl_lightning.folders import folder_of


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: even after a crash, readers find either the old or the new content.

    A temporary file in the target's folder is written, synced and renamed, and the folder is
    synced. The name of the temporary file depends only on the target. The next write therefore
    removes the temporary file of a killed process.

    Args:
        path: The target; missing folders are created.

    Raises:
        ConfigurationError: The disk is full, or the folder is not writable.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):  # the temporary file is already renamed, or was never created
            temporary.unlink()


def unwritable(path: Path, error: OSError) -> ConfigurationError:
    """Return the exception to raise if a file cannot be written."""
    link = broken_link(path)
    reason = f"{link} is a link to {os.readlink(link)}, which does not exist" if link else error.strerror
    return ConfigurationError(f"{path} cannot be written: {reason}; free space or choose another folder")


def broken_link(path: Path) -> Path | None:
    """Return the link to a missing file or folder among a path and its parents; None without one."""
    return next((part for part in (path, *path.parents) if part.is_symlink() and not part.exists()), None)


@contextmanager
def locked(path: Path, *, folder: bool = False, wait: bool = True) -> Iterator[int]:
    """Lock a file or an existing folder until the block or the process ends.

    Args:
        path: The file or the folder. A missing file is created.
        folder: Whether to lock a folder (default False).
        wait: Whether to wait while another process holds the lock (default True).

    Yields:
        The file descriptor.

    Raises:
        BlockingIOError: Another process holds the lock, and ``wait`` is False.
        OSError: The path cannot be opened. A file system without locks is no error.
    """
    process = os.getpid()
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW if folder else os.O_RDWR | os.O_CREAT
    file = os.open(path, flags, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        yield file
    finally:
        if os.getpid() == process:
            with suppress(OSError):
                # not only close: processes that were started meanwhile have the file open too
                fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def unused(path: Path) -> Path:
    """Return a path at which nothing exists: ``path``, or with ``.2``, ``.3`` before the suffix."""
    others = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(2))
    return next(free for free in chain([path], others) if not free.exists())


def user_path(setting: str, text: str | os.PathLike[str]) -> Path:
    """Return a user's path, with ``~`` expanded.

    Raises:
        ConfigurationError: The path is empty, is a URL, contains NUL, has a name that is too long,
            or names an unknown user's home.
    """
    path = os.path.expanduser(text)
    if not path or "\0" in path or "://" in path or path.startswith("~"):
        raise ConfigurationError(
            f"{setting}: {str(text)!r} is no path of a local or mounted file system; give another path"
        )
    longest = max(Path(path).parts, key=lambda part: len(os.fsencode(part)), default="")
    if len(os.fsencode(longest)) > 255:
        raise ConfigurationError(
            f"{setting}: {longest[:20]}... is too long; use at most 255 bytes for a name"
        )
    return Path(path)


def shipped(path: str, folder: Path = Path()) -> Path | None:
    """Return the shipped file at a path such as ``configs/quickstart.yaml``.

    Return None if the path does not begin with ``configs/``, if the user has a file at this path,
    or if no such file is shipped.

    Args:
        path: Path of a configuration or study.
        folder: Folder to which a relative path refers (default: the working directory).
    """
    if not path.startswith("configs/") or (folder / path).exists():
        return None
    file = (folder_of("configs").parent / path).resolve()
    return file if file.is_file() else None


def user_file(setting: str, text: str | os.PathLike[str]) -> Path:
    """Return a user's path of an output file, with ``~`` expanded.

    Raises:
        ConfigurationError: The path is a folder, or :func:`user_path` raises an error.
    """
    path = user_path(setting, text)
    if path.is_dir():
        raise ConfigurationError(f"{setting}: {text} is a folder; give a file in it")
    return path


def folder_below(root: str | os.PathLike[str], name: str) -> Path:
    """Return the folder ``name`` below ``root``, with ``~`` expanded.

    Raises:
        ConfigurationError: The name leads out of ``root`` or is not printable.
    """
    if not name.isprintable() or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigurationError(
            f"name: {name!r} is no folder below run_root {root}; use a name such as mine"
        )
    return user_path("name", user_path("run_root", root) / name)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the empty folders among the given folders, in the given order."""
    for folder in folders:
        with suppress(OSError):  # the folder is not empty, or is already removed
            folder.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically (see :func:`~fl_lightning.files.atomic_write`)."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically (see :func:`~fl_lightning.files.atomic_write`)."""
    with atomic_write(path) as file:
        file.write(content)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as the text of a CSV file."""
    text = StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write_json(path: Path, obj: Any) -> None:
    """Write an object atomically as indented JSON. NaN and infinities become strings."""
    write_text(path, json.dumps(plain(obj), indent=2, allow_nan=False) + "\n")


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """Convert nested values for JSON: tensors become numbers, non-finite floats become strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def restored(value: Any) -> Any:
    """Convert the strings of non-finite floats in nested values to floats.

    The strings are ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
    """
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
