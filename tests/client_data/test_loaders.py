"""Loaders of every kind give the batches of a position, whatever was drawn before."""

import lightning as L
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fl_lightning import ClientDataModule, ConfigurationError, FederatedDataModule, FederatedModule
from fl_lightning.client_data.loaders import LoaderBatches
from fl_lightning.round.plan import RoundPlan
from tests.support.helpers import SGD, ArrayClient, SaveRounds, distance, fit, small_cnn


class Counting(TensorDataset):
    """Counts the samples that are fetched."""

    fetched = 0

    def __getitem__(self, index):
        type(self).fetched += 1
        return super().__getitem__(index)


class Client(L.LightningDataModule):
    def __init__(self, seed=0, size=47, **loader):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)
        self.dataset = Counting(inputs, torch.arange(size) % 3)
        self.loader = {"batch_size": 8, "shuffle": True, "drop_last": True, **loader}

    def train_dataloader(self):
        settings = dict(self.loader)
        if settings.pop("own_generator", False):
            settings["generator"] = torch.Generator().manual_seed(7)
        return DataLoader(self.dataset, **settings)


KINDS = {
    "shuffled": {},
    "with a generator of its own": {"own_generator": True},
    "in worker processes": {"num_workers": 1},
    "in order": {"shuffle": False},
    "sample by sample": {"batch_size": None, "drop_last": False, "shuffle": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_is_the_same_at_random_access_as_in_order(kind):
    in_order = LoaderBatches(Client(**KINDS[kind]), 0, seed=3)
    expected = [in_order.train_batch(step) for step in range(2 * in_order.steps_per_epoch)]
    for step in (9, 2, len(expected) - 1, 0, 2):
        single = LoaderBatches(Client(**KINDS[kind]), 0, seed=3)
        assert torch.equal(single.train_batch(step)[0], expected[step][0])


@pytest.mark.parametrize("own_generator", [False, True])
def test_epochs_are_shuffled_anew_and_each_is_a_pass_over_the_data(own_generator):
    batches = LoaderBatches(Client(size=48, own_generator=own_generator), 0, seed=3)
    first, second = (torch.cat([batches.train_batch(6 * e + i)[0] for i in range(6)]) for e in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first.flatten(1).sum(1).sort().values, second.flatten(1).sum(1).sort().values)


def test_a_jump_to_a_position_fetches_its_own_batch_only():
    batches = LoaderBatches(Client(size=400), 0, seed=3)
    batches.train_batch(0)  # read twice, to see that it repeats
    Counting.fetched = 0
    batches.train_batch(40)
    assert Counting.fetched == 8


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_run_on_such_loaders_resumes_bit_exactly(own_generator, tmp_path):
    def start(rounds, **settings):
        data = FederatedDataModule([Client(seed, own_generator=own_generator) for seed in range(3)])
        module = FederatedModule(small_cnn(), SGD, local_steps=2, participation=2)
        fit(module, data, rounds, [SaveRounds(tmp_path)], **settings)
        return module.state_dict()

    whole = start(6)
    assert distance(start(6, ckpt_path=tmp_path / "3.ckpt"), whole) == 0


def test_a_budget_counts_the_samples_that_are_really_seen():
    data = FederatedDataModule([Client(seed) for seed in range(4)])
    plan = RoundPlan(data, local_steps=1, local_epochs=None, cohort_size=4, seed=0)
    assert data.samples_per_step(0) == 8
    assert plan.limit(10) == 10 * 4 * 47 // (4 * 8)


def test_the_last_short_batch_counts_on_average():
    data = FederatedDataModule([ArrayClient(torch.zeros(10, 1), torch.zeros(10), 4)])
    data.clients[0].train_dataloader = lambda: DataLoader(data.clients[0].dataset, 4)
    assert data.samples_per_step(0) == pytest.approx(10 / 3)


class OwnLoader(DataLoader):
    """A loader of a user's own class."""


class Shared(L.LightningDataModule):
    """A part of a data set that several clients share."""

    dataset = TensorDataset(torch.zeros(60, 2, 6, 6, dtype=torch.float64), torch.arange(60) % 3)

    def __init__(self, part, sampling):
        super().__init__()
        self.part, self.sampling = list(part), sampling

    def train_dataloader(self):
        sampler = SubsetRandomSampler(self.part)
        if self.sampling == "batch_sampler":
            batches = [self.part[start : start + 4] for start in range(0, len(self.part), 4)]
            return DataLoader(self.dataset, batch_sampler=batches)
        if self.sampling == "sample by sample":
            return DataLoader(self.dataset, batch_size=None, sampler=sampler)
        if self.sampling == "one by one from a list":
            return DataLoader(self.dataset, batch_size=None, sampler=[*self.part])
        if self.sampling == "a subclass":
            return OwnLoader(self.dataset, 4, sampler=sampler)
        if self.sampling == "a list of batches":
            return list(DataLoader(self.dataset, 4, sampler=sampler))
        return DataLoader(self.dataset, 4, sampler=sampler, drop_last=self.sampling == "drop_last")


@pytest.mark.parametrize(
    "sampling",
    [
        "sampler",
        "drop_last",
        "batch_sampler",
        "sample by sample",
        "one by one from a list",
        "a subclass",
        "a list of batches",
    ],
)
def test_clients_that_share_a_data_set_count_their_own_part(sampling):
    parts = [range(4), range(4, 16), range(16, 60)]
    data = FederatedDataModule([Shared(part, sampling) for part in parts])
    data.setup("fit")
    assert data.partition_record()["sizes"] == [4, 12, 44]
    assert [data.samples_per_step(client) for client in range(3)] == [1 if "by" in sampling else 4] * 3
    assert data.cohort_batch([1], [0]).batches()[0][1].shape == (() if "by" in sampling else (4,))
    plan = RoundPlan(data, None, 1, 3, seed=0)
    assert plan.weights([0, 1, 2], 1).tolist() == [4 / 60, 12 / 60, 44 / 60]
    assert plan.limit(2.0) == 2


class OneShot(list):
    """An iterator that has a length."""

    def __next__(self):
        return self.pop()

    def __iter__(self):
        return self


def test_an_iterator_that_gives_its_batches_only_once_is_refused():
    class Once(Shared):
        def train_dataloader(self):
            return OneShot([torch.zeros(4, 1)])

    with pytest.raises(
        ConfigurationError, match=r"clients\[0\].* is an iterator, .* ClientDataModule with num_examples"
    ):
        FederatedDataModule([Once([], "")]).num_examples(0)


class Drops(ClientDataModule):
    """Batches of 8, of which an incomplete one is dropped or kept."""

    def __init__(self, size, drop_last=True):
        super().__init__()
        self.num_examples, self.steps_per_epoch = size, size // 8 if drop_last else -(-size // 8)

    def train_batch(self, step):
        first = 8 * (step % self.steps_per_epoch)
        size = min(8, self.num_examples - first)
        return torch.zeros(size, 1), torch.zeros(size)


@pytest.mark.parametrize(
    ("client", "size", "rounds"), [(Drops(15), 8, 18), (Drops(16), 8, 10), (Drops(15, False), 7.5, 10)]
)
def test_a_client_data_module_counts_the_samples_of_its_batches(client, size, rounds):
    data = FederatedDataModule([client])
    assert data.samples_per_step(0) == size
    assert RoundPlan(data, None, 1, 1, seed=0).limit(10) == rounds


def test_indices_that_a_batch_sampler_gives_twice_are_one_example():
    class Twice(Shared):
        def train_dataloader(self):
            return DataLoader(self.dataset, batch_sampler=[[0, 1, 2], [2, 3, 4, 5, 0]])

    source = LoaderBatches(Twice([], ""), 0, seed=0)
    assert (source.num_examples, source.samples_per_step) == (6, 4)


class Repeated(Sampler):
    """Three passes over a part of a data set."""

    def __init__(self, part):
        self.part = part

    def __len__(self):
        return 3 * len(self.part)

    def __iter__(self):
        return iter([*self.part] * 3)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    ("make", "examples", "drawn"),
    [
        (lambda data: RandomSampler(data, replacement=True, num_samples=400), 60, 400),
        (lambda data: RandomSampler(data, num_samples=20), 60, 20),
        (lambda data: WeightedRandomSampler([0.0] * 20 + [0.5] * 40, 400), 40, 400),
        (lambda data: Repeated(range(12)), 12, 36),
    ],
    ids=["replacement", "a part of each epoch", "weighted", "own"],
)
def test_a_client_weighs_its_samples_however_often_its_sampler_draws_them(make, examples, drawn, batched):
    class Drawn(Shared):
        def train_dataloader(self):
            return DataLoader(self.dataset, 4 if batched else None, sampler=make(self.dataset))

    data = FederatedDataModule([Drawn([], ""), Shared(range(20), "sampler")])
    data.setup("fit")
    assert data.num_examples(0) == examples
    assert data.samples_per_step(0) * data.steps_per_epoch(0) == drawn
    plan = RoundPlan(data, None, 1, 2, seed=0)
    assert plan.weights([0, 1], 1).tolist() == [examples / (examples + 20), 20 / (examples + 20)]
