"""Pictures and tables in a run's folder."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.experiments.run_directory.describe import clients_table, run_title
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.run_directory.predictions import overlays, write_own_predictions
from fl_lightning.files import csv_text, write_text
from fl_lightning.methods.run_report import Report
from fl_lightning.pictures.federation import class_quality_figure, clients_figure
from fl_lightning.pictures.learning_curve import learning_curve_figure
from fl_lightning.pictures.style import write_figure
from fl_lightning.round.module import FederatedModule


def draw_partition(attempt: Attempt, module: FederatedModule) -> None:
    """Draw ``partition.png`` from ``partition.json``: the number of samples of each client."""
    with harmless(attempt.partition_picture):
        record, title = json.loads(attempt.partition.read_text()), run_title(module)
        write_figure(attempt.partition_picture, clients_figure(record, module.data.class_names, title))


def draw_pictures(attempt: Attempt | None, module: FederatedModule) -> None:
    """Draw the pictures of a run, and write the tables of its clients and reports as CSV files.

    - Each run has ``learning_curve.png``, drawn from ``metrics.jsonl``.
    - A finished run has ``class_<quality>.png``, such as ``class_accuracy.png``, drawn from
      ``result.json``.
    - A finished run of clients with names may have ``test_predictions.csv``.
    - A finished segmentation run also has ``overlays.png``.
    - Reports may add ``<name>.png`` and ``<name>.csv``.

    Args:
        attempt: The run's folder. With None, no pictures are drawn.
        module: The trained module.
    """
    if attempt is None:
        return
    title = run_title(module)
    with harmless(attempt.learning_curve):
        policy = json.loads(attempt.policy.read_text())
        further = [*(module.task.best if module.client.logs_itself else module.task.measured)]
        figure = learning_curve_figure(
            read_metrics(attempt.metrics), policy, title, module.task.quality, further
        )
        write_figure(attempt.learning_curve, figure)
    if attempt.result.exists():
        what = module.task.by_class
        path = attempt.path / f"class_{what}.png"
        with harmless(path):
            record = json.loads(attempt.result.read_text())[f"class_{what}"]
            if record is not None:
                caption = f"{record['split']} {what}"
                write_figure(path, class_quality_figure(record[what], record["classes"], caption, title))
        with harmless(attempt.test_predictions):
            write_own_predictions(attempt.test_predictions, module)
        path = attempt.path / "overlays.png"
        with harmless(path):
            if (shown := overlays(module, title)) is not None:
                write_figure(path, shown)
    with harmless(attempt.participation):
        columns, rows = clients_table(module)
        write_text(attempt.participation, csv_text([columns, *rows]))
    for report in (cb for cb in module.federated_callbacks if isinstance(cb, Report)):
        with harmless(f"a picture of {type(report).__name__}"):
            for name, draw in report.figures(read_metrics(attempt.metrics)).items():
                write_figure(attempt.path / f"{name}.png", draw(title))
        with harmless(f"a table of {type(report).__name__}"):
            for name, table in report.tables().items():
                write_text(attempt.path / f"{name}.csv", csv_text([table.columns, *table.rows]))


@contextmanager
def harmless(what: Path | str) -> Iterator[None]:
    """Print an error of the block instead of raising it: a missing picture must not stop a run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # any error of matplotlib, the disk or users' code
        print(f"{what} was not written: {type(error).__name__}: {error}", file=sys.stderr)
