"""Who has which samples of a labelled data set: the clients, the server, and the clients' own evaluation data."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.datamodules.images import ImageData, balanced_subset
from fl_lightning.datamodules.partition import natural
from fl_lightning.datamodules.partition_file import FORMAT, FromFile, labels_sha256
from fl_lightning.datamodules.partitions import Natural, Partition
from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import generator


@dataclass(frozen=True)
class Distribution:
    """Samples by their numbers, int64, ascending: training samples are 0 to N - 1, test samples follow.

    Attributes:
        labels: Class of each sample, shape ``[N + M]``.
        num_train: N.
        clients: Training samples of each client.
        val: The server's validation data.
        test: The server's test data.
        own: Evaluation data of the clients' own by split, ``"val"`` or ``"test"``; no entry where nobody has any.
        groups: The group that each client is, where each is one.
    """

    labels: Tensor
    num_train: int
    clients: list[Tensor]
    val: Tensor
    test: Tensor
    own: dict[str, list[Tensor]]
    groups: list[int]

    def as_file(self, dataset: str, origin: dict[str, Any]) -> dict[str, Any]:
        """The clients as :class:`~fl_lightning.datamodules.partition_file.FromFile` reads them.

        Args:
            dataset: Name of the data set.
            origin: Where the partition comes from.
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


def distribute(
    train_labels: Tensor,
    test_labels: Tensor,
    train_groups: Tensor | None,
    test_groups: Tensor | None,
    partition: Partition,
    num_clients: int,
    val_fraction: float,
    max_examples: int | None,
    seed: int,
) -> Distribution:
    """Take the subset and the server's validation data, and spread the rest over the clients.

    Args:
        train_labels: Class of each training sample, int64, shape ``[N]``.
        test_labels: Class of each test sample, int64, shape ``[M]``.
        train_groups: Group of each training sample, int64, shape ``[N]``, for data that come in groups.
        test_groups: Group of each test sample, int64, shape ``[M]``, likewise.
        partition: How its training samples are spread.
        num_clients: Number of clients, where the partition does not know it itself.
        val_fraction: Share of the training samples, in [0, 1), for the server's validation data, every class in proportion.
        max_examples: Use only that many training samples, every class in proportion; None for all.
        seed: Seed of all three.

    Raises:
        ConfigurationError: The partition is impossible, or the validation data would be empty.
    """
    labels, num_train = torch.cat([train_labels, test_labels]), len(train_labels)
    used, test = torch.arange(num_train), torch.arange(num_train, len(labels))
    if max_examples is not None:
        subset = generator(seed, "training subset")
        used = balanced_subset(train_labels, min(max_examples, num_train), subset)
    num_val = round(val_fraction * len(used))
    if val_fraction > 0 and not 0 < num_val < len(used):
        raise ConfigurationError(
            f"val_fraction={val_fraction} takes {num_val} of {len(used)} training samples; "
            "use a value that leaves samples for both, or 0 for no validation set"
        )
    own: dict[str, list[Tensor]] = {}
    free, found = used, list[int]()
    if isinstance(partition, FromFile):
        given = partition.assignment(train_labels, test_labels)
        trained = torch.unique(torch.cat([*given.train, *given.val]))
        tested = torch.cat(given.test)
        _check_used(partition, torch.cat([trained, tested]), used, num_train)
        free = _without(_without(used, trained), tested)
        if num_val > len(free):
            raise ConfigurationError(
                f"val_fraction={val_fraction} takes {num_val} training samples, but {partition} leaves {len(free)} that no client "
                f"has; use at most {len(free) / len(used):.4g}"
            )
        if given.space == "train+test":
            test = _without(torch.unique(torch.cat([test, tested])), trained)
            if not len(test):
                raise ConfigurationError(
                    f"{partition} gives all test samples to training; leave some for the server or as a client's test"
                )
        clients = given.train
        own = {split: part for split in ("val", "test") if any(map(len, part := getattr(given, split)))}
    val = free[balanced_subset(labels[free], num_val, generator(seed, "validation split"))]
    if not isinstance(partition, FromFile):
        train = _without(used, val)
        groups = train_groups[train] if train_groups is not None else None
        parts = partition(labels[train], num_clients, generator(seed, "partition"), groups)
        clients = [train[part] for part in parts]
        if groups is not None and isinstance(partition, Natural):
            found = torch.unique(groups).tolist()
            if test_groups is not None:
                of = dict(zip(torch.unique(test_groups).tolist(), natural(test_groups), strict=True))
                own["test"] = [num_train + of.get(group, val[:0]) for group in found]
    return Distribution(labels, num_train, clients, val, test, own, found)


def images_at(data: ImageData, samples: Tensor) -> Tensor:
    """The images of samples that are numbered as in :class:`Distribution`, ascending; all of a part are not copied."""
    num_train = len(data.train_labels)
    inner = int((samples < num_train).sum())
    found = [
        part if len(index) == len(part) else part[index]
        for part, index in (
            (data.train_images, samples[:inner]),
            (data.test_images, samples[inner:] - num_train),
        )
        if len(index)
    ]
    return torch.cat(found) if len(found) > 1 else (found or [data.train_images[:0].clone()])[0]


def _without(samples: Tensor, others: Tensor) -> Tensor:
    return samples[~torch.isin(samples, others)]


def _check_used(partition: FromFile, held: Tensor, used: Tensor, num_train: int) -> None:
    left_out = _without(held[held < num_train], used)
    if len(left_out):
        raise ConfigurationError(
            f"max_examples={len(used)} leaves out the sample {int(left_out[0])} of {partition}, which decides who has which "
            "samples; leave max_examples out"
        )
