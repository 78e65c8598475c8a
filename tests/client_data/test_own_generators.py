"""Random numbers of a user's loader: each batch is a function of seed, client and step, or the loader is refused."""

import gc
import random
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

from fl_lightning import ConfigurationError, FederatedDataModule, FederatedModule
from fl_lightning.client_data.loaders import LoaderBatches
from fl_lightning.client_data.own_generators import own_generators
from tests.support.helpers import SGD, SaveRounds, distance, fit, small_cnn

IMAGES = torch.randn(16, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SAMPLES = TensorDataset(IMAGES, torch.arange(16) % 3)


class Noisy(Dataset):
    """Samples with noise from a function."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return IMAGES[index] + self.noise(), index % 3


class Stream(IterableDataset):
    """A stream in an order of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def __len__(self):
        return 16

    def __iter__(self):
        return iter([SAMPLES[index] for index in self.rng.permutation(16)])


class Order(Sampler):
    """A sampler that draws from a NumPy generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def __len__(self):
        return 16

    def __iter__(self):
        return iter(self.rng.permutation(16).tolist())


class BatchOrder(Order):
    """A batch sampler that draws from Python's generator."""

    def __init__(self):
        self.rng = random.Random(5)

    def __len__(self):
        return 4

    def __iter__(self):
        return iter([self.rng.sample(range(16), 4) for _ in range(4)])


class Transform:
    """A transform with two generators; equal seeds would make their numbers equal."""

    def __init__(self):
        self.first, self.second = np.random.default_rng(1), np.random.default_rng(2)

    def __call__(self):
        return self.first.normal() - self.second.normal()


class Slotted:
    """An object with slots in place of attributes."""

    __slots__ = ("rng",)

    def __init__(self):
        self.rng = np.random.default_rng(1)

    def __call__(self):
        return self.rng.normal()

    def __iter__(self):
        return iter(self.rng.permutation(16).tolist())

    def __len__(self):
        return 16


def noisy_collate(rng, batch):
    return torch.stack([x for x, _ in batch]) + rng.normal(), torch.tensor([y for _, y in batch])


def closure():
    rng = np.random.RandomState(3)
    return lambda: rng.normal()


KINDS = {
    "sampler": lambda: DataLoader(SAMPLES, 4, sampler=Order()),
    "batch sampler": lambda: DataLoader(SAMPLES, batch_sampler=BatchOrder()),
    "data set": lambda: DataLoader(Noisy(Transform()), 4),
    "method of a generator": lambda: DataLoader(Noisy(np.random.default_rng(1).normal), 4),
    "subset": lambda: DataLoader(Subset(Noisy(Transform()), range(8)), 4),
    "slots": lambda: DataLoader(Noisy(Slotted()), 4),
    "sampler with slots": lambda: DataLoader(SAMPLES, 4, sampler=Slotted()),
    "closure": lambda: DataLoader(Noisy(closure()), 4),
    "Python": lambda: DataLoader(Noisy(random.Random(1).random), 4),
    "torch": lambda: DataLoader(Noisy(partial(torch.randn, (), generator=torch.Generator())), 4),
    "collate_fn": lambda: DataLoader(SAMPLES, 4, collate_fn=partial(noisy_collate, np.random.default_rng(1))),
    "stream": lambda: DataLoader(Stream(), 4),
    "sampler, by a worker": lambda: DataLoader(SAMPLES, 4, sampler=Order(), num_workers=1),
    "data set, by a worker": lambda: DataLoader(Noisy(Transform()), 4, num_workers=1),
}


class Site(L.LightningDataModule):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def train_dataloader(self):
        return self.make()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_does_not_depend_on_those_read_before(kind):
    in_order = LoaderBatches(Site(KINDS[kind]), 0, seed=3)
    expected = [in_order.train_batch(step)[0] for step in range(9)]
    for step in (8, 2):
        assert torch.equal(LoaderBatches(Site(KINDS[kind]), 0, seed=3).train_batch(step)[0], expected[step])
    assert not torch.equal(expected[0], expected[4])
    assert not torch.equal(expected[0], LoaderBatches(Site(KINDS[kind]), 0, seed=4).train_batch(0)[0])


@pytest.mark.parametrize("kind", ["sampler", "data set", "stream"])
def test_a_run_with_generators_of_its_own_resumes_bit_exactly(kind, tmp_path):
    def start(**settings):
        data = FederatedDataModule([Site(KINDS[kind]) for _ in range(2)])
        module = FederatedModule(small_cnn(), SGD, local_steps=2)
        fit(module, data, 4, [SaveRounds(tmp_path)], **settings)
        return module.state_dict()

    whole = start()
    assert distance(start(ckpt_path=tmp_path / "3.ckpt"), whole) == 0


class Renamed(DataLoader):
    """A loader of a user's own class."""


class LazyOrder(Order):
    """A sampler that draws each index when it is needed."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        return (int(self.rng.integers(16)) for _ in range(16))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["torch", "NumPy"])
def test_clients_may_share_a_generator(kind, workers):
    def clients():
        if kind == "NumPy":
            order = LazyOrder(np.random.default_rng(1))
        else:
            shared = torch.Generator()
            order = RandomSampler(SAMPLES, replacement=True, num_samples=160, generator=shared)
        loader = Renamed(SAMPLES, 4, sampler=order, num_workers=workers)
        return [LoaderBatches(Site(lambda: loader), client, seed=3) for client in (0, 1)]

    first, second = clients()
    expected = [[x.train_batch(step)[0] for x in (first, second)] for step in range(12)]
    alone, _ = clients()
    for step in (3, 10, 11):
        assert torch.equal(alone.train_batch(step)[0], expected[step][0])


def test_many_samples_are_not_searched(monkeypatch):
    records = {patient: [{"visit": visit} for visit in range(9)] for patient in range(900)}
    data, searched = Noisy(random.Random(1)), []
    data.records = records
    referents = gc.get_referents
    monkeypatch.setattr(gc, "get_referents", lambda part: searched.append(part) or referents(part))
    assert own_generators([data]) == [data.noise]
    assert len(searched) < 100


def test_two_generators_of_a_data_set_draw_different_numbers():
    batch = LoaderBatches(Site(KINDS["data set"]), 0, seed=3).train_batch(0)[0]
    noise = (batch - IMAGES[:4]).flatten(1)[:, 0]
    assert noise.abs().min() > 0
    assert noise.unique().numel() == 4


GLOBAL = np.random.default_rng(1)


class GlobalOrder(Order):
    """A sampler that draws from a global variable."""

    def __init__(self):
        pass

    def __iter__(self):
        return iter(GLOBAL.permutation(16).tolist())


class Counting(Order):
    """A sampler whose order depends on how often it was iterated."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(16).tolist())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: DataLoader(Noisy(lambda: GLOBAL.normal()), 4), "batch"),
        (lambda: DataLoader(SAMPLES, 4, sampler=GlobalOrder()), "order of BatchSampler"),
        (lambda: DataLoader(SAMPLES, 4, sampler=Counting()), "order of BatchSampler"),
        (lambda: DataLoader(Noisy(lambda: np.random.default_rng().normal()), 4), "batch"),
    ],
    ids=["data set", "sampler", "epochs counted by itself", "unseeded"],
)
def test_numbers_that_no_seed_decides_are_refused(make, what):
    data = FederatedDataModule([Site(lambda: DataLoader(SAMPLES, 4)), Site(make)])
    message = rf"clients\[1\]\.train_dataloader\(\): the {what} differs if it is drawn again .* an attribute, and obey set_epoch"
    with pytest.raises(ConfigurationError, match=message):
        fit(FederatedModule(small_cnn(), SGD, local_steps=1), data, 1)


def test_persistent_workers_are_refused():
    site = Site(lambda: DataLoader(SAMPLES, 4, num_workers=1, persistent_workers=True))
    with pytest.raises(ConfigurationError, match=r"persistent_workers=True: .* use persistent_workers=False"):
        FederatedDataModule([site]).num_examples(0)


def test_generators_of_training_itself_are_not_searched():
    class Holder:
        def __init__(self):
            self.trainer = L.Trainer(logger=False, accelerator="cpu", barebones=True)
            self.trainer.rng = np.random.default_rng(1)
            self.module = torch.nn.Module()
            self.module.rng = random.Random(1)
            self.large = [random.Random(number) for number in range(2000)]
            self.itself = self

    assert [type(found) for found in own_generators([Holder()])] == [random.Random]
