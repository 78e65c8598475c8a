"""Old names of the packages ``callbacks``, ``datamodules`` and ``configs`` in saved configurations."""

from fl_lightning.folders import FOLDERS

_PACKAGE = __name__.partition(".")[0]

OLD_NAMES = FOLDERS
"""Packages of ``fl_lightning`` that were once top-level packages."""


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
