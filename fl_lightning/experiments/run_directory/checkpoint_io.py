"""Atomic writing and checked reading of checkpoints.

Lightning writes a checkpoint to the system's temporary folder and then moves the file. This move is
not synced to the disk, and is not atomic across file systems. :class:`AtomicCheckpointIO` writes a
temporary file in the target's folder, syncs the file to the disk, and renames it.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from torch import nn
from torch.optim import Optimizer

from fl_lightning.cohort.client_memory import keep_listed
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import atomic_write, unwritable, user_path
from fl_lightning.models.weights import load_whole, misfit_error, misfits


class AtomicCheckpointIO(CheckpointIO):
    """Lightning plugin that writes checkpoints atomically, to local paths only.

    If a write is interrupted, the old file does not change. Use the plugin as
    ``Trainer(plugins=[AtomicCheckpointIO()])``.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint atomically.

        Missing folders are created. ``storage_options`` is ignored.

        Raises:
            ConfigurationError: The path is remote, the disk is full or the folder cannot be
                written.
        """
        target = user_path("checkpoint", path)
        keep_listed(target.absolute(), checkpoint.get("callbacks"))
        try:
            with atomic_write(target) as file:
                torch.save(checkpoint, file)
        except RuntimeError as error:
            # torch's zip writer raises a RuntimeError in place of the system's error
            if isinstance(error.__context__, OSError):
                raise unwritable(target, error.__context__) from error
            raise

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint and check that it is complete.

        Args:
            path: The checkpoint file.
            map_location: As in ``torch.load``; None means the CPU.
            weights_only: As in ``torch.load``; None means True. With True, the file may hold
                tensors, numbers, strings, lists and dicts, but no code.

        Raises:
            ConfigurationError: The file is missing, damaged or remote, or has content that
                ``weights_only`` forbids.
        """
        target = user_path("checkpoint", path)
        if not target.is_file():
            raise ConfigurationError(
                f"checkpoint {target} does not exist; give a file, 'last', 'best' or 'auto'"
            )
        checkpoint: dict[str, Any] = load_whole("checkpoint", target, map_location, weights_only)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint file if it exists."""
        user_path("checkpoint", path).unlink(missing_ok=True)


def load_checkpoint(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint and check that it belongs to a federated run.

    Args:
        path: The checkpoint file.
        weights_only: As in :meth:`AtomicCheckpointIO.load_checkpoint`.

    Raises:
        ConfigurationError: The file cannot be loaded, or is not a checkpoint of a federated run.
    """
    checkpoint = AtomicCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    needed = ("state_dict", "global_step", "pytorch-lightning_version", "fl_lightning")
    missing = [key for key in needed if not (isinstance(checkpoint, dict) and key in checkpoint)]
    if missing:
        raise ConfigurationError(
            f"checkpoint {path} is not of a federated run: it has no {', '.join(missing)}; "
            f"use a last.ckpt or best.ckpt that fit wrote"
        )
    return checkpoint


def check_run(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer | None = None,
) -> None:
    """Check that a checkpoint fits the configured model and server optimizer.

    Args:
        path: The checkpoint file, for the message.
        checkpoint: Content of the file.
        model: The configured model.
        optimizer: The configured server optimizer; None to check only the model.

    Raises:
        ConfigurationError: The checkpoint has the wrong names or shapes of tensors, or belongs to a
            different server optimizer.
    """
    if differing := misfits(checkpoint["state_dict"], model):
        raise misfit_error(f"checkpoint {path}", "checkpoint", model, differing)
    if not isinstance(optimizer, Optimizer) or not checkpoint.get("optimizer_states"):
        return
    groups = checkpoint["optimizer_states"][0]["param_groups"], optimizer.param_groups
    # check only settings that the checkpoint has: a newer torch may have more settings
    foreign = any(setting not in new for old, new in zip(*groups, strict=False) for setting in old)
    sizes = [[len(group["params"]) for group in part] for part in groups]
    if foreign or sizes[0] != sizes[1]:
        raise ConfigurationError(
            f"checkpoint {path} was not written with model.server_optimizer {type(optimizer).__name__}; "
            "resume with the server optimizer that it was trained with"
        )
