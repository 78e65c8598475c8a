"""Small federations, models and reference trainers that the tests share."""

import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedCallback, FederatedDataModule, FederatedModule
from fl_lightning.datamodules import CIFAR10

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
        inputs = torch.randn(n, *shape, generator=generator, dtype=torch.float64) * (1 + i) + targets.view(
            -1, 1, 1, 1
        )
        clients.append(ArrayClient(inputs, targets, batch_size))
    server = ArrayClient(
        torch.cat([c.dataset.tensors[0] for c in clients]),
        torch.cat([c.dataset.tensors[1] for c in clients]),
        batch_size,
    )
    return FederatedDataModule(clients, server, seed=seed)


def uneven_clients(batches=(8, 8, 8), examples=(24, 60, 40), shape=(2, 6, 6), classes=3):
    """Clients of different means and variances whose batches are not in proportion to their data."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        ArrayClient(
            (1 + i) * torch.randn(count, *shape, generator=generator, dtype=torch.float64) + 4 * i,
            torch.randint(classes, (count,), generator=generator),
            size,
        )
        for i, (size, count) in enumerate(zip(batches, examples, strict=True))
    ]
    return FederatedDataModule(clients, clients[0])


def small_cnn(norm="bn", dropout=0.0, seed=0, classes=3, channels=2):
    torch.manual_seed(seed)

    def make_norm(width):
        return {"bn": nn.BatchNorm2d, "gn": partial(nn.GroupNorm, 2), "none": lambda _: nn.Identity()}[norm](
            width
        )

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
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
    }
    runner = L.Trainer(max_epochs=rounds, callbacks=list(callbacks), **{**settings, **trainer})
    with warnings.catch_warnings():
        # Lightning's own use of a class that torch 2.15 deprecates, and its advice on worker processes
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        warnings.filterwarnings("ignore", ".*does not have many workers")
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


class States(Callback):
    """Keeps a copy of the server's state after each round: ``states[r]`` after round r, ``states[0]`` the initial one."""

    def __init__(self):
        self.states = []

    def on_train_start(self, trainer, pl_module):
        self.states.append(deepcopy(pl_module.state_dict()))

    def on_train_epoch_end(self, trainer, pl_module):
        self.states.append(deepcopy(pl_module.state_dict()))


class Rows(Callback):
    """The row of metrics of each round."""

    def __init__(self):
        self.rows = {}

    def on_train_epoch_start(self, trainer, pl_module):
        if pl_module.metrics.get("round", 0) == trainer.current_epoch > 0:
            self.rows[trainer.current_epoch] = dict(pl_module.metrics)

    def on_train_end(self, trainer, pl_module):
        self.rows[pl_module.metrics["round"]] = dict(pl_module.metrics)


class ClientStates(FederatedCallback):
    """Keeps what every client starts and ends its local steps with: ``start[r][client][name]``."""

    def __init__(self):
        self.start, self.end = {}, {}

    def on_round_start(self, trainer, pl_module, cohort):
        self.start[cohort.round] = self._states(cohort)

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.end[cohort.round] = self._states(cohort)

    @staticmethod
    def _states(cohort):
        return {
            client: {
                name: value.clone()
                for name, value in (cohort.params.row(row) | cohort.buffers.row(row)).items()
            }
            for row, client in enumerate(cohort.client_ids)
        }


class SaveRounds(Checkpoint):
    """Saves a checkpoint ``<round>.ckpt`` at the end of each round."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"{pl_module.round}.ckpt")


def client_batch(data, client, step):
    """The batch that a client draws at a local step, counted from the start of training."""
    return data.cohort_batch([client], [step]).batches()[0]


def union_batch(data, step):
    """The batches that all clients draw at a local step, as one batch."""
    rows = data.cohort_batch(range(data.num_clients), [step] * data.num_clients).batches()
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def union_of(data, clients, steps):
    """The batches of some clients at their local steps (``steps``: a list for each), as one batch."""
    pairs = [(client, step) for client, own in zip(clients, steps, strict=True) for step in own]
    rows = [client_batch(data, client, step) for client, step in pairs]
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def plain_step(model, optimizer, batch):
    """One step of ordinary PyTorch."""
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def centralised(model, data, steps, optimizer=SGD, rates=(), first=0, frozen_statistics=False):
    """One model trained on the union of the clients' batches: what FedAvg with E=1 is compared with.

    ``rates[k]`` is the learning rate of step k where rates are given; ``first`` is the data's step that it starts from.
    """
    model = deepcopy(model).double().train()
    for layer in model.modules():
        if frozen_statistics and isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    stepper = optimizer(model.parameters())
    for step in range(steps):
        if rates:
            stepper.param_groups[0]["lr"] = rates[step]
        plain_step(model, stepper, union_batch(data, first + step))
    return model.state_dict()


def by_hand(
    model, data, rounds, *, optimizer=SGD, steps=None, cohort=None, weights=None, keep=False, server=None
):
    """Federated training with separate models and optimizers per client, averaged in a loop.

    Args:
        steps: Local steps of a client; 1 for all unless given.
        cohort: The clients of a round; all unless given.
        weights: Unnormalised aggregation weight of a client; equal unless given.
        keep: Clients keep their optimizer's state between rounds.
        server: The server's new parameter, from (name, old, average); the average unless given.

    Returns:
        The server's state and each client's optimizer state.
    """
    model = deepcopy(model).double().train()
    trained, memory = dict(model.named_parameters()), {}
    for round_number in range(1, rounds + 1):
        clients = cohort(round_number) if cohort else range(data.num_clients)
        states = []
        for client in clients:
            local = deepcopy(model)
            stepper = optimizer(local.parameters())
            if keep and client in memory:
                stepper.load_state_dict(memory[client])
            count = steps[client] if steps else 1
            for step in range(count):
                plain_step(local, stepper, client_batch(data, client, (round_number - 1) * count + step))
            memory[client] = deepcopy(stepper.state_dict())
            states.append(local.state_dict())
        shares = [weights[client] if weights else 1 for client in clients]
        for name, old in model.state_dict().items():
            held = [state[name] for state in states]
            if old.is_floating_point():
                new = sum(share * value for share, value in zip(shares, held, strict=True)) / sum(shares)
                old.copy_(server(name, old.clone(), new) if server and name in trained else new)
            else:
                old.copy_(torch.stack(held).amax(0))
    return model.state_dict(), memory


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
