"""Contents of a run at Weights & Biases: names, settings, tables, pictures, result and checkpoints."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fl_lightning.batch_norm.kinds import state_label
from fl_lightning.experiments.run_directory.describe import clients_table
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.result import Result
from fl_lightning.experiments.weights_and_biases.settings import WandbSettings
from fl_lightning.methods.run_report import Report
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import stages_in_words


def names(facts: Config, settings: WandbSettings, group: str) -> dict[str, Any]:
    """Return the arguments of ``wandb.init`` that name a run.

    For example, the run ``FedAvg+FixBN(freeze_round=9)-Digits-Shards-E1-lr0.1-s0`` has the tags
    ``[FedAvg, FixBN, Digits, LeNet]``. The environment variables ``WANDB_NAME`` and
    ``WANDB_RUN_GROUP`` override the name and the group.

    Args:
        facts: Content of ``run.json``.
        settings: The run's W&B settings.
        group: The run's W&B group, shared by all runs that differ only in the seed.
    """
    given = os.environ.get
    return {
        "entity": settings.entity,
        "name": given("WANDB_NAME") or facts["name"],
        "group": given("WANDB_RUN_GROUP") or group,
        "tags": [*facts["tags"], *settings.tags, *filter(None, given("WANDB_TAGS", "").split(","))],
    }


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


def media(attempt: Attempt, module: FederatedModule) -> dict[str, Any]:
    """Return the tables and pictures of a run.

    The table ``policy`` lists the treatment of each kind of state. The table ``clients`` lists the
    data and the training of each client. The report of a method is a table ``<name>_table``, and
    sometimes also a picture ``<name>``.
    """
    import wandb

    policy = json.loads(attempt.policy.read_text())
    tables: dict[str, tuple[Sequence[str], list[list[Any]]]] = {
        "policy": (
            ["state of the model", "in a round"],
            [[state_label(kind), stages_in_words(stages)] for kind, stages in policy.items()],
        ),
        "clients": clients_table(module),
    }
    for report in (callback for callback in module.federated_callbacks if isinstance(callback, Report)):
        for name, table in report.tables().items():
            # W&B refuses a text in a column of numbers: an empty cell is None
            rows = [[None if cell == "" else cell for cell in row] for row in table.rows]
            tables[f"{name}_table"] = table.columns, rows
    return {
        **{name: wandb.Table(columns=[*columns], data=rows) for name, (columns, rows) in tables.items()},
        **{path.stem: wandb.Image(str(path)) for path in sorted(attempt.path.glob("*.png"))},
    }


def summary(result: Result) -> dict[str, float]:
    """Return the numbers in ``result.json``, and whether the run diverged.

    The keys are ``diverged``, and names such as ``final/test/accuracy``.
    """
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
