"""The federated data module, which holds one ``LightningDataModule`` per client.

A client's batch depends only on the seed, the client and the local step. Local steps are counted
from the start of training. The batches of a round can therefore be drawn without the earlier
rounds, and a resumed run draws the same batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fl_lightning.client_data.batches import BatchStack, copied
from fl_lightning.client_data.fingerprint import dataset_digest, digest, sample
from fl_lightning.client_data.held_out import HeldOut, clients_in_order
from fl_lightning.client_data.heterogeneity import heterogeneity
from fl_lightning.client_data.loaders import LoaderBatches, one_loader
from fl_lightning.client_data.new_samples import NewSamples
from fl_lightning.client_data.preprocessing import Normalize
from fl_lightning.errors import ConfigurationError, counted, doing
from fl_lightning.files import plain
from fl_lightning.recorded import Recorded

SIZES = ("num_classes", "in_channels", "image_size", "in_features")
"""Attributes of the data that are defaults of a model's arguments with the same names."""

_FACTS = ("num_clients", "class_names", "client_names", "input_shape", "pixel_range", "eval_batch_size")

_NEVER_CALLED = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that Lightning calls only for the data module of the trainer."""


class PartitionRecord(TypedDict):
    """Record of a partition of samples over the clients.

    Attributes:
        partition: Description of the partition.
        num_clients: Number of clients that train.
        held_out: Number of clients that never train, if any. They follow in all lists.
        sizes: Number of training samples of each client.
        heterogeneity: Measures of class heterogeneity of the clients that train, if the classes are known.
        class_histogram: ``[i][c]`` is the number of samples of class c at client i, if the classes
            are known.
        clients: Names of the clients, if they have names.
        seed: Seed of the partition.
        val_size: Number of samples held out for validation.
        sha256: Digests of the sample indices: ``clients`` has one for each client, and ``total`` is the
            digest of all together.
    """

    partition: str
    num_clients: int
    sizes: list[int]
    held_out: NotRequired[int]
    heterogeneity: NotRequired[dict[str, dict[str, float]]]
    clients: NotRequired[list[str]]
    seed: NotRequired[int]
    val_size: NotRequired[int]
    class_histogram: NotRequired[list[list[int]]]
    sha256: NotRequired[dict[str, Any]]


class ClientDataModule(L.LightningDataModule):
    """Base class of a client's data module. The training batches can be read in any order.

    In epoch e, ``train_dataloader()`` yields ``train_batch(e * steps_per_epoch)``,
    ``train_batch(e * steps_per_epoch + 1)``, and so on.

    Attributes:
        client_id: Position of the client in ``FederatedDataModule.clients``.
        num_examples: Number of training samples of this client.
        steps_per_epoch: Number of batches in one pass over the samples.
        sampling_rate: Probability with which each sample is drawn for a batch, independently of all
            other samples and batches (Poisson sampling); None (default) for other batches.

    Example:
        >>> import torch
        >>> class Ones(ClientDataModule):
        ...     num_examples, steps_per_epoch = 8, 2
        ...
        ...     def train_batch(self, step):
        ...         return torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
        >>> FederatedDataModule([Ones(), Ones()]).cohort_batch([0, 1], [0, 0]).batches()[0][0].shape
        torch.Size([4, 3])
    """

    client_id: int
    num_examples: int
    steps_per_epoch: int
    sampling_rate: float | None = None

    @cached_property
    def samples_per_step(self) -> float:
        """Mean batch size in one pass over the samples.

        If the first batch and ``steps_per_epoch`` do not cover ``num_examples`` exactly, for
        example because an incomplete batch is dropped, all batches have the size of the first.
        """
        size = BatchStack(batches=[self.train_batch(0)]).sizes()[0]
        covers = ceil(self.num_examples / size) == self.steps_per_epoch
        return self.num_examples / self.steps_per_epoch if covers else float(size)

    def train_batch(self, step: int) -> Any:
        """Return the batch of a local step, counted from 0 at the start of training."""
        raise NotImplementedError(f"{type(self).__name__} must define train_batch(step)")

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of epoch 0, or of the epoch set by ``loader.sampler.set_epoch``."""
        batches = _Epoch(self)
        return DataLoader(batches, sampler=batches, batch_size=None)


class _Epoch(Dataset[Any]):
    """A client's batches, indexed by local step, and the sampler of an epoch's steps."""

    def __init__(self, client: ClientDataModule) -> None:
        self.client, self.epoch = client, 0

    def set_epoch(self, epoch: int) -> None:  # Lightning calls it before each epoch
        self.epoch = epoch

    def __len__(self) -> int:
        return self.client.steps_per_epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * len(self), (self.epoch + 1) * len(self)))

    def __getitem__(self, step: int) -> Any:
        return self.client.train_batch(step)


class FederatedDataModule(Recorded, L.LightningDataModule):
    """The clients of a federation and the server's evaluation data.

    Pass one ``LightningDataModule`` per client, or write a subclass that creates the clients in
    :meth:`setup`. The shipped data sets are such subclasses.

    Args:
        clients: One data module per client, as a sequence or by the client's name. The loader from
            ``train_dataloader()`` must have a length.
        server: Data module of the server's validation and test data. Without it, a LightningModule
            with a ``training_step`` is evaluated on each client's own data, and the means over the
            clients are logged.
        seed: Seed for the partition, the order and the augmentation of the data.
        held_out: Clients that never train: their number, their fraction in [0, 1), or their names.
            ``ParticipationGap`` evaluates them. A number or fraction is drawn at random.

    Attributes:
        fit_split: Evaluation data during training: ``"val"``, or ``"test"`` if there are no
            validation data.
        num_classes: Number of classes; None if the data have no classes.
        class_names: Names of the classes, in the order of the labels. None (default) uses the
            labels as names.
        in_channels: Number of channels of an image; None if the data are not images.
        image_size: Height and width of an image in pixels; None if the data are not images.
        in_features: Number of features of a sample; None if the data are images.
        scaled_by_training: Whether evaluation data are scaled by the mean and standard deviation of
            the clients' training samples.
        client_names: Names of the clients, in the order of their ids; empty if they have no names.
        evaluates_clients: Whether the evaluation data are the clients' own. A run of a
            LightningModule sets this attribute if there is no server.
        loaded: Digest of all loaded data, independent of the seed; None if unknown. A study's table
            says by this digest whether all seeds used the same data.
        notes: Sentences about the data, which a run prints at its start.
        normalize: Normalisation of raw inputs, with the mean and the standard deviation of the
            training data; None if the model takes raw inputs. It is known after ``setup``.
        input_shape: Shape of a raw sample; None if unknown.
        eval_batch_size: Number of samples in a batch of an evaluation.
        pixel_range: Values of pixels of more than 8 bits that become 0 and 255; None if the images
            have 8 bits.

    Raises:
        ConfigurationError: A client or the server has a hook that changes batches.

    Example:
        >>> from fl_lightning.testing import ArrayClient
        >>> clients = [ArrayClient(torch.randn(40, 3), torch.zeros(40), batch_size=8) for _ in range(5)]
        >>> data = FederatedDataModule(clients, server=clients[0])
        >>> data.num_clients, data.steps_per_epoch(0)
        (5, 5)
    """

    fit_split: Literal["val", "test"] = "val"
    num_classes: int | None = None
    class_names: Sequence[str] | None = None
    in_channels: int | None = None
    image_size: int | None = None
    in_features: int | None = None
    scaled_by_training: bool = False
    client_names: Sequence[str] = ()
    loaded: str | None = None
    evaluates_clients: bool = False
    normalize: Normalize | None = None
    input_shape: Sequence[int] | None = None
    eval_batch_size: int = 500
    pixel_range: Sequence[float] | None = None

    def __init__(
        self,
        clients: Sequence[L.LightningDataModule] | Mapping[str, L.LightningDataModule] = (),
        server: L.LightningDataModule | None = None,
        seed: int = 0,
        held_out: HeldOut = 0,
    ) -> None:
        super().__init__()
        names = [*clients] if isinstance(clients, Mapping) else []
        given = [*(clients.values() if isinstance(clients, Mapping) else clients)]
        order, self._num_held_out = clients_in_order(held_out, names, len(given), seed)
        self._clients = [given[client] for client in order]
        if names:
            self.client_names = [names[client] for client in order]
        named = {f"clients[{number}]": client for number, client in enumerate(self._clients)}
        _refuse_hooks(named | ({"server": server} if server else {}))
        self._batches: dict[int, LoaderBatches] = {}
        self._prepared: set[str] = set()
        self._own_prepared: set[tuple[int, str]] = set()
        self.server = server
        self.seed = seed
        self.notes: list[str] = []

    @property
    def clients(self) -> Sequence[L.LightningDataModule]:
        """One data module per client, in the order of the client ids.

        Shipped data sets create these data modules in ``setup``.
        """
        return self._clients

    @property
    def num_clients(self) -> int:
        """Number of clients that train. Their ids are 0 to ``num_clients - 1``."""
        return len(self.clients) - self._num_held_out

    @property
    def held_out(self) -> range:
        """Ids of the clients that never train: ``num_clients`` and the following."""
        return range(self.num_clients, self.num_clients + self._num_held_out)

    def prepare_data(self) -> None:
        """Prepare the data of every client and the data of the server."""
        for datamodule in (*self._clients, *([self.server] if self.server else [])):
            datamodule.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up the server's data once per stage. For ``"fit"``, also set up the clients."""
        for datamodule in (*self._clients, *([self.server] if self.server else [])):
            datamodule.trainer = self.trainer
        if stage in self._prepared:
            return
        if self.server is not None:
            self.server.setup(stage)
        if stage == "fit":
            for client in self._clients:
                client.setup(stage)
        self._prepared.add(stage)

    def teardown(self, stage: str) -> None:
        """End the worker processes of the clients' loaders."""
        for batches in self._batches.values():
            batches.close()

    def train_dataloader(self) -> DataLoader[int]:
        """Return a loader with a single item, because a Lightning epoch is one round."""
        return DataLoader([0], batch_size=None)  # type: ignore[arg-type]  # a list is a map-style dataset

    def val_dataloader(self) -> Any:
        """Return the server's validation data. Default: an empty list."""
        return self._of_server("val_dataloader")

    def test_dataloader(self) -> Any:
        """Return the server's test data. Default: an empty list."""
        return self._of_server("test_dataloader")

    def _of_server(self, loader: str) -> Any:
        if self.evaluates_clients:
            split = loader.partition("_")[0]
            own = (self.own_dataloader(client, split) for client in range(self.num_clients))
            return [loader for loader in own if loader is not None]
        return getattr(self.server, loader)() if self.server and is_overridden(loader, self.server) else []

    def predict_dataloader(self) -> Any:
        """Return the server's ``predict_dataloader()``. Default: the test data."""
        if self.server is not None and is_overridden("predict_dataloader", self.server):
            return self.server.predict_dataloader()
        return self.test_dataloader()

    def num_examples(self, client_id: int) -> int:
        """Return the number of training samples of a client."""
        return self._source(client_id).num_examples

    def steps_per_epoch(self, client_id: int) -> int:
        """Return the number of local steps in one pass over a client's training data."""
        return self._source(client_id).steps_per_epoch

    def samples_per_step(self, client_id: int) -> float:
        """Return a client's mean batch size in one pass over the client's training data."""
        return self._source(client_id).samples_per_step

    def sampling_rate(self, client_id: int) -> float | None:
        """Return the attribute ``sampling_rate`` of a client; None if its batches are not Poisson samples."""
        return getattr(self.clients[client_id], "sampling_rate", None)

    def most_of_a_subject(self) -> int:
        """Return the largest number of training samples of a subject; 1 (the default) without subjects."""
        return 1

    def cohort_batch(self, client_ids: Sequence[int], steps: Sequence[int]) -> BatchStack:
        """Draw the batches of one local step.

        Args:
            client_ids: The clients that take the step.
            steps: Local step of each client, counted from 0 at the start of training.
        """
        batches = []
        for client_id, step in zip(client_ids, steps, strict=True):
            with doing(f"drawing the batch of {self.named(client_id)}"):
                batches.append(copied(self._source(client_id).train_batch(step)))
        return BatchStack(batches=batches)

    def keep_on(self, device: torch.device) -> None:
        """Move the data to the device before training. The default does nothing."""

    def named(self, client_id: int) -> str:
        """Return words for a client, such as ``"client 3"`` or ``"client 3 (Oslo)"``."""
        name = f" ({self.client_names[client_id]})" if self.client_names else ""
        return f"client {client_id}{name}"

    def _everyone(self) -> range:
        return range(self.num_clients + len(self.held_out))

    def note_small_clients(self, sizes: Sequence[int], batch_size: int) -> None:
        """Note the clients that train on all their samples as one batch.

        Args:
            sizes: Number of training samples of each client.
            batch_size: Number of samples in the batch of a client that has as many.
        """
        small = {self.named(client): size for client, size in enumerate(sizes) if size < batch_size}
        if small:
            self.notes.append(
                f"{len(small)} of {len(sizes)} clients have fewer samples than batch_size={batch_size}, and train on all their "
                f"samples as one batch: {counted(small)}"
            )

    def note_missing_validation(self) -> None:
        """Note who has no validation data, if others have such data."""
        note = ""
        without = [x for x in range(self.num_clients) if not is_overridden("val_dataloader", self.clients[x])]
        if self.server is not None and not is_overridden("val_dataloader", self.server):
            if len(without) < self.num_clients:
                note = "training evaluates nothing, as the server has no val_dataloader; add one"
        elif self.server is None and 0 < len(without) < self.num_clients:
            names = ", ".join(map(self.named, without[:10]))
            note = f"validation is the mean over the other clients: {len(without)} of {self.num_clients} have no val_dataloader: {names}"
        self.notes += [note] if note and note not in self.notes else []  # a second fit notes it once

    def describe_partition(self) -> str:
        """Return a short description of the partition, which is shown in tables."""
        return f"{self.num_clients} clients with data of their own{self._and_held_out()}"

    def _and_held_out(self) -> str:
        return f", and {len(self.held_out)} that never train" if self.held_out else ""

    def partition_record(self) -> PartitionRecord:
        """Return the record of the partition for the file ``partition.json``.

        Subclasses may add entries.
        """
        record: PartitionRecord = {
            "partition": self.describe_partition(),
            "num_clients": self.num_clients,
            "sizes": [self.num_examples(client_id) for client_id in self._everyone()],
        }
        if self.held_out:
            record["held_out"] = len(self.held_out)
        if self.client_names:
            record["clients"] = [*self.client_names]
        if histograms := self.class_histograms():
            record |= {
                "class_histogram": histograms,
                "heterogeneity": heterogeneity(histograms[: self.num_clients]),
            }
        return record

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the data, by which a resumed run detects changed data.

        The digest of data in memory includes the complete content. The digest of other data
        includes the labels, some samples, and the paths and contents of files. Batching, loading
        and the modification times of files do not affect a digest.

        Returns:
            Digests of ``"training"`` data, ``"evaluation"`` data and ``"partition"``.
        """
        known: dict[int, str] = {}
        sources, training = [self._source(client_id) for client_id in self._everyone()], []
        for client_id, source in enumerate(sources):
            loader, drawable = None, None
            if isinstance(source, LoaderBatches):
                loader, drawable = source.loader, source.drawable
            dataset = getattr(loader, "dataset", None)
            with doing(f"reading the data of {self.named(client_id)}"):
                if dataset is None or isinstance(dataset, IterableDataset):
                    training.append(digest(sample(partial(source.train_batch, 0))))
                else:
                    training.append(digest(dataset_digest(dataset, known), drawable))
        partition = digest([source.num_examples for source in sources])
        return {"training": digest(training), "evaluation": self.evaluation_digest(), "partition": partition}

    def evaluation_digest(self, split: Literal["val", "test"] = "val") -> str:
        """Return the digest of the server's evaluation data, without reading the clients' data.

        Args:
            split: The data that an evaluation reads. For ``"test"``, the digest is ``""``, because
                training does not read test data.
        """
        if split == "test":
            return ""
        with doing("reading the server's evaluation data"):
            return dataset_digest(getattr(self.val_dataloader(), "dataset", None), {})

    def class_histograms(self) -> list[list[int]]:
        """Return the number of samples of each class at each client, as nested lists.

        The number at ``[i][c]`` belongs to client i and class c. If the classes are unknown, the
        list is empty.
        """
        return []

    def facts(self) -> dict[str, Any]:
        """Return what a trained model needs of its data, in plain form. Checkpoints keep it."""
        facts = {name: plain(getattr(self, name)) for name in (*SIZES, *_FACTS)}
        facts["client_names"] = facts["client_names"][: self.num_clients]
        if self.class_names is None and self.num_classes is not None:
            facts["class_names"] = [*map(str, range(self.num_classes))]
        return facts | {"normalize": self.normalize and self.normalize.settings()}

    @classmethod
    def new_samples(cls, path: Path, known: Any, labelled: bool) -> NewSamples:
        """Read the samples of a new file or folder, in the form of a run's data.

        Args:
            path: The file or folder.
            known: Object with the entries of :meth:`facts` as attributes, from a checkpoint.
            labelled: Whether to read targets too.

        Raises:
            ConfigurationError: The file cannot be read.
        """
        raise ConfigurationError(
            f"{path}: {cls.__name__} cannot read new files; define {cls.__name__}.new_samples, or call fl_lightning.load_model"
        )

    def own_dataloader(self, client_id: int, split: str) -> Any:
        """Return a client's own evaluation data. Methods with personal models use these data.

        Args:
            client_id: Id of the client.
            split: Name of the evaluation data: ``"val"`` or ``"test"``.

        Returns:
            The client's ``val_dataloader()`` or ``test_dataloader()``; None if the client has no
            such loader. For a shipped data set, None if no client has own samples.

        Raises:
            ConfigurationError: The client has several such loaders.
        """
        client = self.clients[client_id]
        if not is_overridden(f"{split}_dataloader", client):
            return None
        stage = "validate" if split == "val" else "test"
        set_up_for_fit = split == "val" and "fit" in self._prepared
        if not set_up_for_fit and (client_id, stage) not in self._own_prepared:
            client.setup(stage)
            self._own_prepared.add((client_id, stage))
        place = f"clients[{client_id}].{split}_dataloader()"
        loader = getattr(client, f"{split}_dataloader")()
        parts = tree_leaves(loader)  # a list or a dict with one loader is this loader, as in Lightning
        return one_loader(parts[0] if len(parts) == 1 and isinstance(parts[0], DataLoader) else loader, place)

    def own_size(self, client_id: int, split: str) -> int | Literal[""]:
        """Return the number of a client's own evaluation samples; ``""`` if unknown (the default)."""
        return ""

    def own_samples(self, client_id: int, split: str) -> Mapping[str, Sequence[str | int]]:
        """Return columns that identify a client's own evaluation samples, in their loader's order.

        By default the dict is empty, since only the order is known.
        """
        return {}

    def _source(self, client_id: int) -> ClientDataModule | LoaderBatches:
        client = self.clients[client_id]
        if isinstance(client, ClientDataModule):
            return client
        if client_id not in self._batches:
            self._batches[client_id] = LoaderBatches(client, client_id, self.seed)
        return self._batches[client_id]


def _refuse_hooks(datamodules: Mapping[str, L.LightningDataModule]) -> None:
    """Raise a ``ConfigurationError`` for no data module, and for a hook that would never be called."""
    for name, datamodule in datamodules.items():
        if isinstance(datamodule, type) or not hasattr(datamodule, "prepare_data"):
            raise ConfigurationError(f"data: {name} is {datamodule!r}; give a LightningDataModule object")
        for hook in _NEVER_CALLED:
            if is_overridden(hook, datamodule, L.LightningDataModule):
                raise ConfigurationError(
                    f"data: {name}.{hook} of {type(datamodule).__name__} would never be called; change the batches in the data "
                    "set, or in the collate_fn of the loaders"
                )
