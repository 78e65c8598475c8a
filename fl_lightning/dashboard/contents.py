"""What a run shows at Weights & Biases beside its metrics: its names, tables, pictures and checkpoints."""

import os
from typing import Any

import torch

from fl_lightning.batch_norm.kinds import KIND_LABELS
from fl_lightning.dashboard.settings import WandbSettings
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import policy_table, stages_in_words
from fl_lightning.run_directory.describe import (
    describe,
    describe_environment,
    method_name,
    origin_in_words,
)
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.report import Report

SUMMARIES = {
    f"{split}/{name}": kept
    for split in ("val", "test")
    for name, kept in {"accuracy": "max,last", "mean_iou": "max,last", "loss": "min,last"}.items()
}
"""Which values of a metric W&B keeps in its table of runs; of others just the last."""


def tables(module: FederatedModule) -> dict[str, Any]:
    """The policy in force (``policy``) and what each client holds and has done so far (``clients``); and those of its reports."""
    import wandb

    policy = policy_table(module.model, module.federated_callbacks, module.planned_rounds)
    rows = [[KIND_LABELS[kind], stages_in_words(stages)] for kind, stages in policy.items()]
    columns, clients = clients_table(module)
    found: dict[str, Any] = {
        "policy": wandb.Table(columns=["state of the model", "in a round"], data=rows),
        "clients": wandb.Table(columns=columns, data=clients),
    }
    for report in (cb for cb in module.federated_callbacks if isinstance(cb, Report)):
        for name, table in report.tables().items():
            found[f"{name}_table"] = wandb.Table(columns=list(table.columns), data=[*map(list, table.rows)])
        for name, values in report.histograms().items():
            if len(values):
                found[name] = wandb.Histogram(list(values))
    return found


def clients_table(module: FederatedModule) -> tuple[list[str | int], list[list[Any]]]:
    """One row per client: what it holds, what it did up to now, and its training examples of each class.

    Returns:
        The names of the columns, and the rows. The loss is the mean over the local steps of the client's last round, None
        before its first.
    """
    data = module.data
    histogram = data.partition_record().get("class_histogram") or [[]] * data.num_clients
    names = data.class_names or range(len(histogram[0]))
    columns: list[str | int] = ["client", "training examples", "local steps", "rounds", "last training loss"]
    rows = []
    for client in range(data.num_clients):
        rounds, steps, loss = module.record.clients.get(client, (0, 0, None))
        rows.append([client, data.num_examples(client), steps, rounds, loss, *histogram[client]])
    return [*columns, *(f"class {name}" for name in names if histogram[0])], rows


def pictures(attempt: Attempt) -> dict[str, Any]:
    """The pictures that lie in a run's folder, by the name of the file."""
    import wandb

    return {path.stem: wandb.Image(str(path)) for path in sorted(attempt.path.glob("*.png"))}


def log_checkpoints(run: Any, attempt: Attempt, module: FederatedModule) -> None:
    """Log the checkpoints of a run, where there are any, as one artifact."""
    import wandb

    paths = sorted(attempt.checkpoints.glob("*.ckpt"))
    if not paths:
        return
    artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"round": module.trainer.global_step})
    for path in paths:
        # the file itself is uploaded, also by a later wandb sync: no copies in W&B's folders
        artifact.add_file(str(path.resolve()), policy="immutable", skip_cache=True)
    run.log_artifact(artifact)


def names_of_run(settings: WandbSettings, group: str, module: FederatedModule) -> dict[str, Any]:
    """As what a run appears, such as ``FedAvg+FixBN(freeze_round=9)-Digits-Shards-E1-lr0.1-s0`` with the tags ``[FedAvg, FixBN, Digits, LeNet]``.

    The environment variables ``WANDB_NAME``, ``WANDB_RUN_GROUP`` and
    ``WANDB_PROJECT`` come before what is made up here.

    Returns:
        Arguments of ``wandb.init``.
    """
    methods, given = module.federated_callbacks, os.environ.get
    base, data = method_name(module, []).partition("(")[0], type(module.data).__name__
    partition = module.data.describe_partition().partition("(")[0]
    steps = f"E{module.local_steps}" if module.local_steps is not None else f"E{module.local_epochs}epochs"
    rate = f"lr{module.client_optimizer([torch.zeros(1)]).defaults['lr']:g}"
    method = "+".join([base, *map(describe, methods)])
    name = "-".join([method, data, partition, steps, rate, f"s{module.seed}"])
    tags = [base, *(type(method).__name__ for method in methods), data, type(module.model).__name__]
    return {
        "project": settings.project or given("WANDB_PROJECT") or "fl_lightning",
        "entity": settings.entity,
        "name": given("WANDB_NAME") or name,
        "group": given("WANDB_RUN_GROUP") or group,
        "tags": [*tags, *settings.tags, *filter(None, given("WANDB_TAGS", "").split(","))],
    }


def facts(module: FederatedModule) -> dict[str, Any]:
    """What a configuration leaves to be computed, for the columns of W&B's table of runs."""
    return {
        "git_commit": describe_environment()["git_commit"],
        "seed": module.seed,
        "method": method_name(module, module.federated_callbacks),
        "partition": module.data.describe_partition(),
        "planned_rounds": module.planned_rounds,
        "continued_from": origin_in_words(module.record.continued_from),
    }
