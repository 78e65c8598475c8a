"""The trainer of a run, and how many ranks it has."""

import os
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.utilities.seed import isolate_rng

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.fork import OneMachine
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.launched import under_torchrun
from fl_lightning.round.module import FederatedModule
from fl_lightning.round.plan import RoundPlan, cohort_size
from fl_lightning.round.trainer import check_trainer

_WORTH_RANKS = 20
"""Local steps of all clients in a round; in a shorter one ranks wait for each other longer than they save."""


def make_trainer(settings: Config, ranks: int = 1, **equipment: Any) -> L.Trainer:
    """A trainer with this project's checkpoints and, for several ranks, its strategy.

    Args:
        settings: The trainer's arguments that the user gives.
        ranks: What ``devices: auto`` means on a CPU. On a GPU it is one, under ``torchrun`` what that has started.
        equipment: Arguments that take their place.

    Raises:
        ConfigurationError: The trainer refuses one.
    """
    plugins = [*as_list(settings.get("plugins")), AtomicCheckpointIO()]
    if not is_launched(settings):  # a scheduler numbers runs that know nothing of each other
        plugins.append(OneMachine())
    if settings.get("devices", "auto") == "auto":
        equipment["devices"] = _devices(settings.get("accelerator", "auto"), ranks)
    if under_torchrun() and settings.get("num_nodes", 1) == 1:
        equipment["num_nodes"] = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    given = {**settings, **equipment, "plugins": plugins}
    several = given["devices"] not in (1, "1") or given.get("num_nodes", 1) != 1 or under_torchrun()
    if given.get("strategy", "auto") == "auto" and several:
        given["strategy"] = CohortStrategy()
    try:
        trainer = L.Trainer(**given)
    except ConfigurationError:
        raise
    except (ValueError, TypeError, MisconfigurationException) as error:
        place = f"accelerator: {settings.get('accelerator')}, devices: {given['devices']}"
        raise ConfigurationError(f"trainer ({place}): {error}") from error
    check_trainer(trainer)
    return trainer


def is_launched(settings: Config) -> bool:
    """Whether other ranks may be processes that somebody else starts: ``torchrun``, or where they are asked for Slurm."""
    asked = settings.get("devices", "auto") not in ("auto", 1, "1") or settings.get("num_nodes", 1) != 1
    return asked or under_torchrun()


def _devices(accelerator: Any, ranks: int) -> int:
    if under_torchrun():
        return int(os.environ["LOCAL_WORLD_SIZE"])
    other = accelerator == "auto" and (CUDAAccelerator.is_available() or MPSAccelerator.is_available())
    return 1 if other or accelerator not in ("auto", "cpu") else ranks


def useful_ranks(module: FederatedModule, data: FederatedDataModule) -> int:
    """The most ranks that have something to do in a round: one for each client, and only one where the round is short.

    The data are set up for it, before the ranks that will share their memory are copied.
    """
    # nothing here asks a GPU: a process that uses one cannot be copied
    with isolate_rng(include_cuda=False):  # they will be set up again, with the same draws
        data.prepare_data()
        data.setup("fit")
    if not data.num_clients:
        return 1  # which the module refuses
    size = cohort_size(data.num_clients, module.participation)
    plan = RoundPlan(
        data, module.local_steps, module.local_epochs, size, module.seed, centralised=module.centralised
    )
    clients, steps = plan.trained(1)
    return len(clients) if sum(steps) >= _WORTH_RANKS else 1


def as_list(setting: Any) -> list[Any]:
    """A setting that may be missing, one thing or a list of them, as a list."""
    if not setting:
        return []
    return list(setting) if isinstance(setting, list | tuple) else [setting]
