"""The federations of ``fl_lightning.testing``, and what only this project's tests need beside them."""

from pathlib import Path

import torch
from lightning.pytorch.callbacks import Checkpoint
from PIL import Image

from fl_lightning.datamodules import CIFAR10
from fl_lightning.testing import *


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
