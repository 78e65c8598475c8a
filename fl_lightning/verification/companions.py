"""Callbacks that run beside the method under test: they watch, draw random numbers, disturb a client, or save."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint

from fl_lightning.verification.federation import Disturbance
from fl_lightning.verification.observation import Companion

if TYPE_CHECKING:
    from fl_lightning.cohort.cohort import Cohort
    from fl_lightning.round.module import FederatedModule


class Observer(Companion):
    """Has every hook and looks at everything, without doing anything."""

    def look(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort", step: int = 0) -> None:
        """The hook of each moment of a round."""
        self._look(cohort)

    on_round_start = on_after_local_backward = on_local_step_end = on_before_aggregate = on_round_end = look

    def _look(self, cohort: "Cohort") -> None:
        self.seen = [
            float(rows.double().sum()) for rows in (*cohort.params.values(), *cohort.buffers.values())
        ]


class Noise(Observer):
    """Draws from every global generator, and from those that the method keeps, in all hooks."""

    def __init__(self, method: L.Callback) -> None:
        self.generators = [generator for _, generator in own_generators(method)]

    def _look(self, cohort: "Cohort") -> None:
        torch.rand(3)
        np.random.rand(3)  # the global generator is meant
        random.random()
        for generator in self.generators:
            advance(generator)


class Disturb(Companion):
    """Changes what one client holds after its local steps, before the method sees it."""

    def __init__(self, disturbance: Disturbance) -> None:
        self.disturbance = disturbance

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Add to the client's rows."""
        what = self.disturbance
        if cohort.round != what.round or what.client not in cohort.client_ids:
            return
        row = cohort.client_ids.index(what.client)
        for rows in (cohort.params, cohort.buffers):
            for name, block in rows.blocks.items():
                if (
                    not name.startswith("scratch")
                    and cohort.treatment(name) in what.what
                    and block.is_floating_point()
                ):
                    block[row] += 0.25
        for key in cohort.optimizer_state_keys if "optimizer" in what.what else []:
            for block in cohort.optimizer_state(key).blocks.values():
                block[row] += 0.25


class SaveRounds(Checkpoint):
    """Saves a checkpoint ``<round>.ckpt`` at the end of each round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save."""
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch + 1}.ckpt")


def own_generators(method: object) -> Iterator[tuple[str, Any]]:
    """The random number generators that an object keeps as attributes, with their names."""
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    for name, value in vars(method).items():
        if isinstance(value, kinds):
            yield name, value


def advance(generator: Any) -> None:
    """Draw once from a generator of any of the usual kinds."""
    if isinstance(generator, torch.Generator):
        torch.rand(1, generator=generator)
    elif isinstance(generator, np.random.RandomState):
        generator.rand()
    else:
        generator.random()
