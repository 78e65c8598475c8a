"""Folders at the top of the repository that are packages in ``fl_lightning``.

``callbacks`` is imported as ``fl_lightning.callbacks``, and so on. An installation has these folders
in the package. A checkout has symbolic links in the package, which mypy and editors follow. Some
checkouts and copies have no links; the finder of this module does not need the links.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location, spec_from_loader
from pathlib import Path
from types import ModuleType

from fl_lightning.errors import ConfigurationError

FOLDERS = ("callbacks", "datamodules", "configs")
"""Names of the folders."""

_PACKAGE = Path(__file__).resolve().parent


def folder_of(name: str) -> Path:
    """Return one of :data:`FOLDERS`.

    Raises:
        ConfigurationError: The folder is missing.
    """
    project = _PACKAGE.parent / "pyproject.toml"
    is_checkout = project.is_file() and 'name = "fl_lightning"' in project.read_text(encoding="utf-8")
    homes = (_PACKAGE, _PACKAGE.parent) if is_checkout else (_PACKAGE,)
    folder = next((home / name for home in homes if (home / name / "__init__.py").is_file()), None)
    if folder is None:
        raise ConfigurationError(
            f"fl_lightning in {_PACKAGE.parent} is incomplete: its folder {name} is missing; copy the whole repository"
        )
    return folder.resolve()


class _Same(Loader):
    """Module loader that returns an already loaded module."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which the import system has replaced."""
        module.__spec__ = self.spec


class _Finder(MetaPathFinder):
    """Module finder for :data:`FOLDERS`. It is the first finder, so that no other copy is found.

    In a checkout, ``import callbacks.fixbn`` gives the same module as
    ``import fl_lightning.callbacks.fixbn``. Otherwise Python would load the file a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in :data:`FOLDERS`; None for any other module."""
        package, _, rest = fullname.partition(".")
        if package == "fl_lightning" and rest in FOLDERS:
            folder = folder_of(rest)
            return spec_from_file_location(
                fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
        if package not in FOLDERS:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if (
            spec is None
            or spec.origin is None
            or folder_of(package) not in Path(spec.origin).resolve().parents
        ):
            return None
        return spec_from_loader(fullname, _Same(import_module(f"fl_lightning.{fullname}")))


def install() -> None:
    """Install the finder, unless it is already installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
