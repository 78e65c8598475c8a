"""Print the size and the imports of the code: ``python docs/scripts/house.py``.

docs/architecture.md shows the printed numbers. The script finds imports in the text of the files.
It also counts imports inside functions, and imports that only type checkers read. A name that is
imported from ``fl_lightning`` counts as imported from the module that defines it.
"""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import fl_lightning

ROOT = Path(__file__).parents[2]
PACKAGES = ("fl_lightning", "callbacks", "datamodules")
"""Folders that contain code.

``callbacks`` and ``datamodules`` are imported as ``fl_lightning.callbacks`` and
``fl_lightning.datamodules``.
"""

USERS = ("cli", "experiments", "callbacks", "datamodules")
"""Parts of ``fl_lightning`` that the core never imports."""


_HOMES = {
    alias.name: f"fl_lightning.{node.module}"
    for node in ast.parse(Path(fl_lightning.__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""A dictionary from each public name of ``fl_lightning`` to the module that defines the name."""

_USERS = tuple(f"fl_lightning.{part}." for part in USERS)


def files(package: str) -> list[Path]:
    """Return the Python files of a package, sorted by path."""
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the name under which a file is imported, such as ``fl_lightning.callbacks.fbn``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fl_lightning" else ("fl_lightning", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """Return the imports of each module.

    Keys and values are names of modules of this project.
    """
    modules = {module_name(path): path for package in PACKAGES for path in files(package)}
    return {
        name: {found for target in _imported(path) if (found := _nearest(target, modules)) and found != name}
        for name, path in modules.items()
    }


def written_imports(package: str) -> dict[str, set[str]]:
    """Return, for each module of a package, every X that it imports from: ``from X import Y``."""
    return {
        module_name(path): {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        for path in files(package)
    }


def _imported(path: Path) -> Iterator[str]:
    """Yield the full names that a file imports.

    The name is ``X`` for ``import X``, and ``X.Y`` for ``from X import Y``.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "fl_lightning":
            yield from (_HOMES.get(alias.name, f"fl_lightning.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _nearest(target: str, modules: dict[str, Path]) -> str | None:
    """Return the module of ``modules`` that contains a full name. Return None if there is none."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the import circles.

    An import circle is a group of modules or packages. Each member of the group imports every other
    member, directly or through further members.
    """
    reached = {node: _reached(node, arrows) for node in arrows}
    groups = {tuple(sorted(other for other in reached[node] if node in reached[other])) for node in arrows}
    return [list(group) for group in sorted(groups) if group]


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for node in arrows[waiting.pop()] - found:
            found.add(node)
            waiting.append(node)
    return found


def room(module: str) -> str:
    """Return the package that contains a module.

    It is a direct child of ``fl_lightning``. Inside ``experiments`` it is a direct child of
    ``experiments``.
    """
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["experiments"] else 2])


def rooms(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between packages. :func:`room` gives the package of each module.

    Imports of ``fl_lightning`` itself are left out, because it imports its public names only when
    they are first used.
    """
    found: dict[str, set[str]] = {room(module): set() for module in arrows}
    for module, targets in arrows.items():
        found[room(module)] |= {room(target) for target in targets} - {room(module), "fl_lightning"}
    return found


def backward(arrows: dict[str, set[str]]) -> list[str]:
    """Return the imports that are not allowed, as texts ``"importer -> imported"``.

    A part in ``USERS`` may be imported only by its own modules, by ``cli`` and by ``__main__``. The
    printed table calls all other imports of such a part "arrows back".
    """
    found = []
    for module, targets in arrows.items():
        part = module.split(".")[1:2]
        if part and part[0] not in ("cli", "__main__"):
            found += [
                f"{module} -> {x}"
                for x in sorted(targets)
                if x.split(".")[1:2] != part and x.startswith(_USERS)
            ]
    return found


def figures() -> dict[str, str]:
    """Return the printed numbers. The keys are their descriptions."""
    arrows = imports()
    lengths = {path: len(path.read_text().splitlines()) for path in files("fl_lightning")}
    longest = max(lengths, key=lengths.__getitem__)
    top = {path.relative_to(ROOT / "fl_lightning").parts[0] for path in lengths} - {"__init__.py"}
    return {
        "modules and packages at the top of fl_lightning": str(len(top)),
        "files of fl_lightning": str(len(lengths)),
        "lines of fl_lightning": f"{sum(lengths.values()):,}",
        "longest file": f"{lengths[longest]} ({longest.relative_to(ROOT)})",
        "median file": f"{statistics.median(lengths.values()):g}",
        "import circles of files": str(len(circles(arrows))),
        "import circles of packages": str(len(circles(rooms(arrows)))),
        "arrows back": str(len(backward(arrows))),
    }


def main() -> None:
    """Print the table of numbers. Then print one line for each import circle and arrow back."""
    arrows = imports()
    print("| | |\n|---|---|")
    print(*(f"| {what} | {number} |" for what, number in figures().items()), sep="\n")
    for group in (*circles(arrows), *circles(rooms(arrows)), *([one] for one in backward(arrows))):
        print("\n" + ", ".join(group))


if __name__ == "__main__":
    main()
