"""What a run shows at Weights & Biases beside its metrics: tables, pictures, the result and the checkpoints."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_lightning.batch_norm.kinds import KIND_LABELS
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.policy import policy_table, stages_in_words
from fl_lightning.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.run_directory.describe import method_name, origin_in_words
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.report import reports_of

_SUMMARIES = {"accuracy": "max,last", "mean_iou": "max,last", "loss": "min,last"}


def summary_of(metric: str) -> str | None:
    """Which values of a metric W&B keeps in its table of runs: ``"max,last"`` or the like, None for just the last."""
    split, _, name = metric.partition("/")
    return _SUMMARIES.get(name) if split in ("val", "test") else None


def tables(module: FederatedModule) -> dict[str, Any]:
    """The policy in force (``policy``) and what each client holds and has done so far (``clients``); and those of its reports."""
    import wandb

    policy = policy_table(module.model, module.federated_callbacks, module.planned_rounds)
    rows = [[KIND_LABELS[kind], stages_in_words(stages)] for kind, stages in policy.items()]
    columns, clients = clients_table(module)
    reports = reports_of(module.federated_callbacks)
    return {
        "policy": wandb.Table(columns=["state of the model", "in a round"], data=rows),
        "clients": wandb.Table(columns=columns, data=clients),
        **{
            f"{name}_table": wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
            for report in reports
            for name, table in report.tables().items()
        },
        **{
            name: wandb.Histogram(list(values))
            for report in reports
            for name, values in report.histograms().items()
            if len(values)
        },
    }


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
    return [*columns, *(f"class {name}" for name in names)], rows


def pictures(attempt: Attempt) -> dict[str, Any]:
    """The pictures that lie in a run's folder, by the name of the file."""
    import wandb

    return {path.stem: wandb.Image(str(path)) for path in sorted(attempt.path.glob("*.png"))}


def log_checkpoints(run: Any, module: FederatedModule) -> None:
    """Log the checkpoints of a run, where there are any, as one artifact."""
    import wandb

    folders = [
        callback.dirpath
        for callback in module.trainer.checkpoint_callbacks
        if isinstance(callback, RoundCheckpoint) and callback.dirpath is not None
    ]
    paths = [path for folder in folders for path in sorted(folder.glob("*.ckpt"))]
    if not paths:
        return
    artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"round": module.trainer.global_step})
    for path in paths:
        # the file itself is uploaded, also by a later wandb sync: no copies in W&B's folders
        artifact.add_file(str(path.resolve()), policy="immutable", skip_cache=True)
    best = ["best"] if any(path.name == "best.ckpt" for path in paths) else []
    run.log_artifact(artifact, aliases=["latest", *best])


def facts(module: FederatedModule) -> dict[str, Any]:
    """What a configuration leaves to be computed, for the columns of W&B's table of runs."""
    return {
        "seed": module.seed,
        "method": method_name(module, module.federated_callbacks),
        "partition": module.data.describe_partition(),
        "planned_rounds": module.planned_rounds,
        "continued_from": origin_in_words(module.record.continued_from),
    }


@contextmanager
def staged_in(folder: Path) -> Iterator[None]:
    """Keep the files that W&B waits to upload in a folder of the run, where they stay for ``wandb sync``."""
    if "WANDB_DATA_DIR" in os.environ:
        yield
        return
    os.environ["WANDB_DATA_DIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["WANDB_DATA_DIR"]
