"""The pictures and tables of a run's directory, which are never in the way of its result."""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from fl_lightning.files import write_text
from fl_lightning.pictures.federation import class_accuracy_figure, client_sizes_figure, partition_figure
from fl_lightning.pictures.learning_curve import learning_curve_figure
from fl_lightning.pictures.style import write_figure
from fl_lightning.round.module import FederatedModule
from fl_lightning.run_directory.describe import run_title
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.metrics import read_metrics
from fl_lightning.run_directory.report import Report, reports_of


def draw_partition(attempt: Attempt, module: FederatedModule) -> None:
    """Draw ``partition.png`` from ``partition.json``: samples by client and class, or sizes where it has no classes."""
    with _harmless(attempt.partition_picture) as path:
        record, title = json.loads(attempt.partition.read_text()), run_title(module)
        if record.get("class_histogram"):
            figure = partition_figure(record["class_histogram"], module.data.class_names, title)
        else:
            figure = client_sizes_figure(record["sizes"], title)
        write_figure(path, figure)


def draw_pictures(attempt: Attempt | None, module: FederatedModule) -> None:
    """Draw what a run has found into its folder, and write the tables of its reports as ``<name>.csv``.

    ``learning_curve.png`` is drawn from ``metrics.jsonl``, ``class_accuracy.png`` from ``result.json`` where the run is finished.

    Args:
        attempt: The run's folder, None where nothing is written (``fast_dev_run``).
        module: The trained module, whose callbacks may be reports with pictures ``<name>.png``.
    """
    if attempt is None:
        return
    title = run_title(module)
    with _harmless(attempt.learning_curve) as path:
        policy = json.loads(attempt.policy.read_text())
        write_figure(path, learning_curve_figure(read_metrics(attempt.metrics), policy, title))
    if attempt.result.exists():
        with _harmless(attempt.class_accuracy) as path:
            found = json.loads(attempt.result.read_text())["class_accuracy"]
            if found is not None:
                figure = class_accuracy_figure(found["accuracy"], found["classes"], found["split"], title)
                write_figure(path, figure)
    for report in reports_of(module.federated_callbacks):
        _draw_report(attempt, report, read_metrics(attempt.metrics), title)


def _draw_report(
    attempt: Attempt, report: Report, rows: Sequence[Mapping[str, Any]], title: Sequence[str]
) -> None:
    with _harmless(attempt.path / f"pictures of {type(report).__name__}"):
        for name, draw in report.figures(rows).items():
            with _harmless(attempt.path / f"{name}.png") as path:
                write_figure(path, draw(title))
    with _harmless(attempt.path / f"tables of {type(report).__name__}"):
        for name, table in report.tables().items():
            text = StringIO(newline="")
            csv.writer(text, lineterminator="\n").writerows([table.columns, *table.rows])
            write_text(attempt.path / f"{name}.csv", text.getvalue())


@contextmanager
def _harmless(path: Path) -> Iterator[Path]:
    """Say that a picture or table could not be made, whatever the reason, and go on: a run is more than its pictures."""
    try:
        yield path
    except Exception as error:  # noqa: BLE001  # matplotlib's, the disk's, or those of a user's own record
        print(f"{path} was not written: {type(error).__name__}: {error}", file=sys.stderr)
