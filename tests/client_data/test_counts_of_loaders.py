"""Samples, batches and weights of a client, for each kind of loader that PyTorch's users write."""

from dataclasses import dataclass

import lightning as L
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fl_lightning import FederatedDataModule
from fl_lightning.client_data.loaders import LoaderBatches
from fl_lightning.round.plan import RoundPlan

SAMPLES = TensorDataset(torch.arange(20.0).reshape(20, 1), torch.arange(20) % 2)
PART = [1, 3, 5, 7, 9, 11, 13]


class Batches(Dataset):
    """Ready batches of 3, 3 and 1 samples."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return SAMPLES[[*range(20)][3 * index : min(3 * index + 3, 7)]]


class ByName(Dataset):
    """Samples that are found by their names."""

    def __getitem__(self, name):
        return SAMPLES[int(name[1:])]


class Stream(IterableDataset):
    """Seven samples, or ready batches of them, in order."""

    def __init__(self, ready=False, sized=True):
        self.ready, self.length = ready, (3 if ready else 7) if sized else None

    def __len__(self):
        if self.length is None:
            raise TypeError("no length")
        return self.length

    def __iter__(self):
        return (
            iter(Batches()[index] for index in range(3)) if self.ready else iter(SAMPLES[i] for i in range(7))
        )


class OwnBatches(Sampler):
    """Batches of a user's own batch sampler."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([(1, 3, 5), torch.tensor([7, 9, 11]), [1, torch.tensor(3)]])


class OwnOrder(Sampler):
    """A user's own sampler, which draws one sample twice."""

    def __len__(self):
        return 8

    def __iter__(self):
        return iter([*PART, 1])


class Twice(DataLoader):
    """A loader of a user's own class, which gives each batch twice."""

    def __len__(self):
        return 2 * super().__len__()

    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch)


class Renamed(DataLoader):
    """A loader of a user's own class, which changes nothing."""


@dataclass
class Kind:
    """A loader, and its numbers of samples and of batches and the samples of all batches."""

    loader: object
    examples: int
    steps: int
    drawn: int


def random_part():
    return SubsetRandomSampler(PART)


KINDS = {
    "shuffled": Kind(DataLoader(SAMPLES, 3, shuffle=True), 20, 7, 20),
    "drop_last": Kind(DataLoader(SAMPLES, 3, shuffle=True, drop_last=True), 20, 6, 18),
    "subset": Kind(DataLoader(Subset(SAMPLES, PART), 3), 7, 3, 7),
    "sampler": Kind(DataLoader(SAMPLES, 3, sampler=random_part()), 7, 3, 7),
    "own sampler": Kind(DataLoader(SAMPLES, 3, sampler=OwnOrder()), 7, 3, 8),
    "weighted": Kind(
        DataLoader(SAMPLES, 3, sampler=WeightedRandomSampler([1.0] * 5 + [0.0] * 15, 9)), 5, 3, 9
    ),
    "batch sampler of a subset": Kind(
        DataLoader(SAMPLES, batch_sampler=BatchSampler(random_part(), 3, False)), 7, 3, 7
    ),
    "batch sampler that drops": Kind(
        DataLoader(SAMPLES, batch_sampler=BatchSampler(random_part(), 3, True)), 7, 2, 6
    ),
    "batch sampler with weights": Kind(
        DataLoader(
            SAMPLES, batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 5 + [0.0] * 15, 9), 3, False)
        ),
        5,
        3,
        9,
    ),
    "batch sampler of an own sampler": Kind(
        DataLoader(SAMPLES, batch_sampler=BatchSampler(OwnOrder(), 3, False)), 7, 3, 8
    ),
    "own batch sampler": Kind(DataLoader(SAMPLES, batch_sampler=OwnBatches()), 6, 3, 8),
    "list of batches of indices": Kind(DataLoader(SAMPLES, batch_sampler=[[0, 1, 2], [2, 3]]), 4, 2, 5),
    "sampler of lists": Kind(
        DataLoader(SAMPLES, batch_size=None, sampler=BatchSampler(RandomSampler(SAMPLES), 3, False)),
        20,
        7,
        20,
    ),
    "sampler of lists of a subset": Kind(
        DataLoader(SAMPLES, batch_size=None, sampler=BatchSampler(random_part(), 3, False)), 7, 3, 7
    ),
    "tensors of indices": Kind(
        DataLoader(SAMPLES, batch_size=None, sampler=[torch.tensor([0, 1, 2]), torch.tensor([2, 3])]), 4, 2, 5
    ),
    "slices": Kind(DataLoader(SAMPLES, batch_size=None, sampler=[slice(0, 3), slice(3, 20, 4)]), 8, 2, 8),
    "single samples": Kind(DataLoader(SAMPLES, batch_size=None, sampler=random_part()), 7, 7, 7),
    "ready batches": Kind(DataLoader(Batches(), batch_size=None), 7, 3, 7),
    "ready batches, shuffled": Kind(DataLoader(Batches(), batch_size=None, shuffle=True), 7, 3, 7),
    "ready batches, some": Kind(DataLoader(Batches(), batch_size=None, sampler=[0, 2, 0]), 4, 3, 7),
    "names": Kind(DataLoader(ByName(), 3, sampler=[f"n{i}" for i in PART]), 7, 3, 7),
    "workers": Kind(DataLoader(SAMPLES, 3, sampler=random_part(), num_workers=1), 7, 3, 7),
    "workers, ready batches": Kind(DataLoader(Batches(), batch_size=None, num_workers=1), 7, 3, 7),
    "iterable": Kind(DataLoader(Stream(), 3), 7, 3, 7),
    "iterable, drop_last": Kind(DataLoader(Stream(), 3, drop_last=True), 7, 2, 6),
    "iterable of ready batches": Kind(DataLoader(Stream(ready=True), batch_size=None), 7, 3, 7),
    "own class": Kind(Renamed(SAMPLES, 3, sampler=random_part()), 7, 3, 7),
    "own class that repeats": Kind(Twice(SAMPLES, 3, sampler=SequentialSampler(range(4))), 8, 4, 8),
    "list of batches": Kind([Batches()[0], Batches()[2]], 4, 2, 4),
}


class Site(L.LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_counted_as_the_loader_gives_them(kind):
    expected = KINDS[kind]
    data = FederatedDataModule([Site(expected.loader), Site(DataLoader(SAMPLES, 4, sampler=[*range(5)]))])
    source = LoaderBatches(data.clients[0], 0, seed=2)
    assert (source.num_examples, source.steps_per_epoch) == (expected.examples, expected.steps)
    assert source.samples_per_step == pytest.approx(expected.drawn / expected.steps)
    epoch = [source.train_batch(step)[1] for step in range(expected.steps)]
    assert sum(targets.numel() for targets in epoch) == expected.drawn
    plan = RoundPlan(data, None, 1, 2, seed=0)
    total = expected.examples + 5
    assert plan.weights([0, 1], 1).tolist() == [expected.examples / total, 5 / total]


def test_ready_batches_of_graphs_count_their_first_tensor():
    graphs = [(torch.zeros(nodes, 1), torch.zeros(2, edges)) for nodes, edges in ((5, 7), (4, 2))]
    source = LoaderBatches(Site(graphs), 0, seed=0)
    assert (source.num_examples, source.samples_per_step) == (9, 4.5)


def test_clients_with_batch_samplers_over_parts_of_shared_data_weigh_their_parts():
    # a weight of 1/3 each was wrong: torch gives such a loader a default sampler over all samples
    shared = TensorDataset(torch.zeros(60, 1), torch.zeros(60))
    parts = [range(4), range(4, 16), range(16, 60)]
    sites = [
        Site(DataLoader(shared, batch_sampler=BatchSampler(SubsetRandomSampler(part), 4, False)))
        for part in parts
    ]
    data = FederatedDataModule(sites)
    plan = RoundPlan(data, None, 1, 3, seed=0)
    assert data.partition_record()["sizes"] == [4, 12, 44]
    assert plan.weights([0, 1, 2], 1).tolist() == [4 / 60, 12 / 60, 44 / 60]
    assert plan.limit(2.0) == 2
    # another subset of the same size is other data
    other = FederatedDataModule(
        [*sites[:2], Site(DataLoader(shared, batch_sampler=BatchSampler(range(15, 59), 4, False)))]
    )
    assert data.fingerprint()["training"] != other.fingerprint()["training"]
