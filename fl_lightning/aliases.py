"""Aliases of packages that were once top-level: ``callbacks``, ``datamodules`` and ``configs``.

An old name imports the same objects as the new name, unless the user has a package of that name.
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
"""Packages of ``fl_lightning`` that were once top-level."""


class _Same(Loader):
    """A loader that makes a loaded module available by its old name.

    Args:
        module: The module under its new name.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the loaded module."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's specification, which the import system has just replaced."""
        module.__spec__ = self.spec


class _OldNames(MetaPathFinder):
    """A finder of old names; it comes first, as others would load a checkout's folders twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the user's module, else of the shipped one; None for other names."""
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
    """Install the finder of old names, once per process."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())


def current_name(path: str) -> str:
    """Return the current dotted path of a class.

    Args:
        path: A dotted path, such as ``"callbacks.FixBN"`` of an old configuration.

    Returns:
        The path below ``fl_lightning`` if ``path`` is the old name of a shipped class and no class
        of the user has that name; else ``path``.
    """
    if path.partition(".")[0] not in OLD_NAMES:
        return path
    shipped = _named(f"{_PACKAGE}.{path}")
    return f"{_PACKAGE}.{path}" if shipped is not None and _named(path) in (None, shipped) else path


def _named(path: str) -> object:
    """Return the object at a dotted path, None if missing, or the error message of its import."""
    from pydoc import ErrorDuringImport, locate  # late: slow to import

    try:
        return locate(path)
    except ErrorDuringImport as error:
        return str(error)
