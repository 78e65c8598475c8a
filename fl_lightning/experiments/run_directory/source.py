"""Digests of the source code that computes a run, without comments and docstrings."""

import ast
import hashlib
import inspect
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

import lightning as L
import torch

from fl_lightning.experiments.run_directory.config_digest import class_path
from fl_lightning.experiments.run_directory.directory import Config

_HOME = Path(__file__).resolve().parents[2]

_NO_NUMBERS = frozenset(
    {
        *("__init__.py", "__main__.py", "console.py", "folders.py", "yaml_file.py"),
        *("cli", "experiments", "pictures", "testing", "verification"),
    }
)
"""Files and folders of the package whose code does not affect results.

All other code is the core.
"""

_BY_USE = ("fl_lightning.callbacks.", "fl_lightning.datamodules.")
"""Prefixes of the full names of methods and data modules.

The code of a method or data module affects only runs that use it.
"""

_LIBRARIES = ("torchvision", "timm", "segmentation_models_pytorch")
_STANDARD = Path(sysconfig.get_path("stdlib"))


def provenance(config: Config) -> dict[str, str]:
    """Return digests and versions of the code that computes a run on this machine.

    Args:
        config: The resolved configuration, which may name a user's classes and functions.

    Returns:
        Digests of eight hex digits, and versions. The digest ``source`` covers the core, the model
        and the data. Each method has a separate digest under the method's full name. The versions
        are of Python, PyTorch, Lightning, and the model libraries that the configuration uses.
    """
    trainer = config.get("trainer") or {}
    entries = trainer.get("callbacks") or []
    names = _dotted_names({**config, "trainer": {**trainer, "callbacks": None}})
    files = _files(names)
    computes = {
        "source": _digest(files, _core()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": L.__version__,
    }
    methods: dict[str, dict[str, Path]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        if entry_files := _files(_dotted_names(entry)):
            path = entry["class_path"] if isinstance(entry, Mapping) else str(entry)
            methods.setdefault(path, {}).update(entry_files)
    for path, method_files in methods.items():
        files |= method_files
        computes[path] = _digest(method_files)
    names |= {name for module, path in files.items() for name in _imports(path, module)}
    roots = {name.partition(".")[0] for name in names}
    return computes | {name: version(name) for name in _LIBRARIES if name in roots and find_spec(name)}


def _digest(files: Mapping[str, Path], start: bytes = b"") -> str:
    digest = hashlib.sha256(start)
    for module in sorted(files):
        digest.update(_code(files[module]))
    return digest.hexdigest()[:8]


def _files(names: Iterable[str]) -> dict[str, Path]:
    """Return the files of the modules that define the given names, and the files that they import.

    Only the user's own files count, and the files of the methods and data modules that are used.
    If a package only re-exports a name, the file of the module that defines the name counts.
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
    """Return the file of a module of the user's, or of a method or data module, else None.

    The place of the file decides, not its name: a user may have a module ``trace``.
    """
    found = _found(module)
    path = Path(getattr(found, "__file__", None) or getattr(found, "origin", None) or "")
    if path.suffix != ".py" or not path.is_file():
        return None
    if module.partition(".")[0] == _HOME.name:
        return path if f"{module}.".startswith(_BY_USE) else None
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


@cache
def _core() -> bytes:
    digest = hashlib.sha256()
    outside = _NO_NUMBERS | {name.split(".")[1] for name in _BY_USE} | {"configs"}
    for path in sorted(
        path for path in _HOME.rglob("*.py") if path.relative_to(_HOME).parts[0] not in outside
    ):
        digest.update(str(path.relative_to(_HOME)).encode())
        digest.update(_code(path))
    return digest.digest()


def _code(path: Path) -> bytes:
    """Return the syntax tree of a Python file as bytes, without docstrings and comments."""
    return _code_of(path.read_bytes())


@cache
def _code_of(content: bytes) -> bytes:
    tree = ast.parse(content)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]
    return ast.dump(tree).encode()
