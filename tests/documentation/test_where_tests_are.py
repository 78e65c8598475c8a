"""The test of a module bears its name, or a table of CONTRIBUTING says where it is."""

import re
from pathlib import Path

from tests import support

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fl_lightning", "callbacks", "datamodules")
ROW = re.compile(r"^\| `([\w/]+)`: (.+) \| (.+) \|$", re.MULTILINE)
NAMES = re.compile(r"`(\w+)`")


def folder_of(module):
    """The folder of a module as the table and ``tests`` have it."""
    return "/".join(part for part in module.parts[:-1] if part != FOLDERS[0]) or FOLDERS[0]


def modules():
    every = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    own = [path.relative_to(ROOT) for path in every if path == path.resolve() and path.stem != "__init__"]
    return {(folder_of(path), path.stem) for path in own}


def bears_its_name(folder, module, tests):
    """Whether a test file of the folder has the words of a module's name in its own."""
    place = "" if folder in FOLDERS[:1] else folder.removeprefix("experiments/")
    words = f"_{module.strip('_')}_"
    return any(words in f"{name}_" and path.startswith(f"{place}/" if place else "") for name, path in tests)


def test_every_module_has_a_test_of_its_name_or_stands_in_the_table():
    files = (ROOT / "tests").rglob("test_*.py")
    tests = {(path.stem, path.relative_to(ROOT / "tests").as_posix()) for path in files}
    by_name = {one for one in modules() if bears_its_name(*one, tests)}
    table = [(row[1], NAMES.findall(row[2]), NAMES.findall(row[3])) for row in ROW.finditer((ROOT / "CONTRIBUTING.md").read_text())]  # fmt: skip
    in_table = [(folder, module) for folder, names, _ in table for module in names]
    assert len(in_table) == len({*in_table})
    assert modules() - by_name == {*in_table}
    assert {name for _, _, names in table for name in names} <= {name for name, _ in tests}


def test_the_index_of_support_names_each_of_its_files():
    files = {path.stem for path in (ROOT / "tests/support").iterdir()} - {"__init__", "__pycache__"}
    assert {*re.findall(r"^    (\w+):", support.__doc__, re.MULTILINE)} == files
