"""Base class of data sets whose samples a partition assigns to clients and server."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fl_lightning.client_data.federated import FederatedDataModule, PartitionRecord
from fl_lightning.client_data.fingerprint import digest
from fl_lightning.client_data.held_out import clients_in_order
from fl_lightning.datamodules.images import Batch, balanced_subset
from fl_lightning.datamodules.partition_file import Distribution, FromFile
from fl_lightning.datamodules.partitions import IID, Natural, Partition
from fl_lightning.datamodules.subjects import Subjects
from fl_lightning.errors import ConfigurationError, check_at_least, counted
from fl_lightning.randomness import generator


def _drawn(
    samples: Tensor, labels: Tensor, count: int, draws: torch.Generator, subjects: Subjects | None
) -> Tensor:
    """Draw ``count`` samples, stratified by label, or the same share of the samples' subjects."""
    if subjects is None:
        return samples[balanced_subset(labels[samples], count, draws)]
    return subjects.subset(samples, count / max(len(samples), 1), draws)


def _without(samples: Tensor, others: Tensor) -> Tensor:
    return samples[~torch.isin(samples, others)]


class PartitionedDataModule(FederatedDataModule):
    """Base class of data sets whose training samples a partition assigns to the clients.

    Args:
        num_clients: Number of clients. Ignored with the partitions ``Natural`` and ``FromFile``.
        batch_size: Number of samples in a client's batch. The FixBN paper uses 20. Every batch is
            complete: if the last samples of an epoch do not fill a batch, they are dropped. A client
            with fewer samples trains on all its samples as one batch.
        partition: Partition of the training data over the clients. None: ``default_partition()``.
        val_fraction: Share of the training data, in [0, 1), that becomes the server's validation
            set. The draw is stratified and depends on the seed. With 0, the evaluation inside
            ``fit`` uses the test data, and its metrics are called ``test/...``.
        eval_batch_size: Number of samples in a batch of the server's evaluation.
        seed: Seed of the subset, the validation set, the partition, the data order and the
            augmentation.
        max_examples: Size of a stratified subset of the training data, for reduced runs. None: all
            training data.
        min_examples: Minimum number of training samples of a client. Clients with fewer samples are
            left out, and a run names them.
        held_out: Clients of the partition that never train: their number, their fraction in [0, 1),
            or their names. ``ParticipationGap`` evaluates them. A number or fraction is drawn at
            random, and depends on the seed. The server's validation and test data have no sample
            of these clients.

    Attributes:
        distribution: Samples of clients and server. It is known after ``setup``.
        default_partition: Class of the default partition. It is ``Natural`` for data with groups.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    distribution: Distribution
    default_partition: type[Partition] = IID
    _subject_setting = "data.subjects"
    _subjects: Subjects | None = None
    _draws_test = False  # whether the test data are drawn from the same samples as the training data

    def __init__(
        self,
        num_clients: int = 10,
        batch_size: int = 20,
        partition: Partition | None = None,
        val_fraction: float = 0.0,
        eval_batch_size: int = 500,
        seed: int = 0,
        max_examples: int | None = None,
        min_examples: int = 1,
        held_out: int | float | list[str | int] = 0,
    ) -> None:
        super().__init__(seed=seed)
        self._held_out = held_out
        check_at_least(1, num_clients=num_clients, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_at_least(1, max_examples=1 if max_examples is None else max_examples, min_examples=min_examples)
        if not 0 <= val_fraction < 1:
            raise ConfigurationError(f"val_fraction must be in [0, 1), such as 0.1, found {val_fraction}")
        self.batch_size = batch_size
        self.partition = partition or self.default_partition()
        self.val_fraction = val_fraction
        self.eval_batch_size = eval_batch_size
        self.max_examples = max_examples
        self.min_examples = min_examples
        self.fit_split: Literal["val", "test"] = "val" if val_fraction > 0 else "test"
        self._num_clients = num_clients
        self.client_names: list[str] = []
        self._unseen = torch.empty(0, dtype=torch.int64)  # samples of clients that never train

    @property
    def num_clients(self) -> int:
        """Return the number of clients that train. With ``Natural``, it is known only after ``setup``."""
        return (len(self.clients) or self._num_clients) - self._num_held_out

    def samples_per_step(self, client_id: int) -> float:
        """Return the number of training samples in a client's batch."""
        return min(self.batch_size, len(self.distribution.clients[client_id]))

    def most_of_a_subject(self) -> int:
        """Return the largest number of training samples of a subject; 1 without subjects."""
        subjects, clients = self._subjects, self.distribution.clients
        return 1 if subjects is None else max(int(subjects.of[x].bincount().max()) for x in clients)

    def setup(self, stage: str) -> None:
        """Load and partition the data at the first call.

        Raises:
            ConfigurationError: The data are incomplete, the partition is impossible, or the
                validation set would be empty.
        """
        if not self.clients:
            self._make_clients()
            self.note_small_clients(
                [*map(len, self.distribution.clients[: self.num_clients])], self.batch_size
            )

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the server's validation data, or its test data if ``fit_split`` is ``"test"``."""
        return self._loader(self.distribution.val if self.val_fraction > 0 else self.distribution.test)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the server's test data."""
        return self._loader(self.distribution.test)

    def own_dataloader(self, client_id: int, split: str) -> DataLoader[Batch] | list[Batch] | None:
        """Return a client's own evaluation data: ``[]`` if it has none, None if no client has any."""
        parts = self.distribution.own.get(split)
        if not parts or not any(map(len, parts)):
            return None
        return self._loader(parts[client_id]) if len(parts[client_id]) else []

    def own_size(self, client_id: int, split: str) -> int:
        """Return the number of a client's own evaluation samples."""
        parts = self.distribution.own.get(split)
        return len(parts[client_id]) if parts else 0

    def own_samples(self, client_id: int, split: str) -> Mapping[str, Sequence[str | int]]:
        """Return columns that identify a client's own evaluation samples, in their loader's order."""
        if not (parts := self.distribution.own.get(split)):
            return {}
        columns, samples = self._identified(parts[client_id]), parts[client_id]
        if (subjects := self._subjects) is not None:
            columns["subject"] = [subjects.names[x] for x in subjects.of[samples].tolist()]
        return columns

    def _identified(self, samples: Tensor) -> dict[str, Sequence[str | int]]:
        """Return columns that identify samples, which are given by their indices, but for subjects."""
        return {"index": samples.tolist()}

    def _make_clients(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define setup(stage)")

    def _loader(self, samples: Tensor) -> DataLoader[Batch]:
        """Return a loader of evaluation data for indices of samples, as in :class:`Distribution`."""
        raise NotImplementedError(f"{type(self).__name__} must define _loader(samples)")

    def _content(self, samples: Tensor) -> str:
        """Return a digest of samples, which are given by their indices."""
        raise NotImplementedError(f"{type(self).__name__} must define _content(samples)")

    def describe_partition(self) -> str:
        """Return the partition in words, such as ``"Shards(class_fraction=0.2), 5 clients"``."""
        return f"{self.partition}, {self.num_clients} clients{self._and_held_out()}"

    def partition_record(self) -> PartitionRecord:
        """Return the record of the partition, which includes these entries.

        - ``sha256["clients"][i]``: Digest of client i's sample indices (ascending, int64,
          little-endian).
        - ``sha256["total"]``: Digest of all clients' digests. They are written in hexadecimal
          digits and joined.
        """
        digests = self.index_digests()
        total = hashlib.sha256("".join(digests).encode()).hexdigest()
        record = super().partition_record()
        record["seed"], record["val_size"] = self.seed, len(self.distribution.val)
        record["sha256"] = {"total": total, "clients": digests}
        return record

    def evaluation_digest(self, split: Literal["val", "test"] = "val") -> str:
        """Return the digest of the server's validation and test data."""
        return self._content(torch.cat([self.distribution.val, self.distribution.test]))

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the training data, the evaluation data and the partition."""
        return {
            "training": self._content(torch.unique(torch.cat(self.distribution.clients))),
            "evaluation": self.evaluation_digest(),
            "partition": digest(self.index_digests()),
        }

    def index_digests(self) -> list[str]:
        """Return the SHA-256 of each client's sample indices (ascending, int64, little-endian)."""
        return [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in self.distribution.clients]

    def trained(self) -> Tensor:
        """Return the indices of all training samples, except for samples of clients that never train."""
        return _without(torch.arange(self.distribution.num_train), self._unseen)

    def class_histograms(self) -> list[list[int]]:
        """Return ``[i][c]``, the number of training samples of class c at client i."""
        labels = self.distribution.labels
        classes = self.num_classes or int(labels.max()) + 1
        return [labels[x].bincount(minlength=classes).tolist() for x in self.distribution.clients]

    def use_range(self, found: Sequence[float]) -> None:
        """Note the range of pixels of the training images, and use it unless it is a setting.

        Args:
            found: Smallest and largest value in images of more than 8 bits; [] if there are none.

        Raises:
            ConfigurationError: The range is no setting, although there are held-out clients.
        """
        if self.pixel_range is not None or not found:
            return
        self.pixel_range, (low, high) = found, found
        if self._held_out:
            raise ConfigurationError(
                "data.pixel_range: held-out clients must not decide it; set it to the range of the other clients' pixels, or of the scanner, "
                "such as [0, 4095]"
            )
        self.notes.append(
            f"pixels of more than 8 bits: {low:.10g} to {high:.10g}, the range of the training images, become 0 to 255 (data.pixel_range)"
        )

    def distribute(
        self,
        train_labels: Tensor,
        test_labels: Tensor,
        train_groups: Tensor | None = None,
        test_groups: Tensor | None = None,
        group_names: Sequence[str] = (),
        subjects: Subjects | None = None,
    ) -> Distribution:
        """Draw the subset and the server's validation data, and assign the rest to the clients.

        All samples of a subject stay together: in the subset, and at the server or at one client.

        Args:
            train_labels: Class of each training sample, int64, shape ``[N]``.
            test_labels: Class of each test sample, int64, shape ``[M]``.
            train_groups: Group of each training sample, int64, shape ``[N]``. None: no groups.
            test_groups: Group of each test sample, int64, shape ``[M]``. None: all groups share the
                test samples.
            group_names: Names of the groups 0, 1, ...
            subjects: Subject of each training and test sample. None: each sample is a subject.

        Raises:
            ConfigurationError: The partition is impossible, the validation data would be empty, a
                label is not a class, a subject is in two parts, or no client has ``min_examples``
                samples.
        """
        self._check_labels("train_labels", train_labels)
        self._check_labels("test_labels", test_labels)
        labels, num_train = torch.cat([train_labels, test_labels]), len(train_labels)
        self._subjects = subjects
        if subjects is not None:
            self._check_subjects(
                subjects, num_train, [x for x in (train_groups, test_groups) if x is not None], group_names
            )
        used = torch.arange(num_train)
        if self.max_examples is not None:
            subset = generator(self.seed, "training subset")
            used = _drawn(used, labels, min(self.max_examples, num_train), subset, subjects)
        size, unit = len(used), "training samples"
        if subjects is not None:
            size, unit = len(subjects.of_samples(used)), "subjects of the training samples"
        num_val = round(self.val_fraction * len(used))
        if self.val_fraction > 0 and not 0 < (taken := round(self.val_fraction * size)) < size:
            raise ConfigurationError(
                f"val_fraction={self.val_fraction} takes {taken} of {size} {unit}; "
                "use a value that leaves samples for both, or 0 for no validation set"
            )
        free, test = used, torch.arange(num_train, len(labels))
        own, groups, clients = dict[str, list[Tensor]](), list[int](), list[Tensor]()
        if isinstance(self.partition, FromFile):
            parts, free, test = self._from_file(self.partition, labels, num_train, used)
            clients = parts.pop("train")
            if subjects is not None:
                named = {
                    f"{split} of client {client}": [part]
                    for split in ("train", *parts)
                    for client, part in enumerate(parts.get(split, clients))
                }
                subjects.check_apart(named | {"the server's data": [free, test]}, self._subject_setting)
            own = {split: part for split, part in parts.items() if any(map(len, part))}
            if num_val > len(free):
                raise ConfigurationError(
                    f"val_fraction={self.val_fraction} takes {num_val} training samples, but {self.partition} leaves {len(free)} that belong "
                    f"to no client; use at most {len(free) / len(used):.4g}"
                )
        val = _drawn(free, labels, num_val, generator(self.seed, "validation split"), subjects)
        if self.val_fraction > 0 and not len(val):
            raise ConfigurationError(
                f"val_fraction={self.val_fraction} takes no subject of those that belong to no client; use a larger value, or 0"
            )
        if not isinstance(self.partition, FromFile):
            clients, groups = self._dealt(labels, _without(used, val), train_groups, subjects)
            if groups and test_groups is not None:
                own["test"] = [(test_groups == group).nonzero().flatten() + num_train for group in groups]
        dealt = Distribution(labels, num_train, clients, val, test, own, groups)
        drawn = test_groups if self._draws_test else None
        every = [x.tolist() for x in (train_groups, drawn) if x is not None] if groups else []
        dealt = self._large_enough(dealt, chain(*every), group_names)
        names = [group_names[group] for group in dealt.groups] if group_names else []
        order, self._num_held_out = clients_in_order(self._held_out, names, len(dealt.clients), self.seed)
        if self._num_held_out:
            dealt = self._without_held_out(_chosen(dealt, order), train_groups)
        self.distribution = dealt
        if subjects is not None:
            self._note_absent_classes(dealt)
        self.client_names = [group_names[group] for group in dealt.groups] if group_names else []
        return dealt

    def _check_subjects(
        self, subjects: Subjects, num_train: int, groups: Sequence[Tensor], group_names: Sequence[str]
    ) -> None:
        """Require that each subject is in one group, and not in training and test data."""
        count, setting = len(subjects.of), self._subject_setting
        self.notes.append(f"{count:,} samples of {len(subjects.names):,} subjects ({setting})")
        if not isinstance(self.partition, FromFile):  # a file may assign test samples to clients
            train, test = torch.arange(count).tensor_split([num_train])
            subjects.check_apart({"the training data": [train], "the test data": [test]}, setting)
        if groups:
            of = torch.cat([*groups])
            every = {group_names[x] if group_names else str(x): of == x for x in sorted({*of.tolist()})}
            named = {f"the group {name}": [here.nonzero().flatten()] for name, here in every.items()}
            subjects.check_apart(named, setting)

    def _note_absent_classes(self, dealt: Distribution) -> None:
        """Add a note for each class whose subjects are all in the other parts of the data."""
        if self.num_classes is None:
            return
        parts = {"training": torch.cat(dealt.clients), "validation": dealt.val, "test": dealt.test}
        for part, samples in parts.items():
            absent = set(dealt.labels.tolist()) - set(dealt.labels[samples].tolist())
            if len(samples) and absent:
                names = [self.class_names[x] if self.class_names else str(x) for x in sorted(absent)]
                self.notes.append(
                    f"no {part} sample has the class {', '.join(names)}: it has too few subjects"
                )

    def _without_held_out(self, dealt: Distribution, groups: Tensor | None) -> Distribution:
        """Take the samples of clients that never train out of the server's evaluation data.

        Validation samples of such a client's group become training samples of the client.
        """
        clients, first = [*dealt.clients], len(dealt.clients) - self._num_held_out
        for client, group in [*enumerate(dealt.groups)][first:]:
            assert groups is not None
            of_group = torch.eq(groups, group).nonzero().flatten()
            clients[client] = torch.cat([clients[client], dealt.val[torch.isin(dealt.val, of_group)]])
            self._unseen = torch.cat([self._unseen, of_group])
        parts = [part for parts in (clients, *dealt.own.values()) for part in parts[first:]]
        self._unseen = torch.cat([self._unseen, *parts])
        val, test = _without(dealt.val, self._unseen), _without(dealt.test, self._unseen)
        for split, before, after in (("validation", dealt.val, val), ("test", dealt.test, test)):
            if len(before) and not len(after):
                raise ConfigurationError(
                    f"held_out={self._held_out} leaves no {split} data, as all are of clients that never train; hold out fewer clients"
                )
        return replace(dealt, clients=clients, val=val, test=test)

    def _dealt(
        self, labels: Tensor, train: Tensor, groups: Tensor | None, subjects: Subjects | None
    ) -> tuple[list[Tensor], list[int]]:
        """Return each client's samples, and each client's group if the partition is ``Natural``."""
        draws = generator(self.seed, "partition")
        if subjects is None:
            of_train = None if groups is None else groups[train]
            parts = self.partition(labels[train], self._num_clients, draws, of_train)
            clients = [train[part] for part in parts]
        else:
            every = subjects.of_samples(train)
            by_label = not isinstance(getattr(self.partition, "partition", self.partition), IID | Natural)
            if by_label and bool((mixed := subjects.mixed[every]).any()):
                raise ConfigurationError(
                    f"data.subjects: {subjects.names[int(every[mixed][0])]} has samples of several classes, which {self.partition} cannot "
                    "divide by class; use data.partition: IID or Natural"
                )
            first = {int(subjects.of[sample]): sample for sample in train.flip(0).tolist()}
            group_of = None if groups is None else groups[torch.tensor([first[x] for x in every.tolist()])]
            parts = self.partition(subjects.labels[every], self._num_clients, draws, group_of)
            clients = [subjects.samples(every[part], train) for part in parts]
        # HonestOnly contains the partition of the honest clients
        natural = isinstance(getattr(self.partition, "partition", self.partition), Natural)
        return clients, [int(groups[x[0]]) for x in clients] if natural and groups is not None else []

    def _from_file(
        self, partition: FromFile, labels: Tensor, num_train: int, used: Tensor
    ) -> tuple[dict[str, list[Tensor]], Tensor, Tensor]:
        """Return the clients' samples by split, the training samples without a client, and the test samples."""
        parts, assigns_test = partition.read(labels[:num_train], labels[num_train:])
        trained = torch.unique(torch.cat([*parts["train"], *parts["val"]]))
        tested = torch.cat(parts["test"])
        held = torch.cat([trained, tested])
        if len(dropped := _without(held[held < num_train], used)):
            raise ConfigurationError(
                f"max_examples={len(used)} leaves out the sample {int(dropped[0])} of {partition}; leave max_examples out"
            )
        test = torch.arange(num_train, len(labels))
        if assigns_test:
            test = _without(torch.unique(torch.cat([test, tested])), trained)
            if not len(test):
                raise ConfigurationError(
                    f"{partition} gives all test samples to training; leave some to the server or as a client's test data"
                )
        return parts, _without(used, held), test

    def _check_labels(self, name: str, labels: Tensor) -> None:
        lowest, highest = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if lowest < 0 or (self.num_classes is not None and highest >= self.num_classes):
            raise ConfigurationError(
                f"data: {name} of {type(self).__name__} are {lowest} to {highest}, but its classes are "
                f"0 to {self.num_classes - 1 if self.num_classes else '...'}; number the classes from 0, and set num_classes"
            )

    def _large_enough(
        self, dealt: Distribution, groups: Iterable[int], group_names: Sequence[str]
    ) -> Distribution:
        """Leave out clients with fewer than ``min_examples`` samples, and groups without a client."""
        ids = dealt.groups or range(len(dealt.clients))
        sizes = dict.fromkeys(groups, 0) | dict(zip(ids, map(len, dealt.clients), strict=True))
        small = {x: size for x, size in sorted(sizes.items()) if size < self.min_examples}
        if len(small) == len(sizes):
            raise ConfigurationError(
                f"min_examples={self.min_examples} leaves no client; use at most {max(sizes.values())}, the most samples of a client"
            )
        if not small:
            return dealt
        named = {group_names[x] if dealt.groups and group_names else str(x): small[x] for x in small}
        self.notes.append(
            f"left out, as they have fewer training samples than min_examples={self.min_examples}: {counted(named)}"
        )
        return _chosen(dealt, [client for client, x in enumerate(ids) if x not in small])


def _chosen(dealt: Distribution, clients: Sequence[int]) -> Distribution:
    own = {split: [parts[client] for client in clients] for split, parts in dealt.own.items()}
    groups = [dealt.groups[client] for client in clients] if dealt.groups else []
    return replace(dealt, clients=[dealt.clients[client] for client in clients], own=own, groups=groups)
