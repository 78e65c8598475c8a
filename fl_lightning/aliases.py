"""Old names of the shipped packages: ``callbacks``, ``datamodules`` and ``configs`` were top-level packages.

They are imported as ``fl_lightning.callbacks`` and so on. A package of the user's with an old name wins; otherwise the old name
imports the same objects.
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
"""Packages of ``fl_lightning`` that were top-level packages."""


class _Same(Loader):
    """Loads the module of the new name under the old one.

    Args:
        module: The module.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, which exists."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the specification, which the import system has replaced by that of the old name."""
        module.__spec__ = self.spec


class _OldNames(MetaPathFinder):
    """Finds modules of old names; comes first, since in a checkout the folders themselves would be found and loaded twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the user's module of this name, otherwise the shipped one; None for all other names."""
        if fullname.partition(".")[0] not in OLD_NAMES:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        found = next((spec for spec in specs if spec is not None), None)
        if found is not None and not _is_shipped(found):
            return found
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
    """Let the old names import the shipped packages, once in a process."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())


def current_name(path: str) -> str:
    """Return the dotted path by which a class is imported now.

    Args:
        path: A dotted path, such as ``"callbacks.FixBN"`` of an old configuration.

    Returns:
        ``"fl_lightning.callbacks.FixBN"`` unless the user's own package has another one of this name; other paths unchanged.
    """
    if path.partition(".")[0] not in OLD_NAMES:
        return path
    shipped = _named(f"{_PACKAGE}.{path}")
    return f"{_PACKAGE}.{path}" if shipped is not None and _named(path) in (None, shipped) else path


def _named(path: str) -> object:
    """Return the object of a dotted path, None without one; the message if its import fails, as its user will see."""
    from pydoc import ErrorDuringImport, locate  # late: it takes half of the time to import this package

    try:
        return locate(path)
    except ErrorDuringImport as error:
        return str(error)
