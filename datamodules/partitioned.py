"""Labelled samples of one data set, spread over clients."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.datamodules.distribution import Distribution, distribute
from fl_lightning.datamodules.partitions import IID, Partition
from fl_lightning.errors import ConfigurationError


class PartitionedDataModule(FederatedDataModule):
    """The base of data sets whose training samples are spread over the clients by their labels.

    Args:
        num_clients: Number of clients; with ``Natural`` their number is that of the groups, with ``FromFile`` that of the
            file, and this one is not used.
        batch_size: Samples in a client's batch, 20 in the FixBN paper. Every batch is complete: what is left
            of an epoch is dropped.
        partition: How the training data are spread over the clients; None is ``IID()``.
        val_fraction: Share of the training data, in [0, 1), that becomes the server's validation set before
            the clients receive theirs; drawn by the seed, every class in proportion. With 0 the evaluation
            inside ``fit`` uses the test data and is labelled so.
        eval_batch_size: Samples in a batch of the server's evaluation.
        seed: Seed of the subset, the validation set, the partition, the data order and the augmentation.
        max_examples: Use only that many training images, every class in proportion, for reduced runs; None
            for all.

    Attributes:
        distribution: Who has which samples; known after ``setup``.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    distribution: Distribution

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
        at_least_one = {
            "num_clients": num_clients,
            "batch_size": batch_size,
            "eval_batch_size": eval_batch_size,
        }
        for name, value in {
            **at_least_one,
            "max_examples": 1 if max_examples is None else max_examples,
        }.items():
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, found {value}")
        if not 0 <= val_fraction < 1:
            raise ConfigurationError(f"val_fraction must be in [0, 1), such as 0.1, found {val_fraction}")
        self.batch_size = batch_size
        self.partition = partition if partition is not None else IID()
        self.val_fraction = val_fraction
        self.eval_batch_size = eval_batch_size
        self.max_examples = max_examples
        self.fit_split: Literal["val", "test"] = "val" if val_fraction > 0 else "test"
        self._num_clients = num_clients
        self._val_size = 0
        self._index_digests: list[str] = []
        self._class_histograms: list[list[int]] = []
        self._client_names: list[str] = []

    @property
    def num_clients(self) -> int:
        """Number of clients of the federation; with ``Natural`` it is known after ``setup``."""
        return len(self.clients) or self._num_clients

    def samples_per_step(self, client_id: int) -> float:
        """Training samples in a client's batch: every batch is complete."""
        return self.batch_size

    def describe_partition(self) -> str:
        """The partition and the number of clients, such as ``"Shards(class_fraction=0.2), 5 clients"``."""
        return f"{self.partition}, {self.num_clients} clients"

    def partition_record(self) -> dict[str, Any]:
        """Sizes, seed, class histogram and digests of the partition, and what the clients are called where that is known.

        ``class_histogram[i][c]`` counts the samples of class c at client i. ``sha256["clients"][i]`` is the
        digest of client i's indices into the whole training set (ascending, int64, little-endian),
        ``sha256["total"]`` that of all the clients' hexadecimal digests joined.
        """
        total = hashlib.sha256("".join(self._index_digests).encode()).hexdigest()
        return {
            **super().partition_record(),
            **({"clients": self._client_names} if self._client_names else {}),
            "seed": self.seed,
            "val_size": self._val_size,
            "class_histogram": self.class_histograms(),
            "sha256": {"total": total, "clients": self._index_digests},
        }

    def class_histograms(self) -> list[list[int]]:
        """``[i][c]``: client i's training examples of class c."""
        return self._class_histograms

    def distribute(
        self,
        train_labels: Tensor,
        test_labels: Tensor,
        train_groups: Tensor | None = None,
        test_groups: Tensor | None = None,
        group_names: Sequence[str] = (),
    ) -> Distribution:
        """Decide who gets which samples, see :func:`~fl_lightning.datamodules.distribution.distribute`; group g is called ``group_names[g]``.

        Raises:
            ConfigurationError: As there, or a label is none of a class.
        """
        self._check_labels("train_labels", train_labels)
        self._check_labels("test_labels", test_labels)
        found = self.distribution = distribute(
            train_labels, test_labels, train_groups, test_groups,
            self.partition, self._num_clients, self.val_fraction, self.max_examples, self.seed,
        )  # fmt: skip
        if len(found.test) != len(test_labels) or bool((found.test < len(train_labels)).any()):
            self.drawn_splits = ("val", "test")  # by a file that spreads test samples over the clients, too
        self._val_size = len(found.val)
        labels, classes = found.labels, self.num_classes or int(found.labels.max()) + 1
        self._class_histograms = [labels[x].bincount(minlength=classes).tolist() for x in found.clients]
        self._index_digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in found.clients]
        self._client_names = [group_names[group] for group in found.groups] if group_names else []
        return found

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
                    f"batch_size={self.batch_size} is more than the {size} samples of client "
                    f"{client_id} ({self.describe_partition()}); "
                    f"use batch_size <= {min(sizes)}, fewer clients or a more even partition"
                )
