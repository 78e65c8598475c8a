"""What a run's folder shows at Weights & Biases beside its metrics: its names, tables, pictures, result and checkpoints."""

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.batch_norm.kinds import KIND_LABELS
from fl_lightning.experiments.dashboard.settings import WandbSettings
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.finished import read_result
from fl_lightning.files import restored
from fl_lightning.round.directions import best_is
from fl_lightning.round.policy import stages_in_words
from fl_lightning.round.tasks import QUALITIES

SUMMARIES = {
    f"{split}/{name}": f"{best_is(name)},last" for split in ("val", "test") for name in (*QUALITIES, "loss")
}
"""Which values of a metric W&B keeps in its table of runs; of others just the last."""


def identity(attempt: Attempt, settings: WandbSettings, group: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """As what a run appears, such as ``FedAvg+FixBN(freeze_round=9)-Digits-Shards-E1-lr0.1-s0`` with the tags ``[FedAvg, FixBN, Digits, LeNet]``.

    The environment variables ``WANDB_NAME``, ``WANDB_RUN_GROUP`` and ``WANDB_PROJECT`` come before what is made up here.

    Args:
        attempt: The run's folder.
        settings: Where the run is logged.
        group: The group of all seeds.

    Returns:
        Arguments of ``wandb.init``; and what a configuration leaves to be computed, for the columns of W&B's table of runs.
    """
    given, facts = os.environ.get, json.loads(attempt.identity.read_text())
    name, tags = facts.pop("name"), facts.pop("tags")
    names = {
        "project": settings.project or given("WANDB_PROJECT") or "fl_lightning",
        "entity": settings.entity,
        "name": given("WANDB_NAME") or name,
        "group": given("WANDB_RUN_GROUP") or group,
        "tags": [*tags, *settings.tags, *filter(None, given("WANDB_TAGS", "").split(","))],
    }
    return names, facts


def media(attempt: Attempt) -> dict[str, Any]:
    """The tables, histograms and pictures that lie in a run's folder.

    ``policy`` is what happens to each kind of state, ``clients`` what each of them holds and has done; a table of a report is
    ``<name>_table``, since a picture may have its name.
    """
    import wandb

    policy = json.loads(attempt.policy.read_text())
    rows = [[KIND_LABELS[kind], stages_in_words(stages)] for kind, stages in policy.items()]
    found: dict[str, Any] = {"policy": wandb.Table(columns=["state of the model", "in a round"], data=rows)}
    for path in sorted(attempt.path.glob("*.csv")):
        if not path.name.startswith("predictions"):  # one row for each sample, by another command
            columns, cells = read_table(path)
            name = "clients" if path == attempt.participation else f"{path.stem}_table"
            found[name] = wandb.Table(columns=[*columns], data=cells)
    if attempt.histograms.is_file():
        histograms = restored(json.loads(attempt.histograms.read_text()))
        found |= {name: wandb.Histogram(values) for name, values in histograms.items()}
    return found | {path.stem: wandb.Image(str(path)) for path in sorted(attempt.path.glob("*.png"))}


def read_table(path: Path) -> tuple[list[str], list[list[Any]]]:
    """The columns and rows of a CSV file: a column holds whole numbers, floats or words, and None where a cell is empty."""
    with path.open(newline="") as file:
        columns, *rows = csv.reader(file)
    cells = [_typed(column) for column in zip(*rows, strict=True)]
    return columns, [list(row) for row in zip(*cells, strict=True)]


def _typed(column: Sequence[str]) -> list[Any]:
    for kind in (int, float):
        try:
            return [kind(cell) if cell else None for cell in column]
        except ValueError:
            continue
    return [cell or None for cell in column]


def summary(attempt: Attempt) -> dict[str, float]:
    """The numbers of ``result.json`` by names such as ``final/test/accuracy``, and ``diverged``."""
    result = read_result(attempt.result)
    numbers = {
        f"final/{name}": value
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {**numbers, "diverged": bool(result["diverged"])}


def log_checkpoints(run: Any, attempt: Attempt, round: int) -> None:
    """Log the checkpoints of a run, where there are any, as one artifact.

    Args:
        run: The run at W&B.
        attempt: The run's folder.
        round: The last round.
    """
    import wandb

    paths = sorted(attempt.checkpoints.glob("*.ckpt"))
    if not paths:
        return
    artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"round": round})
    for path in paths:
        # the file itself is uploaded, also by a later wandb sync: no copies in W&B's folders
        artifact.add_file(str(path.resolve()), policy="immutable", skip_cache=True)
    run.log_artifact(artifact)
