"""The README and the pages below ``docs/``, as their reader has them."""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = {str(path.relative_to(ROOT)): path for path in (README, *sorted((ROOT / "docs").glob("*.md")))}
"""The pages with code to run, by their path from the root."""

BENCHMARKS = ROOT / "benchmarks" / "README.md"
WRITTEN = {str(path.relative_to(ROOT)): path for path in (*sorted(ROOT.glob("*.md")), BENCHMARKS)} | PAGES
"""Everything that is written in Markdown for a reader."""

METHODS = "docs/own-method.md"
METHOD_PAGES = (METHODS, *(name for name in PAGES if name.startswith("docs/method-")))
"""The pages on methods of one's own. The later ones may extend classes of the first."""

OURS = ".venv/bin/python -m fl_lightning "


def blocks(name, language):
    """The code blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGES[name].read_text(), re.DOTALL)


def methods_of(name):
    """Return the ``methods.py`` of a reader: the Python blocks of the README and of a page that run and test nothing."""
    pages = ["README.md", *([METHODS] if name in METHOD_PAGES else []), name]
    written = [block for each in dict.fromkeys(pages) for block in blocks(each, "python")]
    runs = ("trainer.fit", ".write_", "Run(", "def test_")
    return "\n\n".join(block for block in written if not any(word in block for word in runs))


def take_examples(monkeypatch):
    """Copy the examples into the working directory, from where a run reads and imports them."""
    shutil.copytree(ROOT / "examples", "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        monkeypatch.delitem(sys.modules, name)


def commands(name):
    """The shell commands of a page, each once; of a loop the first pass."""
    found = []
    for block in blocks(name, "bash"):
        values = {}
        for line in map(str.strip, block.splitlines()):
            if loop := re.fullmatch(r"for (\w+) in (\S+).*; do", line):
                values[loop[1]] = loop[2]
            elif line != "done":
                found += re.sub(r"\$(\w+)", lambda match: values[match[1]], line).split(" && ")  # noqa: B023
    return list(dict.fromkeys(found))


def looped_configurations(name):
    """Every configuration that a page's loops name."""
    loops = re.findall(r"for (\w+) in ([\w ]+); do\n(.*?)\ndone", "\n".join(blocks(name, "bash")), re.DOTALL)
    return [
        path.replace(f"${variable}", value)
        for variable, values, body in loops
        for value in values.split()
        for path in re.findall(r"configs/[\w$]+\.yaml", body)
    ]
