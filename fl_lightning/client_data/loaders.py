"""Training batches from a client's ``DataLoader``."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import derive_seed, seeded


class LoaderBatches:
    """Training batches of a client's ``LightningDataModule``, readable in any order.

    The batches come from ``train_dataloader()``. Two seeds make a batch independent of earlier
    batches. The first seed is set before an epoch, and decides the order of the samples. This seed
    depends on the run's seed, the client and the epoch. The second seed is set before a batch is
    read, and depends also on the batch's position in the epoch. Both seeds are set in the global
    generators of torch, numpy and Python, whose state is restored afterwards. The loader's own
    generator is seeded once per epoch.

    If the data set is map-style and the loader has no worker processes, a batch is read directly.
    Any other loader is iterated from the start of the epoch to the batch.

    Args:
        datamodule: The client's data module, already set up.
        client_id: Id of the client, for seeds and error messages.
        seed: The run's seed.

    Attributes:
        num_examples: Number of different training samples that the sampler can draw. For a sampler
            of an unknown class, the number of different samples in the first epoch. For a loader
            that is no ``DataLoader``, the number of samples in the first epoch, which is read to
            count them.
        steps_per_epoch: Number of batches in one pass over the data.
        samples_per_step: Mean batch size in one pass over the data.

    Raises:
        ConfigurationError: The loader has no length, yields no batch, or can be read only once.
    """

    def __init__(self, datamodule: L.LightningDataModule, client_id: int, seed: int) -> None:
        self.client_id = client_id
        self.seed = seed
        place = f"clients[{client_id}].train_dataloader()"
        self.loader: DataLoader[Any] = one_loader(datamodule.train_dataloader(), place)
        try:
            self.steps_per_epoch = len(self.loader)
        except TypeError as error:
            raise ConfigurationError(
                f"{place} has no length; a client needs a loader over a sized dataset"
            ) from error
        if self.steps_per_epoch == 0:
            raise ConfigurationError(
                f"{place} yields no batch: the client has no sample, or fewer samples than a batch with drop_last; "
                "leave the client out, use a smaller batch_size, or drop_last=False"
            )
        self._at_random = (
            type(self.loader) is DataLoader  # a subclass may draw in another order
            and not isinstance(self.loader.dataset, IterableDataset)
            and self.loader.num_workers == 0
        )
        self._epoch = -1
        self._order: list[Any] = []
        self._iterator: Iterator[Any] | None = None
        self._next_step = -1
        self.num_examples: int
        self.samples_per_step: float
        self._count()

    def train_batch(self, step: int) -> Any:
        """Return the batch of a local step, counted from 0 at the start of training."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._at_random:
            if epoch != self._epoch:
                self._start(epoch)
            with self._seeded("client batch", epoch, index):
                return self._load(self._order[index])
        if self._iterator is None or step != self._next_step or index == 0:
            self._start(epoch)
            for skipped in range(index):
                self._fetch(epoch, skipped)
        self._next_step = step + 1
        return self._fetch(epoch, index)

    def _count(self) -> None:
        loader: Any = self.loader
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            sized = isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")
            self.num_examples = len(loader.dataset) if sized else self._samples_of_an_epoch()
            steps = sized and loader.drop_last and loader.batch_size
            self.samples_per_step = steps or self.num_examples / self.steps_per_epoch
            return
        batches = self._first_epoch(loader.batch_sampler or loader.sampler)
        if loader.batch_sampler is None:
            batches = [[index] for index in batches]
        self.samples_per_step = sum(map(len, batches)) / len(batches)
        sampler: Any = loader.sampler
        # a batch sampler of an unknown class need not draw from the loader's sampler
        known = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
        kind = type(sampler) if known else None
        if kind is RandomSampler:
            self.num_examples = len(sampler.data_source)
        elif kind is WeightedRandomSampler:
            self.num_examples = int(sampler.weights.count_nonzero())
        elif known:
            self.num_examples = len(set(self._first_epoch(sampler)))
        else:
            self.num_examples = len({index for batch in batches for index in batch})

    def _samples_of_an_epoch(self) -> int:
        if isinstance(self.loader, Iterator):
            raise ConfigurationError(
                f"clients[{self.client_id}].train_dataloader() is an iterator, which gives its batches only once; return a "
                "DataLoader or a list of batches, or write a ClientDataModule with num_examples"
            )
        with self._seeded("client loader", 0):
            return sum(BatchStack(batches=[batch]).sizes()[0] for batch in self.loader)

    def _first_epoch(self, sampler: Any) -> list[Any]:
        with self._seeded("client loader", 0):
            return list(sampler)

    def _start(self, epoch: int) -> None:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        samplers: list[Any] = [
            getattr(self.loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ]
        loader_seed = derive_seed(self.seed, "client loader's generator", self.client_id, epoch)
        for owner in (self.loader, *samplers):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
            if isinstance(getattr(owner, "generator", None), torch.Generator):
                owner.generator.manual_seed(loader_seed)
        with self._seeded("client loader", epoch):
            if self._at_random:
                self._order = list(self.loader.batch_sampler or self.loader.sampler)
            else:
                self._iterator = iter(self.loader)
        self._epoch = epoch

    def _load(self, chosen: Any) -> Any:
        dataset: Any = self.loader.dataset
        if self.loader.batch_sampler is None:
            return self.loader.collate_fn(dataset[chosen])
        if hasattr(dataset, "__getitems__"):
            return self.loader.collate_fn(dataset.__getitems__(chosen))
        return self.loader.collate_fn([dataset[index] for index in chosen])

    def _fetch(self, epoch: int, index: int) -> Any:
        assert self._iterator is not None
        with self._seeded("client batch", epoch, index):
            return next(self._iterator)

    def _seeded(self, purpose: str, *coordinates: int) -> AbstractContextManager[None]:
        return seeded(derive_seed(self.seed, purpose, self.client_id, *coordinates))


def one_loader(loader: Any, place: str) -> Any:
    """Return a data module's loader.

    Raises:
        ConfigurationError: The function named ``place`` returned a collection of loaders.
    """
    parts = loader.values() if isinstance(loader, dict) else loader if type(loader) in (list, tuple) else ()
    if isinstance(loader, CombinedLoader) or any(isinstance(part, DataLoader) for part in parts):
        raise ConfigurationError(
            f"{place} returns a {type(loader).__name__} of loaders; return one loader, over a data set with the samples of all"
        )
    return loader
