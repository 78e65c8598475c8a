"""Contents of a run at Weights & Biases: names, tables, pictures, result and checkpoints."""

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.batch_norm.kinds import state_label
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
"""Values of a metric in W&B's table of runs; by default only the last."""


def identity(attempt: Attempt, settings: WandbSettings, group: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of ``wandb.init`` that name a run, and facts that its configuration lacks.

    An example is ``FedAvg+FixBN(freeze_round=9)-Digits-Shards-E1-lr0.1-s0`` with the tags
    ``[FedAvg, FixBN, Digits, LeNet]``. The environment variables ``WANDB_NAME``,
    ``WANDB_RUN_GROUP`` and ``WANDB_PROJECT`` take precedence over generated values. The facts are
    columns of W&B's table of runs.

    Args:
        attempt: The run's folder.
        settings: The run's W&B settings.
        group: The group of all seeds.
    """
    given = os.environ.get
    facts = json.loads(attempt.identity.read_text())
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
    """Return the tables, histograms and pictures of a run's folder.

    ``policy`` tells what happens to each kind of state, ``clients`` what each client holds and has
    done. The table of a report is called ``<name>_table``, since a picture may have its name.
    """
    import wandb

    policy = json.loads(attempt.policy.read_text())
    rows = [[state_label(kind), stages_in_words(stages)] for kind, stages in policy.items()]
    shown: dict[str, Any] = {"policy": wandb.Table(columns=["state of the model", "in a round"], data=rows)}
    for path in sorted(attempt.path.glob("*.csv")):
        if not path.name.startswith("predictions"):  # the predict command writes one row per sample
            columns, cells = read_table(path)
            name = "clients" if path == attempt.participation else f"{path.stem}_table"
            shown[name] = wandb.Table(columns=[*columns], data=cells)
    if attempt.histograms.is_file():
        histograms = restored(json.loads(attempt.histograms.read_text()))
        shown |= {name: wandb.Histogram(values) for name, values in histograms.items()}
    return shown | {path.stem: wandb.Image(str(path)) for path in sorted(attempt.path.glob("*.png"))}


def read_table(path: Path) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of a CSV file: integers, floats or words; an empty cell is None."""
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
    """Return the numbers of ``result.json`` as ``final/test/accuracy`` etc., and ``diverged``."""
    result = read_result(attempt.result)
    numbers = {
        f"final/{name}": value
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {**numbers, "diverged": bool(result["diverged"])}


def log_checkpoints(run: Any, attempt: Attempt, round: int) -> None:
    """Log all checkpoints of a run, if any, as one artifact with the number of its last round."""
    import wandb

    paths = sorted(attempt.checkpoints.glob("*.ckpt"))
    if not paths:
        return
    artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"round": round})
    for path in paths:
        # W&B uploads the file itself, also in a later wandb sync, and makes no copy of it
        artifact.add_file(str(path.resolve()), policy="immutable", skip_cache=True)
    run.log_artifact(artifact)
