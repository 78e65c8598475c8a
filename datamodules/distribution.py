"""Distribution of labelled samples over clients and server."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fl_lightning.client_data.federated import FederatedDataModule, PartitionRecord
from fl_lightning.datamodules.images import Batch, ImageData, balanced_subset
from fl_lightning.datamodules.partition_file import FORMAT, FromFile, labels_sha256
from fl_lightning.datamodules.partitions import IID, Natural, Partition
from fl_lightning.errors import ConfigurationError, check_at_least
from fl_lightning.randomness import generator


@dataclass(frozen=True)
class Distribution:
    """Indices of the samples of each client and of the server.

    Indices are int64 and ascending. The N training samples have indices 0 to N - 1. The M test
    samples have indices N to N + M - 1.

    Attributes:
        labels: Class of each sample, shape ``[N + M]``.
        num_train: Number N of training samples.
        clients: Indices of each client's training samples.
        val: Indices of the server's validation samples.
        test: Indices of the server's test samples.
        own: Indices of each client's own evaluation samples, by split (``"val"``, ``"test"``). A
            split without such samples has no key.
        groups: Group of each client if the partition is ``Natural``, otherwise empty.
    """

    labels: Tensor
    num_train: int
    clients: list[Tensor]
    val: Tensor
    test: Tensor
    own: dict[str, list[Tensor]]
    groups: list[int]

    def as_file(self, dataset: str, origin: dict[str, object]) -> dict[str, object]:
        """Return the content of a partition file.

        :class:`~fl_lightning.datamodules.partition_file.FromFile` reads such a file.

        Args:
            dataset: Name of the data set.
            origin: Description of how the partition was made.
        """
        everything = torch.cat([*self.clients, *(part for own in self.own.values() for part in own)])
        space = "train" if bool((everything < self.num_train).all()) else "train+test"
        labels = self.labels[: self.num_train] if space == "train" else self.labels
        splits = {"train": self.clients, **self.own}
        clients = [
            {"id": str(client), **{split: own[client].tolist() for split, own in splits.items()}}
            for client in range(len(self.clients))
        ]
        return {
            "format": FORMAT,
            "dataset": dataset,
            "space": space,
            "examples": len(labels),
            "labels_sha256": labels_sha256(labels),
            "overlap": len(torch.unique(everything)) < len(everything),
            "clients": clients,
            "origin": origin,
        }


def images_at(data: ImageData, samples: Tensor) -> Tensor:
    """Return the images of some samples.

    If all requested samples are training images, or all are test images, nothing is copied.

    Args:
        data: The data set.
        samples: Ascending indices, numbered as in :class:`Distribution`.
    """
    num_train = len(data.train_labels)
    inner = int((samples < num_train).sum())
    parts = (data.train_images, samples[:inner]), (data.test_images, samples[inner:] - num_train)
    images = [part if len(index) == len(part) else part[index] for part, index in parts if len(index)]
    return torch.cat(images) if len(images) > 1 else (images or [data.train_images[:0].clone()])[0]


def _without(samples: Tensor, others: Tensor) -> Tensor:
    return samples[~torch.isin(samples, others)]


def _check_used(partition: FromFile, held: Tensor, used: Tensor, num_train: int) -> None:
    if len(dropped := _without(held[held < num_train], used)):
        raise ConfigurationError(
            f"max_examples={len(used)} leaves out the sample {int(dropped[0])} of {partition}; leave max_examples out"
        )


class PartitionedDataModule(FederatedDataModule):
    """Base class of data sets whose training samples a partition assigns to the clients.

    Args:
        num_clients: Number of clients. Ignored with the partitions ``Natural`` and ``FromFile``.
        batch_size: Number of samples in a client's batch. The FixBN paper uses 20. Every batch is
            complete: if the last samples of an epoch do not fill a batch, they are dropped.
        partition: Partition of the training data over the clients. None: ``default_partition()``.
        val_fraction: Share of the training data, in [0, 1), that becomes the server's validation
            set. The draw is stratified and depends on the seed. With 0, the evaluation inside
            ``fit`` uses the test data, and its metrics are called ``test/...``.
        eval_batch_size: Number of samples in a batch of the server's evaluation.
        seed: Seed of the subset, the validation set, the partition, the data order and the
            augmentation.
        max_examples: Size of a stratified subset of the training data, for reduced runs. None: all
            training data.

    Attributes:
        distribution: Samples of clients and server. It is known after ``setup``.
        default_partition: Class of the default partition. It is ``Natural`` for data with groups.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    distribution: Distribution
    default_partition: type[Partition] = IID
    val_images: Any
    test_images: Any

    def __init__(
        self,
        num_clients: int = 10,
        batch_size: int = 20,
        partition: Partition | None = None,
        val_fraction: float = 0.0,
        eval_batch_size: int = 500,
        seed: int = 0,
        max_examples: int | None = None,
    ) -> None:
        super().__init__(seed=seed)
        check_at_least(1, num_clients=num_clients, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_at_least(1, max_examples=1 if max_examples is None else max_examples)
        if not 0 <= val_fraction < 1:
            raise ConfigurationError(f"val_fraction must be in [0, 1), such as 0.1, found {val_fraction}")
        self.batch_size = batch_size
        self.partition = partition or self.default_partition()
        self.val_fraction = val_fraction
        self.eval_batch_size = eval_batch_size
        self.max_examples = max_examples
        self.fit_split: Literal["val", "test"] = "val" if val_fraction > 0 else "test"
        self._num_clients = num_clients
        self._val_size = 0
        self._index_digests: list[str] = []
        self._class_histograms: list[list[int]] = []
        self.client_names: list[str] = []

    @property
    def num_clients(self) -> int:
        """Return the number of clients. With ``Natural``, it is known only after ``setup``."""
        return len(self.clients) or self._num_clients

    def samples_per_step(self, client_id: int) -> float:
        """Return the number of training samples in a client's batch."""
        return self.batch_size

    def setup(self, stage: str) -> None:
        """Load and partition the data at the first call.

        Raises:
            ConfigurationError: The data are incomplete, the partition is impossible, or the
                validation set would be empty. In the stage ``"fit"``: a client has fewer samples
                than a batch.
        """
        if not self.clients:
            self._make_clients()
        if stage == "fit":
            self._check_client_sizes()

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the server's validation data, or its test data if ``fit_split`` is ``"test"``."""
        return self._evaluation_loader(self.val_images if self.val_fraction > 0 else self.test_images)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the server's test data."""
        return self._evaluation_loader(self.test_images)

    def _make_clients(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define setup(stage)")

    def _evaluation_loader(self, images: Any) -> DataLoader[Batch]:
        return DataLoader(images, self.eval_batch_size)

    def describe_partition(self) -> str:
        """Return the partition in words, such as ``"Shards(class_fraction=0.2), 5 clients"``."""
        return f"{self.partition}, {self.num_clients} clients"

    def partition_record(self) -> PartitionRecord:
        """Return the record of the partition, which includes these entries.

        - ``class_histogram[i][c]``: Number of samples of class c at client i.
        - ``sha256["clients"][i]``: Digest of client i's sample indices (ascending, int64,
          little-endian).
        - ``sha256["total"]``: Digest of all clients' digests. They are written in hexadecimal
          digits and joined.
        - ``clients``: Names of the clients, if they have names.
        """
        total = hashlib.sha256("".join(self._index_digests).encode()).hexdigest()
        record = super().partition_record()
        if self.client_names:
            record["clients"] = self.client_names
        record["seed"], record["val_size"] = self.seed, self._val_size
        record["class_histogram"] = self.class_histograms()
        record["sha256"] = {"total": total, "clients": self._index_digests}
        return record

    def class_histograms(self) -> list[list[int]]:
        """Return ``[i][c]``, the number of training samples of class c at client i."""
        return self._class_histograms

    def distribute(
        self,
        train_labels: Tensor,
        test_labels: Tensor,
        train_groups: Tensor | None = None,
        test_groups: Tensor | None = None,
        group_names: Sequence[str] = (),
    ) -> Distribution:
        """Draw the subset and the server's validation data, and assign the rest to the clients.

        Args:
            train_labels: Class of each training sample, int64, shape ``[N]``.
            test_labels: Class of each test sample, int64, shape ``[M]``.
            train_groups: Group of each training sample, int64, shape ``[N]``. None: no groups.
            test_groups: Group of each test sample, int64, shape ``[M]``. None: all groups share the
                test samples.
            group_names: Names of the groups 0, 1, ...

        Raises:
            ConfigurationError: The partition is impossible, the validation data would be empty, or
                a label is not a class.
        """
        self._check_labels("train_labels", train_labels)
        self._check_labels("test_labels", test_labels)
        dealt = self.distribution = self._dealt(train_labels, test_labels, train_groups, test_groups)
        if dealt.groups and self.max_examples is None:
            drawn = [test_groups] if "test" in self.drawn_splits else []
            groups = torch.cat([x for x in (train_groups, *drawn) if x is not None])
            if lost := set(groups.tolist()).difference(dealt.groups):
                raise ConfigurationError(
                    f"data.groups: the drawn test or validation data hold all samples of group {group_names[min(lost)] if group_names else min(lost)}; leave the group out, or use a "
                    "smaller test_fraction or val_fraction"
                )
        if len(dealt.test) != len(test_labels) or bool((dealt.test < len(train_labels)).any()):
            # the test data are not fixed: the partition file moved samples into or out of them
            self.drawn_splits = ("val", "test")
        self._val_size = len(dealt.val)
        labels = dealt.labels
        classes = self.num_classes or int(labels.max()) + 1
        self._class_histograms = [labels[x].bincount(minlength=classes).tolist() for x in dealt.clients]
        self._index_digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in dealt.clients]
        self.client_names = [group_names[group] for group in dealt.groups] if group_names else []
        return dealt

    def _dealt(
        self,
        train_labels: Tensor,
        test_labels: Tensor,
        train_groups: Tensor | None,
        test_groups: Tensor | None,
    ) -> Distribution:
        labels, num_train = torch.cat([train_labels, test_labels]), len(train_labels)
        used, test = torch.arange(num_train), torch.arange(num_train, len(labels))
        if self.max_examples is not None:
            subset = generator(self.seed, "training subset")
            used = balanced_subset(train_labels, min(self.max_examples, num_train), subset)
        num_val = round(self.val_fraction * len(used))
        if self.val_fraction > 0 and not 0 < num_val < len(used):
            raise ConfigurationError(
                f"val_fraction={self.val_fraction} takes {num_val} of {len(used)} training samples; "
                "use a value that leaves samples for both, or 0 for no validation set"
            )
        own: dict[str, list[Tensor]] = {}
        free, found = used, list[int]()
        if isinstance(self.partition, FromFile):
            given = self.partition.assignment(train_labels, test_labels)
            trained = torch.unique(torch.cat([*given.train, *given.val]))
            tested = torch.cat(given.test)
            _check_used(self.partition, torch.cat([trained, tested]), used, num_train)
            free = _without(_without(used, trained), tested)
            if num_val > len(free):
                raise ConfigurationError(
                    f"val_fraction={self.val_fraction} takes {num_val} training samples, but {self.partition} leaves {len(free)} that belong "
                    f"to no client; use at most {len(free) / len(used):.4g}"
                )
            if given.space == "train+test":
                test = _without(torch.unique(torch.cat([test, tested])), trained)
                if not len(test):
                    raise ConfigurationError(
                        f"{self.partition} gives all test samples to training; leave some to the server or as a client's test data"
                    )
            clients = given.train
            own = {split: part for split in ("val", "test") if any(map(len, part := getattr(given, split)))}
        val = free[balanced_subset(labels[free], num_val, generator(self.seed, "validation split"))]
        if not isinstance(self.partition, FromFile):
            train = _without(used, val)
            groups = train_groups[train] if train_groups is not None else None
            draws = generator(self.seed, "partition")
            parts = self.partition(labels[train], self._num_clients, draws, groups)
            clients = [train[part] for part in parts]
            # HonestOnly contains the partition of the honest clients
            of_honest = getattr(self.partition, "partition", self.partition)
            if groups is not None and isinstance(of_honest, Natural):
                honest = torch.unique(groups).tolist()
                found = [honest[client % len(honest)] for client in range(len(clients))]
                if test_groups is not None:
                    samples = Natural()(test_labels, len(found), draws, test_groups)
                    of = dict(zip(torch.unique(test_groups).tolist(), samples, strict=True))
                    own["test"] = [num_train + of.get(group, val[:0]) for group in found]
        return Distribution(labels, num_train, clients, val, test, own, found)

    def _check_labels(self, name: str, labels: Tensor) -> None:
        lowest, highest = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if lowest < 0 or (self.num_classes is not None and highest >= self.num_classes):
            raise ConfigurationError(
                f"data: {name} of {type(self).__name__} are {lowest} to {highest}, but its classes are "
                f"0 to {self.num_classes - 1 if self.num_classes else '...'}; number the classes from 0, and set num_classes"
            )

    def _check_client_sizes(self) -> None:
        sizes = [sum(own) for own in self._class_histograms]
        for client_id, size in enumerate(sizes):
            if size < self.batch_size:
                raise ConfigurationError(
                    f"batch_size={self.batch_size} is more than the {size} samples of "
                    f"{self.named(client_id)} in {self.describe_partition()}; "
                    f"use batch_size <= {min(sizes)}, fewer clients or a more even partition"
                )
