"""Which rows are quick, slow and nightly, and the tenth of the nightly ones that a run is given."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"

TESTS = """\
import pytest

def test_quick():
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.parametrize("row", "abcd")
def test_rows(row):
    pass

@pytest.mark.nightly
@pytest.mark.parametrize("row", range(40))
def test_nightly(row):
    pass

@pytest.mark.parametrize("row", [0, *(pytest.param(row, marks=pytest.mark.nightly) for row in range(1, 40))])
def test_one_stays(row):
    pass
"""


@pytest.fixture
def collected(tmp_path):
    """Collect the tests above, and return their names."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  nightly\n")
    (tmp_path / "test_them.py").write_text(TESTS)

    def run(*options):
        options = "-q", "--collect-only", "--strict-markers", "-p", "chosen_rows", *options
        environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return re.findall(r"(?m)^test_them\.py::(\S+)$", done.stdout), done.stderr

    return run


@pytest.mark.slow
def test_the_tenths_of_the_nightly_rows_are_all_of_them_and_none_runs_unasked(collected):
    usual, _ = collected()
    assert usual == ["test_quick", "test_slow", *(f"test_rows[{row}]" for row in "abcd"), "test_one_stays[0]"]
    whole, _ = collected("--nightly", "all")
    assert len(whole) == len(usual) + 40 + 39
    some = [set(collected("--nightly", f"{part}/10")[0]) - set(usual) for part in range(3)]
    assert all(0 < len(part) < 25 for part in some)
    assert len(some[0] | some[1] | some[2]) == sum(map(len, some))
    assert some[0] <= set(whole)


def test_quick_rows_are_one_of_each_test_and_never_nightly_ones(collected):
    quick, _ = collected("-m", "not slow", "--nightly", "all")
    assert [test.partition("[")[0] for test in quick] == ["test_quick", "test_rows", "test_one_stays"]


def test_the_draw_of_quick_rows_changes_and_can_be_repeated(collected):
    draws = [collected("-m", "not slow", "--draw", number)[0] for number in "0123"]
    assert sorted(row for _, row, _ in draws) == [f"test_rows[{row}]" for row in "abcd"]
    assert collected("-m", "not slow", "--draw", "2")[0] == draws[2]


@pytest.mark.parametrize("text", ["10/10", "3", "3/9", "none"])
def test_a_part_that_is_none_is_refused(collected, text):
    tests, error = collected("--nightly", text)
    assert not tests
    assert "must be all, or a part of ten such as 0/10 or 9/10" in error
