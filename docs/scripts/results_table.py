"""Print the runs below ``runs/<name>`` as rows of a table: ``python docs/scripts/results_table.py NAME ... [METRIC ...]``.

Mean and standard deviation (n - 1) over the newest finished attempt of each seed; a dash where a run has no such value. Names with
``val/`` or ``test/`` are metrics; without any they are the accuracies.
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


def row(name: str, metrics: list[str]) -> str:
    """A configuration's row."""
    results = {seed: result for seed, (_, result) in finished(name).items()}
    values = {
        key: [result[key] for result in results.values() if key in result]
        for key in (*metrics, "train_seconds")
    }
    seconds = f"{min(values['train_seconds']):.0f} to {max(values['train_seconds']):.0f}"
    cells = [name, next(iter(results.values()))["method"], ", ".join(map(str, results))]
    cells += [*(cell(values[metric]) for metric in metrics), seconds]
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str]) -> None:
    """Print one row per configuration."""
    metrics = [name for name in arguments if name.startswith(("val/", "test/"))]
    titles = metrics or ["validation", "test"]
    names = [name for name in arguments if name not in metrics]
    rows = [row(name, metrics or ["val/accuracy", "test/accuracy"]) for name in names]
    header = ["configuration", "method", "seeds", *titles, "seconds of training"]
    print("| " + " | ".join(header) + " |", "|---" * len(header) + "|", *rows, sep="\n")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("docs/scripts/results_table.py: names of folders below runs/ are needed")
    main(sys.argv[1:])
