"""A LightningModule and a LightningDataModule. Nothing in this file knows of federated learning."""

from collections.abc import Sequence

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


class LitDigits(L.LightningModule):
    def __init__(self, lr: float = 0.1, width: int = 64, label_smoothing: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))
        self.train_acc = MulticlassAccuracy(10, average="micro")
        self.val_acc = MulticlassAccuracy(10, average="micro")
        self.val_f1 = MulticlassF1Score(10)
        self.test_acc = MulticlassAccuracy(10, average="micro")

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        scores = self(images)
        loss = cross_entropy(scores, labels, label_smoothing=self.hparams.label_smoothing)
        self.train_acc(scores, labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        scores = self(images)
        self.val_acc(scores, labels)
        self.val_f1(scores, labels)
        self.log("val_loss", cross_entropy(scores, labels), prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)
        self.log("val_f1", self.val_f1)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.test_acc(self(images), labels)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=1e-4)
        steps = self.trainer.estimated_stepping_batches
        warmup = LinearLR(optimizer, start_factor=0.1, total_iters=steps // 10)
        cosine = CosineAnnealingLR(optimizer, T_max=steps - steps // 10)
        schedule = SequentialLR(optimizer, [warmup, cosine], milestones=[steps // 10])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DigitsData(L.LightningDataModule):
    """scikit-learn's digits, or the digits of some classes."""

    def __init__(self, classes: Sequence[int] = range(10), batch_size: int = 32):
        super().__init__()
        self.classes, self.batch_size = list(classes), batch_size

    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        labels = torch.tensor(digits.target)
        # split before the classes are chosen, so that no site trains on evaluation samples
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        splits = order.tensor_split([1000, 1400])
        chosen = [split[torch.isin(labels[split], torch.tensor(self.classes))] for split in splits]
        self.train, self.val, self.test = (TensorDataset(images[rows], labels[rows]) for rows in chosen)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=256)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=256)
