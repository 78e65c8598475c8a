"""The option ``--cpu``: CPU seconds of tests and of the processes that they start, with and without workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


TESTS = """\
import subprocess, sys, time
import pytest

BUSY = "import time; begun = time.process_time()\\nwhile time.process_time() < begun + 0.3: pass"
exec(BUSY, {})  # collection is no test

@pytest.fixture
def busy():
    exec(BUSY, {})

def test_nothing():
    time.sleep(0.3)

def test_setup(busy):
    pass

def test_child():
    subprocess.run([sys.executable, "-c", BUSY], check=True)
"""


@pytest.fixture
def printed(tmp_path):
    """Run the tests above, and return the seconds that are printed, by what they are of."""
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "test_them.py").write_text(TESTS)

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "cpu_seconds", *options]
        environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = re.findall(r"(?m)^ *(\d+\.\d\d)  (.+)$", done.stdout)
        return {name: float(seconds) for seconds, name in lines}

    return run


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_seconds_are_those_of_a_test_its_fixtures_and_the_processes_that_it_starts(printed, workers):
    seconds = printed("--cpu", *workers)
    nothing, setup, child = (
        seconds[f"inner/test_them.py::test_{name}"] for name in ("nothing", "setup", "child")
    )
    assert nothing < 0.15
    assert min(setup, child) > 0.29
    assert seconds["inner"] == pytest.approx(nothing + setup + child, abs=0.02)
    assert seconds["3 tests"] == pytest.approx(seconds["inner"], abs=0.011)
    assert seconds["with imports and collection in all processes"] > seconds["3 tests"] + 0.29


@pytest.mark.slow
def test_without_the_option_nothing_is_printed(printed):
    assert printed() == {}
