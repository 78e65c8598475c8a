"""Small federations, models and reference trainers that the tests share."""

from functools import partial

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedDataModule, FederatedModule

SGD = partial(torch.optim.SGD, lr=0.1)


class ArrayClient(L.LightningDataModule):
    """A client as a user would write it: a dataset of its own behind an ordinary, shuffling DataLoader."""

    def __init__(self, inputs, targets, batch_size):
        super().__init__()
        self.dataset = TensorDataset(inputs, targets)
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.dataset, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.dataset, 64)

    def test_dataloader(self):
        return DataLoader(self.dataset, 64)


def blobs(num_clients=3, sizes=(40, 40, 40), batch_size=8, seed=0, shape=(2, 6, 6), classes=3):
    """Label-skewed clients: client i sees mostly class i % classes, shifted by its own mean."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for i in range(num_clients):
        n = sizes[i % len(sizes)]
        targets = torch.where(
            torch.rand(n, generator=generator) < 0.8,
            torch.tensor(i % classes),
            torch.randint(classes, (n,), generator=generator),
        )
        inputs = torch.randn(n, *shape, generator=generator, dtype=torch.float64) * (1 + i) + targets.view(-1, 1, 1, 1)
        clients.append(ArrayClient(inputs, targets, batch_size))
    server = ArrayClient(
        torch.cat([c.dataset.tensors[0] for c in clients]), torch.cat([c.dataset.tensors[1] for c in clients]), batch_size
    )
    return FederatedDataModule(clients, server, seed=seed)


def small_cnn(norm="bn", dropout=0.0, seed=0, classes=3, channels=2):
    torch.manual_seed(seed)

    def make_norm(width):
        return {"bn": nn.BatchNorm2d, "gn": partial(nn.GroupNorm, 2), "none": lambda _: nn.Identity()}[norm](width)

    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), make_norm(4), nn.ReLU(), nn.Conv2d(4, 6, 3), make_norm(6), nn.ReLU(),
        nn.Dropout(dropout), nn.Flatten(), nn.Linear(24, classes),
    )  # fmt: skip


def fit(module, data, rounds, callbacks=(), ckpt_path=None, **trainer):
    """Train in float64 and return the trainer."""
    settings = {
        "accelerator": "cpu",
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    runner = L.Trainer(max_epochs=rounds, callbacks=list(callbacks), **{**settings, **trainer})
    runner.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return runner


def train(model, data, rounds, callbacks=(), trainer=None, **settings):
    """Federated training; returns the server's final state."""
    settings = {"client_optimizer": SGD, "local_steps": 1, **settings}
    module = FederatedModule(model, **settings)
    fit(module, data, rounds, callbacks, **(trainer or {}))
    return {name: value.clone() for name, value in module.state_dict().items()}


def distance(first, second):
    """Largest absolute difference between two states."""
    return max(float((first[name] - second[name]).abs().max()) for name in first)
