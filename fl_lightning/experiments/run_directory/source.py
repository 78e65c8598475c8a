"""Versions of the code that computes a run: of this package, of libraries, and of the user's own files."""

import ast
import hashlib
import inspect
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

import lightning as L
import torch

from fl_lightning import __version__
from fl_lightning.experiments.run_directory.config_digest import class_path
from fl_lightning.experiments.run_directory.directory import Config

_HOME = Path(__file__).resolve().parents[2]
_FOLDERS = ("fl_lightning", "callbacks", "datamodules")
_LIBRARIES = ("torchvision", "timm", "segmentation_models_pytorch")
_STANDARD = Path(sysconfig.get_path("stdlib"))


def provenance(config: Config) -> dict[str, str]:
    """Return versions of the code that computes a run on this machine.

    Args:
        config: The resolved configuration, which may name a user's classes and functions.

    Returns:
        Versions by name. ``fl_lightning`` also has a digest of a checkout's committed code and, after
        ``+``, of changes that are not committed. Each module of the user's own that the configuration
        names or that such a module imports has a digest of its file, under the module's full name.
        All digests have eight hex digits.
    """
    return {
        "fl_lightning": _package(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": L.__version__,
        **{name: version(name) for name in _LIBRARIES if find_spec(name)},
        **{module: _digest(path.read_bytes()) for module, path in _files(_dotted_names(config)).items()},
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


@cache
def _package() -> str:
    """Return the version of this package; in a git checkout also digests of its code."""
    try:
        committed = _git("rev-parse", *(f"HEAD:./{folder}" for folder in _FOLDERS))
        changed = _git("diff", "HEAD", "--", *_FOLDERS)
        new = _git("ls-files", "-z", "--others", "--exclude-standard", "--", *_FOLDERS).split(b"\0")[:-1]
        added = b"".join(name + (_HOME.parent / os.fsdecode(name)).read_bytes() for name in new)
    except (OSError, subprocess.SubprocessError):
        return __version__
    more = f"+{_digest(changed + added)}" if changed or added else ""
    return f"{__version__} {_digest(committed)}{more}"


def _git(*arguments: str) -> bytes:
    command = ["git", "--no-optional-locks", "-C", str(_HOME.parent), *arguments]
    return subprocess.run(command, capture_output=True, timeout=10, check=True).stdout


def _files(names: Iterable[str]) -> dict[str, Path]:
    """Return the files of the modules that define the given names, and the files that they import.

    Only the user's own files count. If a package only re-exports a name, the file of the module that defines the name counts.
    """
    files: dict[str, Path] = {}
    waiting, seen = [*names], set[str]()
    while waiting:
        if (name := waiting.pop()) in seen:
            continue
        seen.add(name)
        module = _home(name)
        path = _file(module)
        if path is not None and module not in files:
            files[module] = path
            waiting += _imports(path, module)
    return files


def _home(name: str) -> str:
    """Return the module that defines the object with this full name.

    This function imports nothing, because a module may be a script.
    """
    module, *rest = name.split(".")
    while rest and module in sys.modules and _found(f"{module}.{rest[0]}"):
        module = f"{module}.{rest.pop(0)}"
    made = getattr(sys.modules.get(module), rest[0], None) if rest else None
    return made.__module__ if isinstance(made, type) or inspect.isfunction(made) else module


def _found(module: str) -> Any:
    with suppress(ImportError):
        return sys.modules.get(module) or find_spec(module)


def _file(module: str) -> Path | None:
    """Return the file of a module of the user's own, else None.

    The place of the file decides, not its name: a user may have a module ``trace``.
    """
    found = _found(module)
    path = Path(getattr(found, "__file__", None) or getattr(found, "origin", None) or "")
    if path.suffix != ".py" or not path.is_file():
        return None
    if module.partition(".")[0] == _HOME.name:
        return None
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return None if is_installed or path.is_relative_to(_STANDARD) else path


def _imports(path: Path, module: str) -> tuple[str, ...]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _imports_of(path.read_bytes(), package)


@cache
def _imports_of(content: bytes, package: str) -> tuple[str, ...]:
    """Return the full names of all imported modules and objects, also inside functions."""
    names: list[str] = []
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # a script has no package; it may try a relative import before another
            around = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = [part for part in (around, node.module) if part]
            names += (".".join([*source, alias.name]) for alias in node.names)
    return tuple(names)


def _dotted_names(tree: Any) -> set[str]:
    """Return all strings in a configuration that may be the name of a class or function."""
    names, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        with suppress(ErrorDuringImport):  # the error is reported when the run is built
            locate(class_path(node))  # import the module, so that it is known where the class is defined
        if isinstance(node, str) and "." in node and all(part.isidentifier() for part in node.split(".")):
            names.add(node)
        elif isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return names
