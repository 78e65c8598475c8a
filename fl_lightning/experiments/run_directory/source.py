"""Digests of the source code that computes a run, without comments and docstrings."""

import ast
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch

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
    names |= {name for module, path in files.items() for name in _bindings(path, module).imports}
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
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        module, path, attribute = _module_of(name)
        if path is None:
            continue
        bound = _bindings(path, module)
        home = module
        if attribute.isidentifier() and attribute not in bound.defined:
            home = bound.exports.get(attribute) or _lazy_home(module, path, attribute)
        if home != module:
            waiting.append(home)
        elif module not in files:
            files[module] = path
            waiting += bound.imports
    return files


def _module_of(name: str) -> tuple[str, Path | None, str]:
    """Split a full name into the module, the module's file and the name inside the module.

    The file is None if the name is not defined in a file that counts.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if (path := _file(module)) is not None:
            return module, path, parts[length] if length < len(parts) else ""
    return name, None, ""


def _file(module: str) -> Path | None:
    """Return the file of a module of the user's, or of a method or data module, else None.

    The place of the file decides, not its name: a user may have a module ``trace``.
    """
    spec = _spec(module) if module not in sys.modules else None
    origin = getattr(sys.modules.get(module), "__file__", None) if spec is None else spec.origin
    path = Path(origin or "")
    if path.suffix != ".py" or not path.is_file():
        return None
    if module.partition(".")[0] == _HOME.name:
        return path if f"{module}.".startswith(_BY_USE) else None
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return None if is_installed or path.is_relative_to(_STANDARD) else path


def _spec(module: str) -> ModuleSpec | None:
    """Find a module. Do not import the packages around it, because an import runs code."""
    if (parent := module.rpartition(".")[0]) == "":
        return find_spec(module)
    package = sys.modules.get(parent) or _spec(parent)
    folders = getattr(package, "__path__", None) or getattr(package, "submodule_search_locations", None)
    return PathFinder.find_spec(module, folders) if folders else None


def _lazy_home(module: str, path: Path, attribute: str) -> str:
    """Return the module that defines an object which a package imports at its first use."""
    if path.name != "__init__.py":
        return module  # do not import other modules: a script would start
    try:
        made = getattr(import_module(module), attribute, None)
    except Exception:  # noqa: BLE001  # the error is reported when the run is built
        return module
    return getattr(made, "__module__", None) or module


class _Bindings(NamedTuple):
    """Names that a module imports and defines.

    Attributes:
        imports: Full names of all imported modules and objects, also inside functions.
        exports: Full name of each imported object, by the object's name in the module.
        defined: Names that the module itself defines.
    """

    imports: tuple[str, ...]
    exports: Mapping[str, str]
    defined: frozenset[str]


def _bindings(path: Path, module: str) -> _Bindings:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _bindings_of(path.read_bytes(), package)


@cache
def _bindings_of(content: bytes, package: str) -> _Bindings:
    imports: list[str] = []
    exports: dict[str, str] = {}
    defined: set[str] = set()
    for node in ast.walk(ast.parse(content)):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            imports += (alias.name for alias in node.names)
            names += ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom):
            around = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = tuple(filter(None, (around, node.module)))
            names += ((alias.asname or alias.name, ".".join((*source, alias.name))) for alias in node.names)
            imports += (full for _, full in names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        # a name with two sources, as in try and except, counts like a name that the module defines
        defined |= {name for name, full in names if exports.setdefault(name, full) != full}
    return _Bindings(tuple(imports), exports, frozenset(defined))


def _dotted_names(tree: Any) -> set[str]:
    """Return all strings in a configuration that may be the name of a class or function."""
    names, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
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
