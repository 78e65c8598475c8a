"""A plugin of pytest: which rows are slow, and which nightly ones run.

All rows of a parametrised test but one are slow, so that ``-m "not slow"`` runs one row of each test. Which one depends on
the test's name and on the day; ``--draw 3`` draws the rows of draw 3 again. Nightly rows are slow, and are left out but
with ``--nightly all`` or, for a tenth of them that depends on their names, ``--nightly 3/10``.
"""

import argparse
import re
from collections import defaultdict
from datetime import date
from zlib import crc32

import pytest

PARTS = 10


def parts(text):
    if text == "all":
        return list(range(PARTS))
    if found := re.fullmatch(rf"(\d)/{PARTS}", text):
        return [int(found[1])]
    raise argparse.ArgumentTypeError(f"{text!r} must be all, or a part of ten such as 0/10 or 9/10")


def pytest_addoption(parser):
    told = "nightly rows that run: all, or part K of ten (0/10 to 9/10); default: none"
    parser.addoption("--nightly", type=parts, default=[], metavar="all|K/10", help=told)
    told = "draw of the quick rows of parametrised tests; default: that of the day"
    # workers take the value of the process that starts them, also at midnight
    parser.addoption(
        "--draw", type=int, default=date.today().timetuple().tm_yday % PARTS, metavar="K", help=told
    )


def pytest_report_header(config):
    number = config.getoption("draw")
    return f"quick rows: draw {number} of {PARTS}; the same rows again: --draw {number}"


def part_of(test):
    return crc32(test.encode()) % PARTS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Choose before ``-m`` does, which sees the marks of here."""
    chosen = config.getoption("nightly")
    left_out, rows = [], defaultdict(list)
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.add_marker("slow")
            if part_of(item.nodeid) not in chosen:
                left_out.append(item)
        elif hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            rows[item.nodeid.partition("[")[0]].append(item)
    for test, of_test in rows.items():
        drawn = (crc32(test.encode()) + config.getoption("draw")) % len(of_test)
        for item in of_test[:drawn] + of_test[drawn + 1 :]:
            item.add_marker("slow")
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
