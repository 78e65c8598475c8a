"""Evaluations do not change training, and neither ranks nor observers change an evaluation."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fl_lightning import FederatedDataModule, callbacks
from tests.support.lightning_sites import Lit, Site, federated, sites
from tests.support.plain_lightning import (
    EvaluatedAtOnce,
    Number,
    Small,
    check_tensors,
    new,
    on_ranks,
    tensors,
    trained,
)

pytestmark = pytest.mark.first_steps


class Threshold(Small):
    """Trains with a level that an evaluation has set."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(5))
        self.make()

    def make(self):
        self.level = 0.0

    def read(self):
        return self.level

    def write(self, value):
        self.level = value

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.seen = self.net(batch[0]).detach().square().mean()

    def on_validation_epoch_end(self):
        self.write(float(self.seen))

    def forward(self, inputs):
        return self.net(inputs)

    def penalty(self, batch):
        return self.read() * self.net(batch[0]).square().mean()


class ThresholdInBuffer(Threshold):
    def make(self):
        self.register_buffer("level", torch.zeros(()))

    def write(self, value):
        self.level.fill_(value)


class ThresholdInPrivateAttribute(Threshold):
    _level = 0.0

    def read(self):
        return self._level

    def write(self, value):
        self._level = value


class ThresholdInSubmodule(ThresholdInPrivateAttribute):
    def read(self):
        return getattr(self.net, "level", 0.0)

    def write(self, value):
        self.net.level = value


class ThresholdInList(Threshold):
    def make(self):
        self.level = [0.0]

    def read(self):
        return self.level[0]

    def write(self, value):
        self.level[0] = value


class ThresholdAppended(ThresholdInList):
    def read(self):
        return self.level[-1]

    def write(self, value):
        self.level.append(value)


class ThresholdInDict(ThresholdInList):
    def make(self):
        self.level = {0: 0.0}


class ThresholdInHelper(Threshold):
    def make(self):
        self.level = Number()

    def read(self):
        return self.level.value

    def write(self, value):
        self.level.value = value


class ThresholdInParameter(Threshold):
    def make(self):
        self.level = nn.Parameter(torch.zeros(()), requires_grad=False)

    def write(self, value):
        self.level.data.fill_(value)


PLACES = [
    Threshold,
    ThresholdInBuffer,
    ThresholdInPrivateAttribute,
    ThresholdInSubmodule,
    ThresholdInList,
    ThresholdAppended,
    ThresholdInDict,
    ThresholdInHelper,
    ThresholdInParameter,
]


@pytest.mark.parametrize(
    ("kind", "observer"),
    list(product(PLACES, (callbacks.ClientEvaluation, callbacks.StatisticsSources, callbacks.AdaBN))),
)
def test_an_observer_does_not_change_training(kind, observer):
    data = FederatedDataModule(
        {f"site {number}": EvaluatedAtOnce(number) for number in range(2)}, server=EvaluatedAtOnce(99)
    )
    settings = {"data": data, "rounds": 3, "trainer": {"num_sanity_val_steps": 0}}
    alone = tensors(federated(new(kind, torch.float64), **settings).model)
    watched = tensors(federated(new(kind, torch.float64), observer(), **settings).model)
    unread = federated(new(kind, torch.float64), **{**settings, "trainer": {"limit_val_batches": 0}}).model
    check_tensors(watched, alone, 0.0, "server")
    assert not torch.equal(alone["net.0.weight"], unread.net[0].weight)  # the level counts


@pytest.mark.parametrize("kind", PLACES)
def test_the_number_of_evaluated_clients_does_not_change_training(kind):
    data = FederatedDataModule([EvaluatedAtOnce(0), EvaluatedAtOnce(1)], server=EvaluatedAtOnce(99))
    one, two = (
        tensors(federated(new(kind, torch.float64), callbacks.FedBN(count), data=data, rounds=3).model)
        for count in (1, 2)
    )
    check_tensors(two, one, 0.0, "server")


class Unmeasurable(EvaluatedAtOnce):
    """A site whose evaluation data make the loss NaN."""

    def setup(self, stage):
        super().setup(stage)
        self.held_out.tensors[0][0] = float("nan")


def made(names):
    """Make callbacks of these names."""
    return [getattr(callbacks, name)() for name in names.split()]


NOT_A_NUMBER = {"clients": {"a": EvaluatedAtOnce(0), "b": Unmeasurable(1), "c": EvaluatedAtOnce(2)}}


@pytest.mark.parametrize(
    ("methods", "name"),
    [
        ("ClientEvaluation", "client_val_loss"),
        ("ClientEvaluation", "own_val_loss"),
        ("ClientEvaluation", "client_val_loss_worst"),
        ("FedBN", "own_val_loss"),
        ("FedBN ClientEvaluation", "own_val_loss"),
        ("AdaBN", "own_val_loss_adabn"),
    ],
)
def test_a_mean_over_clients_contains_the_loss_that_is_nan(methods, name):
    data = FederatedDataModule(server=EvaluatedAtOnce(99), **NOT_A_NUMBER)
    got = trained(lambda: Lit(optimizer="plain"), data, *made(methods))
    assert np.isnan(got[name])
    assert np.isfinite(got["val_loss"])


def test_the_mean_of_clients_without_a_server_contains_the_loss_that_is_nan():
    assert np.isnan(trained(Small, FederatedDataModule(**NOT_A_NUMBER))["val_loss"])


class Noisy(Dataset):
    """Samples with a random transform."""

    def __init__(self, samples, draw):
        self.samples, self.draw = samples, draw

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, targets = self.samples[index]
        return inputs + self.draw(), targets


class RandomTransforms(Site):
    def __init__(self, seed, draw=lambda: torch.randn(())):
        super().__init__(seed)
        self.draw = draw

    def val_dataloader(self):
        return DataLoader(Noisy(self.held_out, self.draw), batch_size=3)


class DrawsAtEnd(Small):
    def on_validation_epoch_end(self):
        self.log("val_draw", torch.rand(()))


class DrawsNumpyAtEnd(Small):
    def on_validation_epoch_end(self):
        self.log("val_draw", float(np.random.rand()))


class DrawsInStep(Small):
    def validation_step(self, batch, batch_idx):
        super().validation_step((batch[0] + torch.randn_like(batch[0]), batch[1]), batch_idx)


def noisy_sites(draw=lambda: torch.randn(())):
    return FederatedDataModule({"a": Site(0), "b": Site(1)}, server=RandomTransforms(99, draw))


def noisy_sites_by_numpy():
    return noisy_sites(np.random.randn)


class Normalised(Lit):
    def __init__(self):
        super().__init__(optimizer="plain")


RANDOM = [
    (Small, noisy_sites),
    (Small, noisy_sites_by_numpy),
    (DrawsAtEnd, sites),
    (DrawsNumpyAtEnd, sites),
]


@pytest.mark.parametrize(
    ("kind", "data", "methods"),
    [
        *((*case, "") for case in RANDOM),
        *((*case, "ClientEvaluation") for case in RANDOM),
        (Normalised, noisy_sites, "FedBN"),
        (Normalised, noisy_sites_by_numpy, "FedBN"),
    ],
)
def test_random_evaluations_are_equal_on_any_number_of_ranks(kind, data, methods):
    one, two = (trained(kind, data(), *made(methods), rounds=2, trainer=on_ranks(ranks)) for ranks in (1, 2))
    assert one == two
    assert "val_loss" in one


@pytest.mark.parametrize(("kind", "data"), [*RANDOM, (DrawsInStep, sites)])
def test_an_observer_does_not_change_random_evaluations(kind, data):
    alone = trained(kind, data(), rounds=2)
    watched = trained(kind, data(), callbacks.ClientEvaluation(), rounds=2)
    assert {name: watched[name] for name in alone} == alone
