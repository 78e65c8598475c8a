"""Files that are replaced as a whole or not at all."""

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fl_lightning.errors import ConfigurationError


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write a file so that a reader, at any moment and after any crash, finds the old or the new content.

    A temporary file beside the target (the system's temporary folder may be another file system) is written,
    synced and renamed, then the folder is synced. Its name is fixed: the next write removes what a killed process
    left, or what leads elsewhere, and makes it anew.

    Args:
        path: The target; missing folders are created.

    Raises:
        ConfigurationError: The file cannot be written: a full disk, a folder without permission.
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
        with suppress(OSError):  # it has its name by now, or nowhere to be
            temporary.unlink()


def unwritable(path: Path, error: OSError) -> ConfigurationError:
    """The message for a file that the system refuses to write."""
    return ConfigurationError(
        f"{path} cannot be written: {error.strerror}; free space or choose another folder"
    )


def no_link(path: str, flags: int) -> int:
    """Open a file, as the ``opener`` of ``open``, but no link in its place: that of a stranger's folder may lead to any file.

    Raises:
        ConfigurationError: There is a link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigurationError(
            f"{path} is a link to {os.readlink(path)}, and links are not written through; remove the link"
        ) from error


def user_path(setting: str, text: str | os.PathLike[str]) -> Path:
    """The path that a user gave; ``~`` is a home.

    Raises:
        ConfigurationError: It is empty or a URL, has a NUL character or is in the home of an unknown user.
    """
    path = os.path.expanduser(text)
    if not path or "\0" in path or "://" in path or path.startswith("~"):
        raise ConfigurationError(
            f"{setting}: {str(text)!r} is no path of a local or mounted file system; give another path"
        )
    return Path(path)


def user_file(setting: str, text: str | os.PathLike[str]) -> Path:
    """The path of a file to write that a user gave.

    Raises:
        ConfigurationError: A folder is there, or :func:`user_path` refuses the path.
    """
    path = user_path(setting, text)
    if path.is_dir():
        raise ConfigurationError(f"{setting}: {text} is a folder; give a file in it")
    return path


def folder_below(root: str | os.PathLike[str], name: str) -> Path:
    """A folder by its name below another one, ``~`` being the user's home.

    Raises:
        ConfigurationError: The name leads out of the other folder, or cannot be typed.
    """
    if not name.isprintable() or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigurationError(f"name: {name!r} is no folder below run_root {root}; use one such as mine")
    return user_path("run_root", root) / name


def missing_folders(path: Path) -> list[Path]:
    """A folder and those around it, from the inside out, as far as they do not exist."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders that are empty, in the given order."""
    for folder in folders:
        with suppress(OSError):  # something is in it, or it is gone
            folder.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically (see :func:`~fl_lightning.files.atomic_write`)."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically (see :func:`~fl_lightning.files.atomic_write`)."""
    with atomic_write(path) as file:
        file.write(content)


def write_json(path: Path, obj: Any) -> None:
    """Write an object as indented JSON, atomically (see :func:`~fl_lightning.files.atomic_write`); NaN and infinities as strings."""
    write_text(path, json.dumps(plain(obj), indent=2, allow_nan=False) + "\n")


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """A value, or a tree of them, as JSON can hold it: tensors as numbers, non-finite floats as strings."""
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
    """The value that :func:`plain` was given, tensors aside."""
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
