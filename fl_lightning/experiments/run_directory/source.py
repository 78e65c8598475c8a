"""Digests of the source code that computes a run, without comments and docstrings."""

import ast
import hashlib
import platform
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fl_lightning.aliases import current_name
from fl_lightning.experiments.run_directory.directory import Config

_HOME = Path(__file__).resolve().parents[2]

_NO_NUMBERS = frozenset(
    {
        *("__init__.py", "__main__.py", "aliases.py", "console.py", "folders.py", "yaml_file.py"),
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
    rest = {**config, "trainer": {name: x for name, x in trainer.items() if name != "callbacks"}}
    names = _dotted_names(rest)
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
            methods.setdefault(current_name(path), {}).update(entry_files)
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
    """Return the files that define the given names, and all files that these files import.

    Files of the core are left out.
    """
    files: dict[str, Path] = {}
    waiting = [_module(name) for name in names if _may_count(name)]
    while waiting:
        module = waiting.pop()
        if module in files or not _may_count(module):
            continue
        origin = _origin(module)
        path = Path(origin)
        is_own = "site-packages" not in origin or module.startswith(_BY_USE)
        if origin.endswith(".py") and is_own and path.is_file() and path not in files.values():
            files[module] = path
            waiting += [_home(name) for name in _imports(path, module)]
    return files


def _may_count(name: str) -> bool:
    root = name.partition(".")[0]
    return (
        name.startswith(_BY_USE)
        if root == "fl_lightning"
        else bool(root) and root not in sys.stdlib_module_names
    )


def _home(name: str) -> str:
    """Return the name of the module that defines a shipped method or data module.

    Any other name is returned unchanged.
    """
    if name.startswith(_BY_USE):
        package, _, rest = name.removeprefix("fl_lightning.").partition(".")
        exported = getattr(import_module(f"fl_lightning.{package}"), rest.partition(".")[0], None)
        return getattr(exported, "__module__", name)
    return name


def _module(name: str) -> str:
    """Return the name of the module of a class or function, given its full name."""
    module = _home(name)
    if module == name:
        module = name.rpartition(".")[0]
    while module and not _origin(module):
        module = module.rpartition(".")[0]
    return module


def _imports(path: Path, module: str) -> tuple[str, ...]:
    """Return the full names of all modules and objects that a module imports.

    Imports inside functions are included.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _imports_of(path.read_bytes(), package)


@cache
def _imports_of(content: bytes, package: str) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, (around, node.module)))
            names += (source, *(f"{source}.{alias.name}" for alias in node.names))
    return tuple(names)


def _origin(module: str) -> str:
    """Return the path of a module's file; empty if there is no such module or file."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None) or ""
    try:
        return getattr(find_spec(module), "origin", None) or ""
    except ImportError:
        return ""


def _dotted_names(tree: Any) -> set[str]:
    """Return all strings in a configuration that may be the name of a class or function."""
    names, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            if "." in node:
                names.add(current_name(node))
        elif isinstance(node, dict):
            waiting += [x for x in node.values() if isinstance(x, str | dict | list)]
        elif isinstance(node, list):
            waiting += node
    return {name for name in names if all(part.isidentifier() for part in name.partition(".<")[0].split("."))}


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
