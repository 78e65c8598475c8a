"""Who the clients are: a federated data module holds one ``LightningDataModule`` per client.

A round asks ``clients[i]`` for its batches, whatever kind of data module that is. The batch of a client at a local step
is a function of (seed, client, step), where ``step`` counts the client's local steps from the start of training, so
any round can be computed alone and a resumed run draws the batches of an uninterrupted one.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

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


class ClientDataModule(L.LightningDataModule):
    """One client of a shipped federated data set: a data module that also gives any of its batches at random access.

    ``train_dataloader()`` and :meth:`train_batch` give the same batches: iterating the loader at epoch e gives
    ``train_batch(e * steps_per_epoch)``, ``train_batch(e * steps_per_epoch + 1)``, ...

    Attributes:
        client_id: Position of the client in ``FederatedDataModule.clients``.
        num_examples: Number of training examples of this client.
        steps_per_epoch: Number of batches in one pass over them.
    """

    client_id: int
    num_examples: int
    steps_per_epoch: int

    def train_batch(self, step: int) -> Any:
        """The batch of local step ``step`` (from 0, counted over the whole training)."""
        raise NotImplementedError(f"{type(self).__name__} must define train_batch(step)")


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


class FederatedDataModule(L.LightningDataModule):
    """The clients of a federation and the server's evaluation data.

    Use it directly with one ``LightningDataModule`` of your own per client, or subclass it and build the clients in
    :meth:`setup` as the shipped data sets do.

    Args:
        clients: One data module per client; any ``LightningDataModule`` whose ``train_dataloader()`` has a length.
        server: A data module whose ``val_dataloader()`` and ``test_dataloader()`` are the server's evaluation data.
        seed: Seed of everything random about the data (partition, order, augmentation).

    Attributes:
        fit_split: Which data the evaluation inside ``fit`` uses, and so how its metrics are called: ``"val"``, or
            ``"test"`` where there is no validation set and the server evaluates on test data instead.
        num_classes: Number of classes, None where it means nothing.
        in_channels: Channels of an image, None where it means nothing.
        image_size: Height and width of an image in pixels, None where it means nothing.
    """

    fit_split: Literal["val", "test"] = "val"
    num_classes: int | None = None
    in_channels: int | None = None
    image_size: int | None = None

    def __init__(
        self,
        clients: Sequence[L.LightningDataModule] = (),
        server: L.LightningDataModule | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._clients = list(clients)
        self._batches: dict[int, ClientDataModule | LoaderBatches] = {}
        self._prepared: set[str] = set()
        self.server = server
        self.seed = seed

    @property
    def clients(self) -> Sequence[L.LightningDataModule]:
        """One data module per client, in the order of their ids 0, 1, ...; shipped data sets fill it in ``setup``."""
        return self._clients

    @property
    def num_clients(self) -> int:
        """Number of clients of the federation (not of one round's cohort)."""
        return len(self.clients)

    def prepare_data(self) -> None:
        """Prepare every client's and the server's data."""
        for datamodule in (*self._clients, *([self.server] if self.server else [])):
            datamodule.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up the server for a stage (``"fit"``, ``"validate"``, ...) and, for ``"fit"``, the clients, once each."""
        if self.server is not None and stage not in self._prepared:
            self.server.setup(stage)
        if stage == "fit" and stage not in self._prepared:
            for client in self._clients:
                client.setup(stage)
        self._prepared.add(stage)

    def train_dataloader(self) -> DataLoader[int]:
        """One item per epoch: an epoch is one communication round, whose batches are asked from the clients."""
        return DataLoader([0], batch_size=None)  # type: ignore[arg-type]  # a list is a map-style dataset

    def val_dataloader(self) -> Any:
        """The server's validation data; nothing where there is none."""
        return self.server.val_dataloader() if self.server is not None else []

    def test_dataloader(self) -> Any:
        """The server's test data; nothing where there is none."""
        return self.server.test_dataloader() if self.server is not None else []

    def predict_dataloader(self) -> Any:
        """The server's test data: predictions are made on it."""
        return self.test_dataloader()

    def num_examples(self, client_id: int) -> int:
        """Number of training examples of a client."""
        return self._source(client_id).num_examples

    def steps_per_epoch(self, client_id: int) -> int:
        """Number of local steps in one pass over a client's training data."""
        return self._source(client_id).steps_per_epoch

    def samples_per_step(self, client_id: int) -> float:
        """Training samples in a client's batch, on average over a pass."""
        return self.num_examples(client_id) / self.steps_per_epoch(client_id)

    def cohort_batch(self, client_ids: Sequence[int], steps: Sequence[int]) -> CohortBatch:
        """The batches of one local step.

        Args:
            client_ids: The active clients of the cohort.
            steps: For each of them its local step, from 0, counted over the whole training.
        """
        pairs = zip(client_ids, steps, strict=True)
        return CohortBatch(rows=[self._source(client_id).train_batch(step) for client_id, step in pairs])

    def describe_partition(self) -> str:
        """How the data are spread over the clients, in a few words for tables."""
        return f"{self.num_clients} clients with data of their own"

    def partition_record(self) -> dict[str, Any]:
        """What ``partition.json`` of the run directory holds: the sizes of the clients, and what a subclass adds."""
        sizes = [self.num_examples(client_id) for client_id in range(self.num_clients)]
        return {"partition": self.describe_partition(), "num_clients": self.num_clients, "sizes": sizes}

    def _source(self, client_id: int) -> ClientDataModule | LoaderBatches:
        source = self._batches.get(client_id)
        if source is None:
            client = self.clients[client_id]
            source = (
                client
                if isinstance(client, ClientDataModule)
                else LoaderBatches(client, client_id, self.seed)
            )
            self._batches[client_id] = source
        return source


def first_shape(batch: Any) -> tuple[int, ...]:
    """Shape of the first tensor of a batch, for messages and sample counts."""
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    return tuple(leaves[0].shape) if leaves else ()
