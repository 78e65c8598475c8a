"""A plugin of pytest, ``--cpu``: CPU seconds of the tests, with the processes that they start.

A process that outlives the test that has started it counts where pytest's process waits for its end, if ever. What
several tests share (a fixture of their file, the first import of a library) counts in the first of them.
"""

from collections import Counter
from pathlib import PurePosixPath
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import pytest

SHOWN = 25


def used():
    """CPU seconds, user and system, of this process and of its children that have ended, workers among them."""
    both = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def pytest_addoption(parser):
    parser.addoption(
        "--cpu", action="store_true", help="print CPU seconds of tests, of folders, and in total"
    )


def pytest_configure(config):
    if config.getoption("cpu"):
        config.pluginmanager.register(CPUSeconds(), "cpu_seconds_of_tests")


class CPUSeconds:
    """In a worker, what its tests take; where results are printed, what those of all workers take."""

    def __init__(self):
        self.last, self.tests = used(), Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self):
        self.last = used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        """Each of the reports of setup, call and teardown takes its seconds to the process that prints."""
        report = yield
        now = used()
        report.cpu_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report):
        self.tests[report.nodeid] += getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        folders = Counter()
        for test, seconds in self.tests.items():
            folders[str(PurePosixPath(test.partition("::")[0]).parent)] += seconds
        terminalreporter.section("CPU seconds, with started processes")
        for sums, shown in ((self.tests, SHOWN), (folders, None)):
            for name, seconds in sums.most_common(shown):
                terminalreporter.write_line(f"{seconds:9.2f}  {name}")
            terminalreporter.write_line("")
        terminalreporter.write_line(f"{sum(self.tests.values()):9.2f}  {len(self.tests)} tests")
        terminalreporter.write_line(f"{used():9.2f}  with imports and collection in all processes")
