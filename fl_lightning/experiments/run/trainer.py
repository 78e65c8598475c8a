"""Construction of a run's trainer, and choice of the number of ranks."""

import os
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.fork import OneMachine
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.launched import under_torchrun
from fl_lightning.round.trainer_checks import check_trainer

MOST_THREADS = 1024
"""Largest number of CPU threads; a larger number can kill the process."""


def make_trainer(settings: Config, ranks: int = 1, **equipment: Any) -> L.Trainer:
    """Return a trainer with this project's checkpoint plugin.

    A run with several ranks also gets this project's strategy.

    Args:
        settings: The user's arguments of the trainer.
        ranks: Number of ranks for ``devices: auto`` on CPUs. On a GPU, ``auto`` means 1 rank. Under
            ``torchrun``, each launched process is a rank.
        equipment: Arguments of the trainer that override ``settings``.

    Raises:
        ConfigurationError: The trainer refuses an argument.
    """
    if (folder := settings.get("default_root_dir")) is not None:
        raise ConfigurationError(
            f"trainer.default_root_dir: {folder} would be ignored; use run_root and name"
        )
    plugins = [*as_list(settings.get("plugins")), AtomicCheckpointIO()]
    if not is_launched(settings):  # processes that a scheduler has started may be independent runs
        plugins.append(OneMachine())
    if settings.get("devices", "auto") == "auto":
        equipment["devices"] = _devices(settings.get("accelerator", "auto"), ranks)
    if under_torchrun() and settings.get("num_nodes", 1) == 1:
        equipment["num_nodes"] = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    # without a logger, Lightning would add its own
    given = {**settings, "logger": settings.get("logger") or False, **equipment, "plugins": plugins}
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
    """Return whether a launcher such as ``torchrun`` or Slurm may start the ranks."""
    asked = settings.get("devices", "auto") not in ("auto", 1, "1") or settings.get("num_nodes", 1) != 1
    return asked or under_torchrun()


def _devices(accelerator: Any, ranks: int) -> int:
    if under_torchrun():
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return ranks if on_cpu(accelerator) else 1


def on_cpu(accelerator: Any) -> bool:
    """Return whether a run with this value of ``trainer.accelerator`` computes on CPUs."""
    has_gpu = CUDAAccelerator.is_available() or MPSAccelerator.is_available()
    return accelerator == "cpu" or (accelerator == "auto" and not has_gpu)


def use_threads(threads: int, devices: Any) -> Any:
    """Set the number of CPU threads, and return the matching value of ``trainer.devices``.

    Args:
        threads: Number of CPU threads.
        devices: The setting ``trainer.devices``. With several threads, ``"auto"`` becomes 1,
            because several ranks would have one thread each.
    """
    torch.set_num_threads(threads)
    return 1 if threads > 1 and devices == "auto" and not under_torchrun() else devices


def as_list(setting: Any) -> list[Any]:
    """Return a setting as a list. A single value becomes a list of one item, None an empty list."""
    if not setting:
        return []
    return list(setting) if isinstance(setting, list | tuple) else [setting]
