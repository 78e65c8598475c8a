"""A LightningModule and data modules of sites, written as a user of Lightning writes them."""

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedModule
from fl_lightning.testing import fit

FEATURES, CLASSES = 6, 3
TRAINER = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Site(L.LightningDataModule):
    """A site with random data: training samples, then evaluation samples."""

    def __init__(self, seed, train=16, batch_size=8, dtype=torch.float32):
        super().__init__()
        self.seed, self.train, self.batch_size, self.dtype = seed, train, batch_size, dtype

    def setup(self, stage):
        drawn = torch.Generator().manual_seed(self.seed)
        inputs = torch.randn(self.train + 7, FEATURES, generator=drawn).to(self.dtype)
        targets = torch.randint(CLASSES, (self.train + 7,), generator=drawn)
        self.samples = TensorDataset(inputs[: self.train], targets[: self.train])
        self.held_out = TensorDataset(inputs[self.train :], targets[self.train :])

    def train_dataloader(self):
        return DataLoader(self.samples, self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=3)

    def test_dataloader(self):
        return DataLoader(self.held_out, batch_size=3)


class Lit(L.LightningModule):
    """A classifier with BN. The settings choose what it logs and how it is optimized."""

    def __init__(self, lr=0.1, metrics=False, optimizer="sgd"):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))
        if metrics:
            self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
            self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        scores = self(inputs)
        loss = cross_entropy(scores, targets, label_smoothing=0.1)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if self.hparams.metrics:
            self.train_acc(scores, targets)
            self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.evaluated(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluated(batch, "test")

    def evaluated(self, batch, split):
        inputs, targets = batch
        scores = self(inputs)
        self.log(f"{split}_loss", cross_entropy(scores, targets), prog_bar=True)
        if self.hparams.metrics and split == "val":
            self.val_acc(scores, targets)
            self.log("val_acc", self.val_acc)

    def configure_optimizers(self):
        groups = [
            {"params": [p for n, p in self.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for n, p in self.named_parameters() if n.endswith("weight")]},
        ]
        lr = self.hparams.lr
        if self.hparams.optimizer == "plain":
            return torch.optim.SGD(self.parameters(), lr=lr)
        if self.hparams.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=lr, weight_decay=0.1)
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=0.01)
        # changes the momentum, too
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=2 * lr, total_steps=max(2, self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def sites(count=2, server=True, **settings):
    """A federation of sites whose data differ."""
    clients = {f"site {number}": Site(number, **settings) for number in range(count)}
    return FederatedDataModule(clients, server=Site(99, **settings) if server else None)


class KeepsLosses(Lit):
    """The pattern of Lightning 2 for values of a whole epoch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("mean_of_losses", torch.stack(self.losses).mean())
        self.log("last_loss", self.losses[-1])
        self.losses.clear()


def federated(module, *callbacks, data=None, rounds=2, ckpt_path=None, trainer=None, **settings):
    """Train a LightningModule on sites, with evaluations; return the federated module."""
    steps = {} if "local_epochs" in settings else {"local_steps": 2}
    run = FederatedModule(module, **{**steps, **settings})
    evaluated = {"limit_val_batches": 1.0, "num_sanity_val_steps": -1}
    data = sites() if data is None else data
    run.fitted = fit(run, data, rounds, callbacks, ckpt_path, **{**evaluated, **(trainer or {})})
    return run
