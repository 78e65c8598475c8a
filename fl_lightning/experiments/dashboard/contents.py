"""Contents of a run at Weights & Biases: names, tables, pictures, result and checkpoints."""

import csv
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.batch_norm.kinds import state_label
from fl_lightning.experiments.dashboard.settings import WandbSettings
from fl_lightning.experiments.run_directory.describe import shown_metrics
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.finished import metric_values, read_result
from fl_lightning.files import restored
from fl_lightning.round.policy import stages_in_words
from fl_lightning.round.tasks import Classification


def identity(attempt: Attempt, settings: WandbSettings, group: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of ``wandb.init`` that name a run, and a dict of facts about the run.

    For example, the run ``FedAvg+FixBN(freeze_round=9)-Digits-Shards-E1-lr0.1-s0`` has the tags
    ``[FedAvg, FixBN, Digits, LeNet]``. The environment variables ``WANDB_NAME``,
    ``WANDB_RUN_GROUP`` and ``WANDB_PROJECT`` override the default name, group and project. The
    facts become columns of W&B's table of runs, in addition to the configuration.

    Args:
        attempt: The run's folder.
        settings: The run's W&B settings.
        group: The run's W&B group, shared by all runs that differ only in the seed.
    """
    given = os.environ.get
    facts = json.loads(attempt.identity.read_text())
    name, tags, _ = facts.pop("name"), facts.pop("tags"), facts.pop("metrics", None)
    names = {
        "project": settings.project or given("WANDB_PROJECT") or "fl_lightning",
        "entity": settings.entity,
        "name": given("WANDB_NAME") or name,
        "group": given("WANDB_RUN_GROUP") or group,
        "tags": [*tags, *settings.tags, *filter(None, given("WANDB_TAGS", "").split(","))],
    }
    return names, facts


def metrics_of(attempt: Attempt) -> dict[str, dict[str, str]]:
    """Return the metrics of a run's task, keyed by name.

    Each metric is a dict with ``label`` and ``best`` (``"max"`` or ``"min"``). The first metric is
    the task's quality, such as accuracy. Folders of older versions list no metrics. For such a
    folder, the metrics of classification are returned.
    """
    metrics: dict[str, dict[str, str]] | None = json.loads(attempt.identity.read_text()).get("metrics")
    return metrics or shown_metrics(Classification())


def callback_settings(config: Config) -> dict[str, Config]:
    """Return the settings of each callback, keyed by the name of the callback's class.

    A second ``FixBN`` is called ``FixBN_2``. W&B shows a setting as
    ``callbacks.FixBN.freeze_round``.

    Args:
        config: The resolved configuration of a run.
    """
    settings: dict[str, Config] = {}
    count = Counter[str]()
    nodes = (config.get("trainer") or {}).get("callbacks") or []
    for node in nodes if isinstance(nodes, list) else [nodes]:
        name = node["class_path"].rpartition(".")[2]
        count[name] += 1
        key = name if count[name] == 1 else f"{name}_{count[name]}"
        settings[key] = node.get("init_args") or {}
    return settings


def tested(attempt: Attempt) -> dict[str, float]:
    """Return a finished run's metrics on test data, such as ``test/accuracy``."""
    values = metric_values(read_result(attempt.result))
    return {name: value for name, value in values.items() if name.startswith("test/")}


def media(attempt: Attempt) -> dict[str, Any]:
    """Return the tables, histograms and pictures in a run's folder.

    The table ``policy`` lists the treatment of each kind of state. The table ``clients`` lists the
    data and the training of each client. The report of a method is a table ``<name>_table``, and
    sometimes also a picture ``<name>``.
    """
    import wandb

    policy = json.loads(attempt.policy.read_text())
    rows = [[state_label(kind), stages_in_words(stages)] for kind, stages in policy.items()]
    shown: dict[str, object] = {
        "policy": wandb.Table(columns=["state of the model", "in a round"], data=rows)
    }
    for path in sorted(attempt.path.glob("*.csv")):
        # predictions are left out, since they have a row per sample
        if not path.name.startswith("predictions"):
            columns, cells = read_table(path)
            name = "clients" if path == attempt.participation else f"{path.stem}_table"
            shown[name] = wandb.Table(columns=[*columns], data=cells)
    if attempt.histograms.is_file():
        histograms = restored(json.loads(attempt.histograms.read_text()))
        shown |= {name: wandb.Histogram(values) for name, values in histograms.items()}
    return shown | {path.stem: wandb.Image(str(path)) for path in sorted(attempt.path.glob("*.png"))}


def read_table(path: Path) -> tuple[list[str], list[list[Any]]]:
    """Return a CSV file's columns and rows.

    Columns of numbers are converted to int or float. Empty cells become None.
    """
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
    """Return the numbers in ``result.json``, and whether the run diverged.

    The keys are ``diverged``, and names such as ``final/test/accuracy``.
    """
    result = read_result(attempt.result)
    numbers = {
        f"final/{name}": value
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {**numbers, "diverged": bool(result["diverged"])}


def log_checkpoints(run: Any, attempt: Attempt, round: int) -> None:
    """Log a run's checkpoints as an artifact, with the last round as metadata.

    If the run has no checkpoints, nothing is logged.
    """
    import wandb

    paths = sorted(attempt.checkpoints.glob("*.ckpt"))
    if not paths:
        return
    artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"round": round})
    for path in paths:
        # W&B does not copy this file: it uploads the file now, or later with wandb sync
        artifact.add_file(str(path.resolve()), policy="immutable", skip_cache=True)
    run.log_artifact(artifact)
