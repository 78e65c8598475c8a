"""What has computed a run: the source of what decides its numbers, without comments and docstrings."""

import ast
import hashlib
import platform
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch

_HOME = Path(__file__).parents[3]
_COMPUTING = (
    *(
        "aggregation",
        "attacks",
        "batch_norm",
        "client_data",
        "cohort",
        "diagnostics",
        "execution",
        "methods",
    ),
    *("models", "optimizers", "round", "randomness.py", "ranks.py", "experiments/run_directory/result.py"),
)
"""What of the package decides the numbers of a run; the rest starts, shows, stores or checks runs."""


_LIBRARIES = ("torchvision", "timm", "segmentation_models_pytorch")

_NOT_OWN = frozenset({"fl_lightning", "callbacks", "datamodules", *sys.stdlib_module_names})


def provenance(config: Any) -> dict[str, str]:
    """What computes a run here and now: the ``source`` as eight hex digits, and the versions of Python, PyTorch and Lightning.

    If the configuration names libraries of models, their versions are included.

    Args:
        config: The resolved configuration, whose classes and functions may be a user's own.
    """
    paths = _dotted_names(config)
    digest, own = hashlib.sha256(_shipped_source()), sorted(_files(paths))
    for path in own:
        digest.update(_code(path))
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": L.__version__,
    }
    named = (*paths, *(name for path in own for name in _imports(path, path.stem)))
    roots = {name.partition(".")[0] for name in named}
    versions |= {name: version(name) for name in _LIBRARIES if name in roots and find_spec(name)}
    return {"source": digest.hexdigest()[:8], **versions}


def own_files(config: Any) -> set[Path]:
    """The files of the classes and functions that a configuration names, and of what they import, that no installed package holds."""
    return _files(_dotted_names(config))


def _files(names: Iterable[str]) -> set[Path]:
    found: set[Path] = set()
    waiting = [_module(name) for name in names if name.partition(".")[0] not in _NOT_OWN]
    while waiting:
        module = waiting.pop()
        if module and module.partition(".")[0] not in _NOT_OWN:
            origin = _origin(module)
            path = Path(origin)
            if (
                origin.endswith(".py")
                and "site-packages" not in origin
                and path.is_file()
                and path not in found
            ):
                found.add(path)
                waiting += _imports(path, module)
    return found


def _module(name: str) -> str:
    """The module of a class or function, which may lie in classes: the longest part of its name that is one."""
    module = name.rpartition(".")[0]
    while module and not _origin(module):
        module = module.rpartition(".")[0]
    return module


def _imports(path: Path, module: str) -> Iterator[str]:
    """The modules that a module imports anywhere, by their whole names; some may be functions of one."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, (around, node.module)))
            yield from (source, *(f"{source}.{one.name}" for one in node.names))


def _origin(module: str) -> str:
    """The file of a module, empty where it has none: a notebook's, or a class in which another one is."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None) or ""
    try:
        return getattr(find_spec(module), "origin", None) or ""
    except ImportError:
        return ""


def _dotted_names(tree: Any) -> set[str]:
    """Whatever may be the path of a class or a function, also of one in a function: a loss is one without ``class_path``."""
    found, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            if "." in node:
                found.add(node)
        elif isinstance(node, dict):
            waiting += [x for x in node.values() if isinstance(x, str | dict | list)]
        elif isinstance(node, list):
            waiting += node
    return {name for name in found if all(part.isidentifier() for part in name.partition(".<")[0].split("."))}


@cache
def _shipped_source() -> bytes:
    roots = [
        *(_HOME / "fl_lightning" / name for name in _COMPUTING),
        _HOME / "callbacks",
        _HOME / "datamodules",
    ]
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(str(path.relative_to(_HOME)).encode())
            digest.update(_code(path))
    return digest.digest()


def _code(path: Path) -> bytes:
    """A file's syntax tree without docstrings: comments and layout are not in it."""
    tree = ast.parse(path.read_bytes())
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
