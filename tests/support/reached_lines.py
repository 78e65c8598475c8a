"""A plugin of pytest for ``tests/mutants.py``: each line that coverage records belongs to the test that runs it.

At the end, the file that the variable ``REACHED_LINES`` names has the name, the CPU seconds and the rows (quick or slow)
of each test that passes.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest


def switch(test):
    import coverage  # not above: the tests run without it

    if (measured := coverage.Coverage.current()) is not None:
        measured.switch_context(test)


# in other processes that a test starts, coverage's settings name the test by the same variable
os.register_at_fork(after_in_child=lambda: switch(os.environ.get("PYTEST_CURRENT_TEST", "")))


def pytest_configure(config):
    config.pluginmanager.register(Reached(), "reached_lines_of_tests")


class Reached:
    """In a worker, the test that runs; where results are printed, all tests that pass."""

    def __init__(self):
        self.seconds, self.rows, self.failed = Counter(), {}, set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        switch(nodeid)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += getattr(report, "cpu_seconds", 0.0)
        self.rows[report.nodeid] = "slow" if "slow" in report.keywords else "quick"
        self.failed |= {report.nodeid} if report.failed or report.skipped else set()

    def pytest_sessionfinish(self, session):
        if not hasattr(session.config, "workerinput"):
            passed = [
                (test, round(seconds, 3), self.rows[test])
                for test, seconds in self.seconds.items()
                if test not in self.failed
            ]
            Path(os.environ["REACHED_LINES"]).write_text(json.dumps(passed))
