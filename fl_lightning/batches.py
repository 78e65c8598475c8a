"""Batches of a cohort, and random access to those of any client's loader."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import derive_seed


class CohortBatch:
    """The batches of one local step, one for each active client of a cohort.

    Held either as a list of per-client batches or stacked (every tensor ``[C, b, ...]``); each form is made from the
    other on demand, so an executor takes the one it needs. A batch is any tree of tensors, usually
    ``(inputs, targets)``.
    """

    def __init__(self, *, rows: Sequence[Any] | None = None, stack: Any = None) -> None:
        self._rows = rows
        self._stack = stack

    def map(self, function: Callable[[Any], Any]) -> "CohortBatch":
        """Apply a function of a batch (a device transfer, a cast) to whichever form is held."""
        if self._rows is None:
            return CohortBatch(stack=function(self._stack))
        return CohortBatch(rows=[function(batch) for batch in self._rows])

    def num_samples(self) -> int:
        """Number of samples in all batches together."""
        if self._rows is None:
            shape = first_shape(self._stack)
            return shape[0] * shape[1]
        return sum(first_shape(batch)[0] for batch in self._rows)

    def rows(self) -> Sequence[Any]:
        """One batch per client."""
        if self._rows is None:
            leaves, spec = tree_flatten(self._stack)
            self._rows = [tree_unflatten(list(parts), spec) for parts in zip(*leaves, strict=True)]
        return self._rows

    def stack(self) -> Any:
        """One tree whose tensors have the client axis first, shape ``[C, b, ...]``.

        Raises:
            ConfigurationError: The clients' batches differ in shape, so that they cannot be stacked.
        """
        if self._stack is None:
            assert self._rows is not None
            flat = [tree_flatten(batch) for batch in self._rows]
            shapes = {tuple(tuple(leaf.shape) for leaf in leaves) for leaves, _ in flat}
            if len(shapes) > 1:
                raise ConfigurationError(
                    f"executor VectorizedExecutor needs batches of equal shape from every client, but the clients sent "
                    f"{len(shapes)} different shapes; give the client loaders drop_last=True or use SequentialExecutor"
                )
            columns = zip(*(leaves for leaves, _ in flat), strict=True)
            self._stack = tree_unflatten([torch.stack(column) for column in columns], flat[0][1])
        return self._stack


class LoaderBatches:
    """Random access to the batches of any ``LightningDataModule`` through its ``train_dataloader()``.

    Each pass over the loader and each fetch of a batch runs under global random number generators (torch, numpy,
    random) seeded from (seed, client, position) and put back afterwards, so shuffling and augmentation that draw from
    them are functions of the position alone. Consecutive steps reuse the running iterator; a jump starts a new pass
    and skips to the position.

    Args:
        datamodule: The client's data module, already set up.
        client_id: The client's number, for the seeds and for messages.
        seed: The run's seed.

    Raises:
        ConfigurationError: The loader has no length or no batch.
    """

    def __init__(self, datamodule: L.LightningDataModule, client_id: int, seed: int) -> None:
        self.client_id = client_id
        self.seed = seed
        self.loader: DataLoader[Any] = datamodule.train_dataloader()
        try:
            self.steps_per_epoch = len(self.loader)
        except TypeError as error:
            raise ConfigurationError(
                f"clients[{client_id}].train_dataloader() has no length; a client needs a loader over a sized dataset"
            ) from error
        if self.steps_per_epoch == 0:
            raise ConfigurationError(
                f"clients[{client_id}].train_dataloader() yields no batch: the client has fewer samples than a batch; "
                "use a smaller batch_size or drop_last=False"
            )
        dataset = getattr(self.loader, "dataset", None)
        sized = dataset is not None and hasattr(dataset, "__len__")
        self.num_examples = len(dataset) if sized else self.steps_per_epoch  # type: ignore[arg-type]  # sized
        self._iterator: Iterator[Any] | None = None
        self._next_step = -1

    def train_batch(self, step: int) -> Any:
        """The batch of local step ``step`` (from 0, counted over the whole training)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._iterator is None or step != self._next_step or index == 0:
            self._start(epoch)
            for skipped in range(index):
                self._fetch(epoch, skipped)
        self._next_step = step + 1
        return self._fetch(epoch, index)

    def _start(self, epoch: int) -> None:
        for attribute in ("sampler", "batch_sampler"):
            set_epoch = getattr(getattr(self.loader, attribute, None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        with isolate_rng():
            seed_global_generators(derive_seed(self.seed, "client loader", self.client_id, epoch))
            self._iterator = iter(self.loader)

    def _fetch(self, epoch: int, index: int) -> Any:
        assert self._iterator is not None
        with isolate_rng():
            seed_global_generators(derive_seed(self.seed, "client batch", self.client_id, epoch, index))
            return next(self._iterator)


def seed_global_generators(seed: int) -> None:
    """Seed torch's, numpy's and Python's global generators from one integer."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def first_shape(batch: Any) -> tuple[int, ...]:
    """Shape of the first tensor of a batch, for messages and sample counts."""
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    return tuple(leaves[0].shape) if leaves else ()
