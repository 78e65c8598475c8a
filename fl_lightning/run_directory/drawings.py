"""The pictures and tables of a run's directory, which are never in the way of its result."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from fl_lightning.files import atomic_write
from fl_lightning.pictures.federation import class_accuracy_figure, client_sizes_figure, partition_figure
from fl_lightning.pictures.learning_curve import learning_curve_figure
from fl_lightning.pictures.style import write_figure
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.metrics import read_metrics
from fl_lightning.run_directory.report import Report


def draw_partition(attempt: Attempt, class_names: Sequence[str] | None, title: Sequence[str]) -> None:
    """Draw ``partition.png`` from ``partition.json``: samples by client and class, or sizes where it has no classes.

    Args:
        attempt: The run's folder.
        class_names: Name of each class, None for their numbers.
        title: Lines of the title.
    """
    with _harmless(attempt.partition_picture) as path:
        record = json.loads(attempt.partition.read_text())
        if record.get("class_histogram"):
            figure = partition_figure(record["class_histogram"], class_names, title)
        else:
            figure = client_sizes_figure(record["sizes"], title)
        write_figure(path, figure)


def draw_results(attempt: Attempt, title: Sequence[str]) -> None:
    """Draw ``learning_curve.png`` from ``metrics.jsonl`` and, of a finished run, ``class_accuracy.png``.

    Args:
        attempt: The run's folder.
        title: Lines of the title.
    """
    with _harmless(attempt.learning_curve) as path:
        policy = json.loads(attempt.policy.read_text())
        write_figure(path, learning_curve_figure(read_metrics(attempt.metrics), policy, title))
    if not attempt.result.exists():
        return
    with _harmless(attempt.class_accuracy) as path:
        found = json.loads(attempt.result.read_text())["class_accuracy"]
        if found is not None:
            figure = class_accuracy_figure(found["accuracy"], found["classes"], found["split"], title)
            write_figure(path, figure)


def draw_reports(attempt: Attempt, reports: Sequence[Report], title: Sequence[str]) -> None:
    """Draw the pictures of a run's reports as ``<name>.png`` and write their tables as ``<name>.csv``.

    Args:
        attempt: The run's folder.
        reports: The callbacks that report something.
        title: Lines of the title.
    """
    rows = read_metrics(attempt.metrics) if reports else []
    for report in reports:
        with _harmless(attempt.path / f"pictures of {type(report).__name__}"):
            for name, draw in report.figures(rows).items():
                with _harmless(attempt.path / f"{name}.png") as path:
                    write_figure(path, draw(title))
        with _harmless(attempt.path / f"tables of {type(report).__name__}"):
            for name, table in report.tables().items():
                with atomic_write(attempt.path / f"{name}.csv") as file:
                    text = StringIO(newline="")
                    csv.writer(text, lineterminator="\n").writerows([table.columns, *table.rows])
                    file.write(text.getvalue().encode())


@contextmanager
def _harmless(path: Path) -> Iterator[Path]:
    """Say that a picture or table could not be made, whatever the reason, and go on: a run is more than its pictures."""
    try:
        yield path
    except Exception as error:  # noqa: BLE001  # matplotlib's, the disk's, or those of a user's own record
        print(f"{path} was not written: {type(error).__name__}: {error}", file=sys.stderr)
