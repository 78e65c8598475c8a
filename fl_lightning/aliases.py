"""Old names of the packages ``callbacks``, ``datamodules`` and ``configs``.

These packages were once top-level and are now in ``fl_lightning``. ``import callbacks`` gives the
same objects as ``import fl_lightning.callbacks``, unless the user has a package ``callbacks``.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]

OLD_NAMES = ("callbacks", "datamodules", "configs")
"""Packages of ``fl_lightning`` that were once top-level packages."""


class _Same(Loader):
    """Module loader that returns an already loaded module."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which the import system has replaced."""
        module.__spec__ = self.spec


class _OldNames(MetaPathFinder):
    """Module finder that imports a package of ``fl_lightning`` by its old name.

    The finder is the first in ``sys.meta_path``. In a checkout, Python's own finder would otherwise
    load the package a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module with an old name; None for any other name.

        The user's own module takes precedence over the shipped module.
        """
        if fullname.partition(".")[0] not in OLD_NAMES:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and not _is_shipped(spec):
            return spec
        try:
            module = import_module(f"{_PACKAGE}.{fullname}")
        except ModuleNotFoundError as error:
            if error.name == f"{_PACKAGE}.{fullname}":
                return None
            raise
        return spec_from_loader(fullname, _Same(module))


def _is_shipped(spec: ModuleSpec) -> bool:
    home = Path(__file__).with_name(spec.name.partition(".")[0]).resolve()
    return spec.origin is not None and home in Path(spec.origin).resolve().parents


def install() -> None:
    """Install the finder of old names, unless it is already installed."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())


def current_name(path: str) -> str:
    """Return the current dotted path of a class that may have an old name.

    Args:
        path: A dotted path, such as ``"callbacks.FixBN"`` of an old configuration.

    Returns:
        The path in ``fl_lightning``, such as ``"fl_lightning.callbacks.FixBN"``. If no shipped
        class has this old name, or if the user has a class at this path, ``path`` is returned
        unchanged.
    """
    if path.partition(".")[0] not in OLD_NAMES:
        return path
    shipped = _named(f"{_PACKAGE}.{path}")
    return f"{_PACKAGE}.{path}" if shipped is not None and _named(path) in (None, shipped) else path


def _named(path: str) -> object:
    """Return the object at a dotted path, or None if there is no such object.

    If the import of the object fails, return the error message.
    """
    # imported late, because pydoc is slow
    from pydoc import ErrorDuringImport, locate

    try:
        return locate(path)
    except ErrorDuringImport as error:
        return str(error)
