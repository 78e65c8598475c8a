"""The pictures of a run's directory, drawn from its files and never in the way of its result."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.drawing import write_figure
from fl_lightning.learning_curve import learning_curve_figure
from fl_lightning.metrics_log import read_rows
from fl_lightning.pictures import class_accuracy_figure, client_sizes_figure, partition_figure
from fl_lightning.run_directory import Attempt


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
        write_figure(path, learning_curve_figure(read_rows(attempt.metrics), policy, title))
    if not attempt.result.exists():
        return
    with _harmless(attempt.class_accuracy) as path:
        found = json.loads(attempt.result.read_text())["class_accuracy"]
        if found is not None:
            figure = class_accuracy_figure(found["accuracy"], found["classes"], found["split"], title)
            write_figure(path, figure)


@contextmanager
def _harmless(path: Path) -> Iterator[Path]:
    """Say that a picture could not be drawn, whatever the reason, and go on: a run is more than its pictures."""
    try:
        yield path
    except Exception as error:  # noqa: BLE001  # matplotlib's, the disk's, or those of a user's own record
        print(f"{path} was not drawn: {type(error).__name__}: {error}", file=sys.stderr)
