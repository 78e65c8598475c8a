"""Callbacks that run beside the method under test: they watch and draw random numbers, disturb a client, or save."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint

from fl_lightning.cohort.cohort import Cohort
from fl_lightning.round.callback import FederatedCallback
from fl_lightning.round.module import FederatedModule
from fl_lightning.verification.federation import Disturbance


class Observer(FederatedCallback):
    """Has every hook and looks at everything, without doing anything.

    Args:
        generators: Random number generators from which it draws in each hook, and from every global one; None for none.
    """

    def __init__(self, generators: Iterable[Any] | None) -> None:
        self.generators = generators

    def look(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int = 0) -> None:
        """The hook of each moment of a round."""
        self.seen = [
            float(rows.double().sum()) for rows in (*cohort.params.values(), *cohort.buffers.values())
        ]
        if self.generators is None:
            return
        torch.rand(3)
        np.random.rand(3)  # the global generator is meant
        random.random()
        for generator in self.generators:
            if isinstance(generator, torch.Generator):
                torch.rand(1, generator=generator)
            else:
                generator.random()

    on_round_start = on_after_local_backward = on_local_step_end = on_before_aggregate = on_round_end = look


class Disturb(FederatedCallback):
    """Changes what one client holds after its local steps, before the method sees it."""

    def __init__(self, disturbance: Disturbance) -> None:
        self.disturbance = disturbance

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Add to the client's rows."""
        what = self.disturbance
        if cohort.round != what.round or what.client not in cohort.client_ids:
            return
        row = cohort.client_ids.index(what.client)
        blocks = {**cohort.params.blocks, **cohort.buffers.blocks}
        held = [
            block
            for name, block in blocks.items()
            if cohort.treatment(name) in what.what and not name.startswith("scratch")
        ]
        for key in cohort.optimizer_state_keys if "optimizer" in what.what else []:
            held += cohort.optimizer_state(key).blocks.values()
        for block in held:
            if block.dtype != torch.bool:
                block[row] += 0.25 if block.is_floating_point() else 100


class SaveRounds(Checkpoint):
    """Saves a checkpoint ``<round>.ckpt`` at the end of each round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save."""
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch + 1}.ckpt")


def own_generators(method: object) -> dict[str, Any]:
    """The random number generators that an object keeps as attributes, by their names."""
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    return {name: value for name, value in vars(method).items() if isinstance(value, kinds)}
