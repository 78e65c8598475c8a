"""The federations of ``fl_lightning.testing``, and what only this project's tests need beside them."""

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from PIL import Image

from fl_lightning import FederatedDataModule, FederatedModule
from fl_lightning.datamodules import CIFAR10
from fl_lightning.testing import *


class Run(NamedTuple):
    """A module after training, the observations of :class:`Rows`, :class:`States` and :class:`ClientStates`, and the trainer."""

    module: FederatedModule
    rows: dict[int, dict[str, float]]
    states: list[dict[str, Any]]
    clients: ClientStates
    trainer: L.Trainer


def with_task(kind):
    """A function like FederatedModule, whose clients compute by a class of tasks."""
    return lambda model, *settings, **named: FederatedModule(kind(model), *settings, **named)


def federated_run(
    *callbacks, data=blobs, rounds=3, model=small_cnn, ckpt_path=None, trainer=None, **settings
):
    """Train a model on a federation, both objects or functions that make them, with two local steps of SGD by default."""
    steps = {} if "local_epochs" in settings else {"local_steps": 2}
    model = model if isinstance(model, torch.nn.Module) else model()
    module = FederatedModule(model, **{"client_optimizer": SGD, **steps, **settings})
    data = data if isinstance(data, FederatedDataModule) else data()
    rows, states, clients = Rows(), States(), ClientStates()
    observed = [*callbacks, rows, states, clients]
    runner = fit(module, data, rounds, observed, ckpt_path, **(trainer or {}))
    return Run(module, rows.rows, states.states, clients, runner)


class Received(Callback):
    """Bytes up and down of each round."""

    def __init__(self):
        self.received = []

    def on_train_epoch_end(self, trainer, pl_module):
        names = ("comm/upload_bytes", "comm/download_bytes")
        self.received.append(tuple(int(trainer.callback_metrics[name]) for name in names))


class SaveRounds(Checkpoint):
    """Saves a checkpoint ``<round>.ckpt`` at the end of each round."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"{pl_module.round}.ckpt")


def write_cifar10_folders(root="data/cifar10", train=24, test=4, size=8):
    """Small random pictures in CIFAR-10's ten class folders."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", train), ("test", test)):
        for name in CIFAR10.class_names:
            folder = Path(root, split, name)
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(256, (size, size, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{index}.png")
