"""Print the runs below ``runs/<name>`` as rows of a table: ``python docs/results_table.py NAME ...``.

Mean and standard deviation (n - 1) over the newest finished attempt of each seed.
"""

import json
import re
import statistics
import sys
from pathlib import Path


def finished(name: str) -> dict[int, dict]:
    """The result of the newest finished attempt of each seed."""
    results = sorted(Path("runs", name).glob("*/result.json"), key=lambda path: path.stat().st_mtime)
    return {int(re.search(r"-s(\d+)", path.parent.name)[1]): json.loads(path.read_text()) for path in results}


def cell(values: list[float]) -> str:
    """Mean and spread of a metric over the seeds."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def main(names: list[str]) -> None:
    """Print one row per configuration."""
    print("| configuration | method | seeds | validation | test | seconds of training |")
    print("|---|---|---|---|---|---|")
    for name in names:
        results = finished(name)
        values = {
            key: [result[key] for _, result in sorted(results.items())]
            for key in ("val/accuracy", "test/accuracy", "train_seconds")
        }
        seconds = f"{min(values['train_seconds']):.0f} to {max(values['train_seconds']):.0f}"
        cells = [name, next(iter(results.values()))["method"], ", ".join(map(str, sorted(results)))]
        cells += [cell(values["val/accuracy"]), cell(values["test/accuracy"]), seconds]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
