"""As what a run of the command line appears at Weights & Biases: id, name, group, tags and configuration."""

import os
import re
from collections.abc import Sequence

import lightning as L
import yaml
from lightning.pytorch.loggers import Logger, WandbLogger

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.dashboard.connection import resolve_mode
from fl_lightning.dashboard.logger import RoundWandbLogger
from fl_lightning.dashboard.settings import WandbSettings
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.round.module import FederatedModule
from fl_lightning.run_directory.describe import method_name
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.environment import describe_environment


def wandb_logger(
    settings: WandbSettings,
    loggers: Sequence[Logger],
    attempt: Attempt,
    config: str,
    module: FederatedModule,
    data: FederatedDataModule,
    callbacks: Sequence[L.Callback],
) -> RoundWandbLogger | None:
    """The logger of a run: there is one W&B run per configuration and seed, in one group for all seeds.

    The environment variables ``WANDB_NAME``, ``WANDB_RUN_GROUP``, ``WANDB_JOB_TYPE`` and, for a new run, ``WANDB_RUN_ID``
    come before what is made up here.

    Args:
        settings: Whether and where the run is logged.
        loggers: The user's own: where a ``WandbLogger`` is among them, its run is used and no other is started.
        attempt: The run's folder.
        config: The resolved configuration as YAML.
        module: The module.
        data: Its data.
        callbacks: The trainer's callbacks.

    Returns:
        None where W&B is disabled.
    """
    own = next((logger for logger in loggers if isinstance(logger, WandbLogger)), None)
    mode = "online" if own is not None else resolve_mode(settings.mode)
    if mode == "disabled":
        return None
    resolved = yaml.safe_load(config)
    config_hash = attempt.path.name.partition("-")[0]
    added = {"config_hash": config_hash, "git_commit": describe_environment()["git_commit"]}
    name, tags = run_name_and_tags(module, data, callbacks)
    return RoundWandbLogger(
        attempt,
        mode,
        settings.log_checkpoints,
        beside=own,
        project=settings.project,
        entity=settings.entity,
        name=os.environ.get("WANDB_NAME") or name,
        group=os.environ.get("WANDB_RUN_GROUP") or f"{resolved['name']}-{config_hash}",
        job_type=os.environ.get("WANDB_JOB_TYPE") or "fit",
        tags=[*tags, *settings.tags],
        config=resolved | added,
    )


def run_name_and_tags(
    module: FederatedModule, data: FederatedDataModule, callbacks: Sequence[L.Callback]
) -> tuple[str, list[str]]:
    """Name and tags of a run, such as ``FedAvg+FixBN-Shards-E1-s0`` and ``[FedAvg, FixBN, Digits, LeNet]``.

    Args:
        module: The module.
        data: Its data.
        callbacks: The trainer's callbacks.
    """
    methods = [type(callback).__name__ for callback in callbacks if isinstance(callback, FederatedCallback)]
    base = method_name(module, []).partition("(")[0]
    known = re.match(r"[A-Za-z_]\w*", data.describe_partition())
    partition = known[0] if known else type(data).__name__
    steps = f"E{module.local_steps}" if module.local_steps is not None else f"E{module.local_epochs}epochs"
    name = "-".join(["+".join([base, *methods]), partition, steps, f"s{module.seed}"])
    return name, [base, *methods, type(data).__name__, type(module.model).__name__]
