"""Print figures on size and imports for docs/architecture.md: ``python docs/scripts/house.py``.

The script reads all imports from the files, also imports in functions and imports only for type
checkers. If a name is imported from ``fl_lightning``, the import counts as one from the module that
defines the name.
"""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import fl_lightning

ROOT = Path(__file__).parents[2]
PACKAGES = ("fl_lightning", "callbacks", "datamodules")
"""Folders of code; ``callbacks`` and ``datamodules`` are imported as parts of ``fl_lightning``."""

USERS = ("cli", "experiments", "callbacks", "datamodules")
"""Parts of ``fl_lightning`` that the core never imports."""


_HOMES = {
    alias.name: f"fl_lightning.{node.module}"
    for node in ast.parse(Path(fl_lightning.__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module that defines each public name of ``fl_lightning``."""

_USERS = tuple(f"fl_lightning.{part}." for part in USERS)


def files(package: str) -> list[Path]:
    """Return the Python files of a package, sorted by path."""
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fl_lightning" else ("fl_lightning", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """Return, for each module of this project, the modules of this project that it imports."""
    modules = {module_name(path): path for package in PACKAGES for path in files(package)}
    return {
        name: {found for target in _imported(path) if (found := _nearest(target, modules)) and found != name}
        for name, path in modules.items()
    }


def written_imports(package: str) -> dict[str, set[str]]:
    """Return, for each module of a package, the X of all its imports ``from X import Y``."""
    return {
        module_name(path): {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        for path in files(package)
    }


def _imported(path: Path) -> Iterator[str]:
    """Yield the dotted name of each import of a file: ``X`` for ``import X``, else ``X.Y``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "fl_lightning":
            yield from (_HOMES.get(alias.name, f"fl_lightning.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _nearest(target: str, modules: dict[str, Path]) -> str | None:
    """Return the module that contains a dotted name; None if no module of ``modules`` does."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the import circles: groups of nodes that can all be reached from each other."""
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
    """Return the child of ``fl_lightning``, or of ``experiments``, that contains a module."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["experiments"] else 2])


def rooms(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between the packages of :func:`room`.

    Imports from ``fl_lightning`` itself are left out: its public names are imported on first use.
    """
    found: dict[str, set[str]] = {room(module): set() for module in arrows}
    for module, targets in arrows.items():
        found[room(module)] |= {room(target) for target in targets} - {room(module), "fl_lightning"}
    return found


def backward(arrows: dict[str, set[str]]) -> list[str]:
    """Return the arrows back: imports of ``USERS`` by other packages, except by ``cli``."""
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
    """Return the figures by their names."""
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
    """Print the figures as a table, then each import circle and each arrow back on a line."""
    arrows = imports()
    print("| | |\n|---|---|")
    print(*(f"| {what} | {number} |" for what, number in figures().items()), sep="\n")
    for group in (*circles(arrows), *circles(rooms(arrows)), *([one] for one in backward(arrows))):
        print("\n" + ", ".join(group))


if __name__ == "__main__":
    main()
