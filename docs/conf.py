"""Settings of Sphinx for the HTML pages: ``python -m sphinx -W -n -b html docs build/docs``."""

import re
import sys
from importlib import import_module
from os.path import relpath
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
HOME = ROOT / "fl_lightning"
sys.path[:0] = [str(ROOT)]

import fl_lightning  # of this checkout, even if another one is installed

project = "fl_lightning"
author = "The fl_lightning authors"
version = release = fl_lightning.__version__
html_theme = "furo"
html_title = f"fl_lightning {release}"
html_show_copyright = False
exclude_patterns = ["scripts"]

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
myst_heading_anchors = 4
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_inherit_docstrings = False  # docstrings of Lightning and torch refer to pages of theirs
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

nitpicky = True
nitpick_ignore_regex = [
    # other projects' objects: links to them would need a download of their inventories
    (
        r"py:.*",
        r"(torch|torchvision|torchmetrics|lightning|jsonargparse|pydantic|typing_extensions|matplotlib|numpy|PIL|wandb|rich|ray|submitit|yaml|pandas)\..*",
    ),
    (
        r"py:class",
        r"Figure|Axes|Axis|Connection|Workspace",
    ),  # of matplotlib, multiprocessing and W&B, imported only for type checkers
    (r"py:class", r"dict\[\w+"),  # Sphinx splits a quoted annotation at its comma
    (r"py:class", r".*\.(Key|Item|Mapped)"),  # type variables
    (
        r"py:.*",
        r"(abc|argparse|collections|contextlib|enum|inspect|logging|multiprocessing|os|pathlib|random|signal|types|weakref)\..*",
    ),
]

OUTSIDE = {"README.md": "index", "benchmarks/README.md": "outside/benchmarks"}
OUTSIDE |= {f"{name}.md": f"outside/{name.lower()}" for name in ("CONTRIBUTING", "CHANGELOG")}
"""Pages outside of this folder, with their names in the HTML pages."""


def pages(app: Sphinx) -> None:
    """Write the generated pages. Git ignores them.

    Each package gets a page. Each Markdown file outside of ``docs`` gets an empty page, which
    :func:`read` fills.
    """
    docs = Path(app.srcdir)
    for old in (path for path in (docs / "reference").glob("*.md") if path.stem != "index"):
        old.unlink()
    tops = {path.parent for path in HOME.rglob("*/__init__.py")} - {HOME / "configs"}
    for folder in (*sorted(tops | {HOME / "callbacks/observers"}), ROOT / "benchmarks"):
        package = ".".join(folder.relative_to(ROOT).parts)
        modules = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__"))
        text = f"# {package}\n\n" + _automodule(package, "no-members")
        text += "".join(f"## {name}\n\n" + _automodule(f"{package}.{name}") for name in modules)
        _write(docs / "reference" / f"{package}.md", text)
    singles = sorted(path.stem for path in (ROOT / "fl_lightning").glob("[a-z]*.py"))
    _write(
        docs / "reference" / "ground.md",
        "# Modules of fl_lightning\n\n"
        + "".join(f"## {name}\n\n" + _automodule(f"fl_lightning.{name}") for name in singles),
    )
    for name in OUTSIDE.values():
        if name != "index":
            _write(docs / f"{name}.md", "# outside\n")


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Insert the text of pages outside of this folder, and adapt links to the places of the HTML pages."""
    outside = {page: path for path, page in OUTSIDE.items()}
    text, place = source[0], (Path(app.srcdir) / docname).parent
    if docname == "reference/index":
        names = (
            f"- {{py:obj}}`~{getattr(fl_lightning, name).__module__}.{name}`" for name in fl_lightning.__all__
        )
        made = sorted(path.stem for path in place.glob("*.md") if path.stem != "index")
        made.sort(key=lambda name: not name.startswith("fl_lightning"))
        packages = [
            import_module(f"fl_lightning.{path.parent.name}") for path in sorted(HOME.glob("*/__init__.py"))
        ]
        exports = [
            f"- `{one.__name__}`: {', '.join(f'`{name}`' for name in one.__all__)}"
            for one in packages
            if hasattr(one, "__all__")
        ]
        text = (
            text.replace("STABLE", "\n".join(exports))
            .replace("EXPORTS", "\n".join(names))
            .replace("PACKAGES", "\n".join(made))
        )
    if docname in outside:
        place = (ROOT / outside[docname]).parent
        # the words of index.md are for readers in the repository
        contents = text[text.index("```") :] if docname == "index" else ""
        text = (ROOT / outside[docname]).read_text() + "\n" + contents

    def moved(match: re.Match[str]) -> str:
        target = (place / match[2]).resolve()
        inside = OUTSIDE.get(str(target.relative_to(ROOT)))
        target = Path(app.srcdir) / f"{inside}.md" if inside else target
        return f"{match[1]}{relpath(target, (Path(app.srcdir) / docname).parent)}{match[3]}"

    source[0] = re.sub(r"(\]\()(?!\w+:)([\w./-]+)((?:#[\w-]+)?\))", moved, text)


def untyped(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undo napoleon's parsing of the words before a colon as a type; types are in the code."""
    for kind, text in (("type", ""), ("rtype", ":returns: ")):
        taken = [line for line in lines if line.startswith(f":{kind}: ")]
        if taken:
            words = taken[0].removeprefix(f":{kind}: ")
            first = next(
                number for number, line in enumerate(lines) if line.startswith(text) and line not in taken
            )
            lines[first] = f"{text}{words}: {lines[first].removeprefix(text)}"
            lines[:] = [line for line in lines if line not in taken]


def setup(app: Sphinx) -> None:
    """Connect :func:`pages`, :func:`read` and :func:`untyped` to the events of Sphinx."""
    app.connect("builder-inited", pages)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", untyped, priority=600)  # after napoleon


def _automodule(name: str, *options: str) -> str:
    lines = [f".. automodule:: {name}", *(f"   :{option}:" for option in options)]
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```\n\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
