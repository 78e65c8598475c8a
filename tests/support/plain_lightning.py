"""Clients and rounds by Lightning alone, as a reference for modules that users write."""

import re
from contextlib import contextmanager

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.models.dropout import Dropout, convert_dropout, dropout_keys
from fl_lightning.randomness import derive_seed, seed_global
from fl_lightning.testing import ClientStates
from tests.support.lightning_sites import CLASSES, FEATURES, TRAINER, Site, federated, sites

BATCH = 8


class Small(L.LightningModule):
    """A classifier whose subclasses add a penalty to the loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1]) + self.penalty(batch)

    def penalty(self, batch):
        return 0.0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.3)


class EvaluatedAtOnce(Site):
    """A site with one batch of evaluation data, as BN needs two samples."""

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=7)


class SeedsOfSteps(L.Callback):
    """Seeds each local step in Lightning as a round seeds it."""

    def __init__(self, number, client):
        self.number, self.client = number, client

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        key = dropout_keys(0, self.number, [self.client], batch_idx)[0]
        for layer in pl_module.modules():
            if isinstance(layer, Dropout):
                layer.key.copy_(key)
        seed_global(derive_seed(0, "model", self.number, self.client, batch_idx), pl_module.device)


class Number:
    """A helper object that keeps a number."""

    value = 0.0


def squares(parameters):
    """Return the sum of the squares of all parameters."""
    return sum(parameter.square().sum() for parameter in parameters)


def new(kind, dtype=torch.float32):
    """Make a module whose tensors have the same values in each call, those in lists, too."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        return kind()
    finally:
        torch.set_default_dtype(before)


def tensors(module):
    """Return copies of a module's parameters and persistent buffers by name."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def lightning_client(module, site, number=1, client=0, steps=2, precision="32-true"):
    """Train a module on a site's batches with Lightning's trainer, as an epoch that follows ``number - 1`` epochs."""
    settings = {"max_epochs": number, "limit_val_batches": 0, "precision": precision, **TRAINER}
    trainer = L.Trainer(callbacks=[SeedsOfSteps(number, client)], **settings)
    epochs, loop = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop
    epochs.current.processed = epochs.current.completed = number - 1
    loop.automatic_optimization.optim_progress.optimizer.step.total.completed = (number - 1) * steps
    trainer.fit(module, datamodule=site)
    return trainer


def lightning_rounds(kind, rounds=1, steps=2, count=2, dtype=torch.float32):
    """Train copies of the server's module with Lightning, and average their parameters and buffers.

    Returns:
        The clients' tensors by round, from 0, and the server's tensors.
    """
    precision = "64-true" if dtype == torch.float64 else "32-true"
    server, of_rounds = None, []
    for number in range(1, rounds + 1):
        sent = []
        for client in range(count):
            module = new(kind, dtype)
            convert_dropout(module)
            module.load_state_dict(server or tensors(module))
            lightning_client(module, Site(client, train=BATCH * steps), number, client, steps, precision)
            sent.append(tensors(module))
        server = {name: _average([state[name] for state in sent]) for name in sent[0]}
        of_rounds.append(sent)
    return of_rounds, server


def _average(values):
    stacked = torch.stack(values)
    return stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0)


def check_equals_lightning(kind, rounds=3, steps=2, tolerance=0.0, **settings):
    """Check clients before aggregation in float32, and the server after several rounds to 1e-9.

    Args:
        kind: Class of the module.
        rounds: Number of rounds.
        steps: Local steps in a round.
        tolerance: Accepted difference of clients in float32; None does not check them.
        settings: Further arguments of the federated run.
    """
    settings |= {"data": sites(train=BATCH * steps), "local_steps": steps}
    if tolerance is not None:
        seen, (sent,) = ClientStates(), lightning_rounds(kind, 1, steps)[0]
        federated(new(kind), seen, rounds=1, trainer={"precision": "32-true"}, **settings)
        for client, expected in enumerate(sent):
            check_tensors(
                {**tensors(new(kind)), **seen.end[1][client]}, expected, tolerance, f"client {client}"
            )
    run = federated(new(kind, torch.float64), rounds=rounds, **settings)
    check_tensors(
        tensors(run.model), lightning_rounds(kind, rounds, steps, dtype=torch.float64)[1], 1e-9, "server"
    )


def check_tensors(got, expected, tolerance, place):
    """Check that tensors are within a distance of the expected ones."""
    distances = {name: float((got[name] - value).abs().max()) for name, value in expected.items()}
    far = {name: distance for name, distance in distances.items() if not distance <= tolerance}
    assert not far, f"{place}: norm {_norm(expected)}, got {_norm(got)}; distances {far}"


def _norm(state):
    return round(float(torch.cat([x.double().flatten() for x in state.values()]).norm()), 5)


class Metrics(FederatedCallback):
    """The metrics of the newest round, which rank 0 hands back to the process of the test, and complete rounds."""

    role = "observer"

    def __init__(self):
        self.values, self.rounds = {}, 0

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.rounds += 1

    def on_train_end(self, trainer, pl_module):
        self.values.update({n: x for n, x in pl_module.metrics.items() if not n.startswith("time/")})


def trained(kind, data=None, *observers, rounds=1, **settings):
    """Return the metrics of a federated run."""
    seen = Metrics()
    federated(new(kind, torch.float64), seen, *observers, data=data, rounds=rounds, **settings)
    return seen.values


def on_ranks(count):
    """Return the trainer's settings for a number of ranks."""
    return {"devices": count, "strategy": "cohort"}


@contextmanager
def equal_or_refused(name):
    """Accept that a module is refused by the name of the part that cannot be copied."""
    refusal = None
    try:
        yield
    except ConfigurationError as error:
        refusal = str(error)
    assert refusal is None or re.search(name, refusal), refusal
