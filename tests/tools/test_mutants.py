"""The script of mutants, on a checkout with one function in each of two rooms."""

import json
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "mutants.py"
SUPPORT = SCRIPT.with_name("support")
mutants = SimpleNamespace(**run_path(str(SCRIPT)))

CHECKOUT = {
    "pyproject.toml": f"""\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "fl_lightning"
version = "0"
[tool.setuptools]
packages = ["fl_lightning"]
[tool.pytest.ini_options]
markers = ["slow", "nightly"]
pythonpath = ["{SUPPORT}"]
""",
    "tests/conftest.py": """\
import os
pytest_plugins = ["chosen_rows", "cpu_seconds", *(["reached_lines"] if "REACHED_LINES" in os.environ else [])]
""",
    "fl_lightning/__init__.py": "",
    "fl_lightning/__main__.py": "def main(number):\n    return number + 1\nprint(main(2))\n",
    "fl_lightning/aggregation/means.py": "def unseen(number):\n    return number * 2\n",
    "fl_lightning/ranks.py": "def in_a_fork(number):\n    return number * 3\n",
    "fl_lightning/cohort/rows.py": "def seen_by_slow(number):\n    return number > 2\n",
    "tests/aggregation/test_sums.py": """\
import fl_lightning.aggregation.means as means
def test_runs_it():
    means.unseen(2)
""",
    "tests/ranks/test_forks.py": """\
import os
from fl_lightning.ranks import in_a_fork
def test_nothing():
    pass
def test_a_fork():
    child = os.fork()
    if child == 0:
        os._exit(in_a_fork(2))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
""",
    "tests/cohort/test_rows.py": """\
import pytest
from fl_lightning.cohort.rows import seen_by_slow
@pytest.mark.slow
def test_rows():
    assert (seen_by_slow(2), seen_by_slow(3)) == (False, True)
def test_fails_always():
    assert False
""",
    "tests/cli/test_main.py": """\
import os, subprocess, sys
def test_a_process_of_its_own(tmp_path):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "fl_lightning"]
    printed = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True).stdout
    assert printed == "3\\n"
""",
}


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    for name, text in CHECKOUT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    commit(folder, "init", "--quiet")
    return folder


def commit(folder, *before):
    who = "-c", "user.name=a", "-c", "user.email=a@b"
    for words in (before or ("status",), ("add", "-A"), (*who, "commit", "--quiet", "-m", "all")):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def script(*words):
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def outcomes(path):
    found = json.loads(path.read_text())["mutants"].values()
    return {
        mutant["function"]: (mutant["outcome"], mutant.get("rows"), mutant.get("test")) for mutant in found
    }


@pytest.mark.slow
def test_the_draw_is_that_of_the_seed_with_one_mutant_a_function_and_as_many_in_each_room():
    code = SCRIPT.parents[1]
    drawn = mutants.draw(code, 45, seed=0)
    assert drawn == mutants.draw(code, 45, seed=0) != mutants.draw(code, 45, seed=1)
    functions = [(mutant["file"], mutant["function"]) for mutant in drawn.values()]
    assert len(functions) == len(set(functions)) == 45
    for name in mutants.ROOMS:
        assert sum(mutant["room"] == name for mutant in drawn.values()) == 5
    assert all(mutants.place_of(mutant, code) for mutant in drawn.values())


def test_every_room_has_code():
    for place in [place for room in mutants.ROOMS.values() for place in room]:
        assert (SCRIPT.parents[1] / place).exists()


@pytest.mark.slow
def test_mutants_are_given_to_the_tests_that_run_their_line_and_are_found_again_elsewhere(checkout, tmp_path):
    file, after, copy = tmp_path / "mutants.json", tmp_path / "after.json", tmp_path / "copy"
    places = "--code", checkout, "--copy", copy
    assert script("draw", file, "--code", checkout).returncode == 0
    measured = script("reach", file, *places, "--jobs", "0")
    assert measured.returncode == 0, measured.stderr
    reached = mutants.Reached(**json.loads(file.with_suffix(".reached.json").read_text()))
    tests = {
        mutant["function"]: [reached.tests[number][0] for number in reached.of_mutant[name]]
        for name, mutant in json.loads(file.read_text())["mutants"].items()
    }
    started, fork = (
        "tests/cli/test_main.py::test_a_process_of_its_own",
        "tests/ranks/test_forks.py::test_a_fork",
    )
    rows, sums = "tests/cohort/test_rows.py::test_rows", "tests/aggregation/test_sums.py::test_runs_it"
    assert tests == {"main": [started], "in_a_fork": [fork], "unseen": [sums], "seen_by_slow": [rows]}

    first = script("run", file, *places, "--preload", "pytest")
    assert first.returncode == 0, first.stderr
    killed = {"main": ("killed", "quick", started), "in_a_fork": ("killed", "quick", fork)}
    survived = "survived", "slow", ""
    assert outcomes(file) == killed | {"unseen": survived, "seen_by_slow": ("killed", "slow", rows)}
    assert script("run", file, *places, "--preload", "pytest").stdout == ""  # none is judged again
    assert "| all | 4 | 2 | 1 | 0 | 1 | 0 |" in script("table", file).stdout

    (checkout / "fl_lightning/cohort/rows.py").rename(checkout / "fl_lightning/cohort/others.py")
    (checkout / "tests/cohort/test_rows.py").unlink()
    (checkout / "tests/aggregation/test_sums.py").write_text(
        "from fl_lightning.aggregation.means import unseen\ndef test_runs_it():\n    unseen(2)\n"
        "def test_it():\n    assert unseen(2) == 4\n    assert unseen(3) == 6\n"
    )
    commit(checkout)
    compared = script("compare", file, after, *places, "--preload", "pytest")
    assert compared.returncode == 1, compared.stderr
    assert "no longer killed" in compared.stdout
    found = "killed", "slow", "tests/aggregation/test_sums.py::test_it"
    assert outcomes(after) == killed | {"unseen": found, "seen_by_slow": survived}
    assert subprocess.run(["git", "diff", "--quiet"], cwd=copy, check=False).returncode == 0
