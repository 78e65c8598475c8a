"""How a run goes on in another folder: from an older checkpoint, or under other settings."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from fl_lightning.errors import ConfigurationError
from fl_lightning.files import atomic_write
from fl_lightning.run_directory.checkpoint_io import load_run
from fl_lightning.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.run_directory.directory import Attempt


def round_of(checkpoint: Path) -> int:
    """The round that a checkpoint was saved after.

    Raises:
        ConfigurationError: It cannot be read.
    """
    return int(load_run(checkpoint, None)["global_step"])


def is_behind(source: Attempt, round_number: int) -> bool:
    """Whether an attempt's last checkpoint is of a later round than ``round_number``, or cannot be read."""
    last = source.checkpoints / "last.ckpt"
    try:
        return last.is_file() and round_of(last) > round_number
    except ConfigurationError:
        return True


def copy_checkpoints(
    source: Attempt, target: Attempt, ckpt_path: Path, checkpoint: dict[str, Any], keeper: RoundCheckpoint
) -> None:
    """Give a new attempt the checkpoints of the rounds before it, ``last.ckpt`` last.

    Args:
        source: The attempt that the run goes on from.
        target: The new attempt.
        ckpt_path: The checkpoint that is resumed.
        checkpoint: What it holds.
        keeper: The new attempt's own checkpoints; nothing is copied where they lie in another folder.
    """
    if keeper.dirpath is not None:
        return
    best = source.checkpoints / "best.ckpt"
    best_round = checkpoint.get("callbacks", {}).get(keeper.state_key, {}).get("best_round")
    if best_round is not None and best.is_file():
        content = best.read_bytes()
        if round_of(best) == best_round:  # the source may have found a better one since
            with atomic_write(target.checkpoints / best.name) as file:
                file.write(content)
    with atomic_write(target.checkpoints / "last.ckpt") as file:
        file.write(ckpt_path.read_bytes())


class OwnServerSettings(Callback):
    """Gives the server optimizer back its configured settings, which those of the checkpoint replaced."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set learning rate, momentum and the like, and keep the optimizer's state."""
        configured = pl_module.configure_optimizers()
        if isinstance(configured, torch.optim.Optimizer):
            for group, own in zip(trainer.optimizers[0].param_groups, configured.param_groups, strict=True):
                group.update({name: value for name, value in own.items() if name != "params"})
