"""Training batches from a client's ``DataLoader``."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count, islice
from math import inf
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.client_data.fingerprint import digest
from fl_lightning.client_data.own_generators import own_generators, reseed
from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import derive_seed, seeded


class LoaderBatches:
    """Training batches of a client's ``LightningDataModule``, readable in any order.

    The batches come from ``train_dataloader()``. Two seeds make a batch independent of earlier
    batches. The first seed is set before an epoch, and decides the order of the samples. This seed
    depends on the run's seed, the client and the epoch. The second seed is set before a batch is
    read, and depends also on the batch's position in the epoch. Both seeds are set in the global
    generators of torch, numpy and Python, whose state is restored afterwards. Generators that the
    loader, its samplers, its data set or its transforms hold are seeded too. Loaders and samplers
    with ``set_epoch`` are told the epoch. A loader must have a length, and give this number of
    batches in every epoch. ``persistent_workers=True`` is refused.

    If the data set is map-style and the loader has no worker processes, a batch is read directly.
    Any other loader is iterated from the start of the epoch to the batch.

    Args:
        datamodule: The client's data module, already set up.
        client_id: Id of the client, for seeds and error messages.
        seed: The run's seed.

    Attributes:
        num_examples: Number of different training samples that the sampler can draw. For a sampler
            of an unknown class, the number of different samples in the first epoch. Where no index
            stands for one sample (a data set of ready batches, an ``IterableDataset`` without
            length, a loader of an unknown class), the number of samples in the first epoch, which
            is read to count them.
        steps_per_epoch: Number of batches in one pass over the data.
        samples_per_step: Mean batch size in one pass over the data.
        drawable: Digest of the indices of the samples; None without a map-style data set.

    Raises:
        ConfigurationError: The loader has no length, yields no batch or another number of batches
            than its length, can be read only once, or draws random numbers that no seed decides.
    """

    def __init__(self, datamodule: L.LightningDataModule, client_id: int, seed: int) -> None:
        self.client_id = client_id
        self.seed = seed
        self._place = place = f"clients[{client_id}].train_dataloader()"
        self.loader: Any = one_loader(datamodule.train_dataloader(), place)
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
        if getattr(self.loader, "persistent_workers", False):
            raise ConfigurationError(
                f"{place} has persistent_workers=True: the random numbers of such workers depend on all earlier epochs, so that a "
                "resumed run would differ; use persistent_workers=False"
            )
        kind, dataset = type(self.loader), getattr(self.loader, "dataset", None)
        usual = isinstance(self.loader, DataLoader) and kind.__iter__ is DataLoader.__iter__
        draws_indices = usual and not isinstance(dataset, IterableDataset)
        # a subclass may fetch the samples in another way
        self._at_random = kind is DataLoader and draws_indices and self.loader.num_workers == 0
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        sampler = getattr(self.loader, "sampler", None)
        self._sampler: Any = sampler if batch_sampler is None else batch_sampler
        self._owners: Any = self.loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)
        self._of_samples = own_generators([dataset, getattr(self.loader, "collate_fn", None)])
        self._of_order = own_generators([self.loader], without=[*self._of_samples, dataset])
        self._repeats = False
        self.close()
        self.drawable: str | None = None
        if draws_indices:
            self._count_indices()
        else:
            self._count_samples(sized=usual and self.loader.batch_size is not None)

    def train_batch(self, step: int) -> Any:
        """Return the batch of a local step, counted from 0 at the start of training."""
        batch = self._read(step)
        if not self._repeats and not getattr(self.loader, "num_workers", 0):
            first = digest(batch)
            self.close()
            batch = self._read(step)
            if first != digest(batch):
                raise self._differs("batch")
        self._repeats = True
        return batch

    def close(self) -> None:
        """Forget the order of the current epoch, and end the loader's worker processes."""
        self._epoch = self._next_step = -1
        self._order: list[Any] = []
        self._iterator: Iterator[Any] | None = None

    def _read(self, step: int) -> Any:
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._at_random:
            if epoch != self._epoch:
                self._order, self._epoch = self._drawn(epoch), epoch
            with self._seeded("client batch", epoch, index):
                return self._load(self._order[index])
        if self._iterator is None or step != self._next_step or index == 0:
            with self._seeded_epoch(epoch):
                self._iterator = iter(self.loader)
            for skipped in range(index):
                self._fetch(epoch, skipped)
        self._next_step = step + 1
        return self._fetch(epoch, index)

    def _count_indices(self) -> None:
        sampler, order = self._sampler, self._drawn(0)
        if [*map(_key, order)] != [*map(_key, self._drawn(0))]:
            raise self._differs(f"order of {type(sampler).__name__}")
        batched = self.loader.batch_sampler is not None
        batches = [[*part] if batched else self._indices(part) for part in order]
        while type(sampler) is BatchSampler:
            sampler = sampler.sampler
        if type(sampler) is RandomSampler:
            every: Iterable[Any] = range(len(sampler.data_source))
        elif type(sampler) is WeightedRandomSampler:
            every = sampler.weights.nonzero().flatten().tolist()
        elif sampler is self._sampler:
            every = chain.from_iterable(batches)
        else:
            with self._seeded_epoch(0):
                every = [*chain.from_iterable(map(self._indices, sampler))]
        examples, sizes = {_key(index): index for index in every}, [*map(len, batches)]
        self.num_examples = len(examples)
        if not batched and not _is_several(order[0]):
            with self._seeded("client batch", 0, 0):
                if _ready(self._load(order[0])):
                    known = {key: _ready(self._load(index)) for key, index in examples.items()}
                    self.num_examples, sizes = sum(known.values()), [known[_key(index)] for index in order]
        self.samples_per_step = sum(sizes) / len(sizes)
        self.drawable = digest(sorted(examples))

    def _count_samples(self, *, sized: bool) -> None:
        loader = self.loader
        if isinstance(loader, Iterator):
            raise ConfigurationError(
                f"{self._place} is an iterator, which gives its batches only once; return a DataLoader or a list of batches, or "
                "write a ClientDataModule with num_examples"
            )
        if sized and hasattr(loader.dataset, "__len__"):
            self.num_examples = len(loader.dataset)
            steps = loader.drop_last and loader.batch_size
            self.samples_per_step = steps or self.num_examples / self.steps_per_epoch
            return
        single = isinstance(loader, DataLoader) and loader.batch_size is None
        with self._seeded_epoch(0):
            batches = islice(loader, self.steps_per_epoch)
            sizes = [_ready(x) or 1 if single else BatchStack(batches=[x]).sizes()[0] for x in batches]
        self._check_length(len(sizes), 0)
        self.num_examples = sum(sizes)
        self.samples_per_step = self.num_examples / self.steps_per_epoch

    def _indices(self, drawn: Any) -> list[Any]:
        """Return the indices of the samples in a part that a sampler has drawn."""
        if isinstance(drawn, slice):
            return [*range(len(self.loader.dataset))[drawn]]
        return [*drawn] if _is_several(drawn) else [drawn]

    def _drawn(self, epoch: int) -> list[Any]:
        with self._seeded_epoch(epoch):
            order = [*islice(self._sampler, self.steps_per_epoch + 1)]
        self._check_length(len(order), epoch)
        return order

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
            for generator in self._of_order if index else ():  # another client may have drawn from it
                reseed(
                    generator, derive_seed(self.seed, "batch of a generator", self.client_id, epoch, index)
                )
            for batch in self._iterator:
                if index == self.steps_per_epoch - 1:
                    self._check_length(index + 1 + len([*islice(self._iterator, 1)]), epoch)
                return batch
        return self._check_length(index, epoch)

    def _check_length(self, batches: int, epoch: int) -> None:
        if batches != (length := self.steps_per_epoch):
            raise ConfigurationError(
                f"{self._place} gives {min(batches, length)} batches{' and more' if batches > length else ''} in epoch {epoch + 1}, but its length is "
                f"{length}; let both be the same number in all epochs, and raise no StopIteration in a data set or transform"
            )

    def _differs(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._place}: the {what} differs if it is drawn again with the same seeds, so that a resumed run would differ; draw from "
            "the global generators of torch, NumPy or Python, or from one that is an attribute, and obey set_epoch"
        )

    @contextmanager
    def _seeded_epoch(self, epoch: int) -> Iterator[None]:
        for owner in self._owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        own = derive_seed(self.seed, "client loader's generator", self.client_id, epoch)
        with self._seeded("client loader", epoch):
            for generator in self._of_order:
                reseed(generator, own)
            yield

    @contextmanager
    def _seeded(self, purpose: str, *coordinates: int) -> Iterator[None]:
        with seeded(derive_seed(self.seed, purpose, self.client_id, *coordinates)):
            for number, generator in enumerate(self._of_samples):
                own = f"{purpose}, generator {number}"
                reseed(generator, derive_seed(self.seed, own, self.client_id, *coordinates))
            yield


def _is_several(drawn: Any) -> bool:
    """Return whether a sampler has drawn the indices of several samples, such as a tensor ``[b]``."""
    return isinstance(drawn, list | slice) or getattr(drawn, "ndim", 0) > 0


def _key(index: Any) -> str:
    """Return the text of an index. Equal indices have equal texts."""
    return repr(index.tolist() if hasattr(index, "tolist") else index)


def _ready(item: Any) -> int:
    """Return the number of samples in an item of a data set; 0 if the item is a single sample.

    The tensors of a batch begin with the same dimension.
    """
    numbers = (torch.Tensor, int, float)
    shapes = [torch.as_tensor(leaf).shape for leaf in tree_leaves(item) if isinstance(leaf, numbers)]
    batches = shapes and shapes[0] and (len(shapes) == 1 or shapes[0][:1] in [x[:1] for x in shapes[1:]])
    return shapes[0][0] if batches else 0


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


def every_batch(loader: Any) -> Iterator[Any]:
    """Yield the batches of evaluation data.

    Raises:
        ConfigurationError: The loader ends before its length.
    """
    counter = count()
    yield from (batch for batch, _ in zip(loader, counter, strict=False))
    check_evaluated(next(counter), sized_len(loader) or 0)


def check_evaluated(batches: int, length: float) -> None:
    """Raise a ``ConfigurationError`` if an evaluation has ended before its last batch.

    Args:
        batches: Number of evaluated batches.
        length: Length of the loaders; infinity if a loader has no length.
    """
    if batches < length < inf:
        raise ConfigurationError(
            f"data: a loader of evaluation data gives {batches} batches, but its length is {length}; raise no StopIteration in a data set "
            "or transform, and let __len__ be the number that it gives"
        )
