"""Print the runs below ``runs/<name>`` as rows of a table: ``python docs/scripts/results_table.py NAME ...``.

Mean and standard deviation (n - 1) over the newest finished attempt of each seed; a dash where a run has no such value.
"""

import statistics
import sys

from runs import finished


def cell(values: list[float]) -> str:
    """Mean and spread of a metric over the seeds."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def row(name: str) -> str:
    """A configuration's row."""
    results = {seed: result for seed, (_, result) in finished(name).items()}
    values = {
        key: [result[key] for result in results.values() if key in result]
        for key in ("val/accuracy", "test/accuracy", "train_seconds")
    }
    seconds = f"{min(values['train_seconds']):.0f} to {max(values['train_seconds']):.0f}"
    cells = [name, next(iter(results.values()))["method"], ", ".join(map(str, results))]
    cells += [cell(values["val/accuracy"]), cell(values["test/accuracy"]), seconds]
    return "| " + " | ".join(cells) + " |"


def main(names: list[str]) -> None:
    """Print one row per configuration."""
    rows = [row(name) for name in names]
    print("| configuration | method | seeds | validation | test | seconds of training |")
    print("|---|---|---|---|---|---|")
    print(*rows, sep="\n")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("docs/scripts/results_table.py: names of folders below runs/ are needed")
    main(sys.argv[1:])
