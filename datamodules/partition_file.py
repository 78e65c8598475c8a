"""Partitions in JSON files: writing and reading."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from fl_lightning.datamodules.partitions import Groups, Partition
from fl_lightning.errors import ConfigurationError, check_choice
from fl_lightning.files import user_path

FORMAT = "fl_lightning.partition/1"
SPACES = ("train", "train+test")
SPLITS = ("train", "val", "test")


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
        """Return the content of a partition file, which :class:`FromFile` reads.

        Args:
            dataset: Name of the data set.
            origin: Description of how the partition was made.
        """
        splits = {"train": self.clients, **self.own}
        everything = torch.cat([samples for parts in splits.values() for samples in parts])
        space = "train" if bool((everything < self.num_train).all()) else "train+test"
        labels = self.labels[: self.num_train] if space == "train" else self.labels
        clients = [
            {"id": str(client), **{split: parts[client].tolist() for split, parts in splits.items()}}
            for client in range(len(self.clients))
        ]
        return {
            "format": FORMAT,
            "dataset": dataset,
            "space": space,
            "examples": len(labels),
            "labels_sha256": _labels_sha256(labels),
            "overlap": len(torch.unique(everything)) < len(everything),
            "clients": clients,
            "origin": origin,
        }


class FromFile(Partition):
    """Partition from a JSON file, which ``partition --save`` or another program writes.

    ::

        {"format": "fl_lightning.partition/1", "dataset": "cifar10", "space": "train", "examples": 50000,
         "labels_sha256": "...", "clients": [{"id": "0", "train": [3, 17], "val": [], "test": [9]}]}

    - ``train``, ``val`` and ``test`` are indices of a client's training data and of its own
      evaluation data.
    - ``space`` says which samples have an index: ``train`` or ``train+test``. With ``train+test``,
      the N training samples have indices 0 to N - 1, and test samples have indices from N on. The
      server's test data then consist of the clients' test samples and of all test samples that
      belong to no client.
    - ``labels_sha256`` is the digest of all labels in the order of the samples (int64,
      little-endian).
    - A client has no sample twice. Two clients may share samples only if the file has ``"overlap":
      true``. No sample may be training data of one client and evaluation data of the same or
      another client.
    - The data module ignores its setting ``num_clients``. Its setting ``val_fraction`` draws from
      the training samples that belong to no client.

    Args:
        path: The file.

    Raises:
        ConfigurationError: The file does not exist.
    """

    ignores_groups = True
    deciding_files = ("path",)

    def __init__(self, path: str) -> None:
        if not user_path("partition.path", path).is_file():
            raise ConfigurationError(
                f"partition.path: {path} is no file; python -m fl_lightning partition --save FILE.json writes one"
            )
        self.path = path

    def __call__(
        self, labels: Tensor, num_clients: int, generator: Generator, groups: Groups = None
    ) -> list[Tensor]:
        """See :meth:`Partition.__call__`. The file must have the space ``train``."""
        return self.read(labels, labels[:0])[0]["train"]

    def read(self, train_labels: Tensor, test_labels: Tensor) -> tuple[dict[str, list[Tensor]], bool]:
        """Return the indices of each client's samples, int64 and ascending, by split.

        The splits are ``"train"``, ``"val"`` and ``"test"``. Each client has at least one training
        sample.

        Args:
            train_labels: Class of each training sample, int64, shape ``[N]``.
            test_labels: Class of each test sample, int64, shape ``[M]``.

        Returns:
            The indices, and whether test samples are assigned too (``space`` is ``train+test``).

        Raises:
            ConfigurationError: The file has another format, belongs to other data or has invalid
                clients.
        """
        content = self._content()
        space = str(content.get("space"))
        check_choice(f"partition.path: {self.path}: space", space, SPACES)
        labels = torch.cat([train_labels, test_labels]) if space == "train+test" else train_labels
        for name, value in (("examples", len(labels)), ("labels_sha256", _labels_sha256(labels))):
            if content.get(name) != value:
                raise self._wrong(
                    f"{name} is {content.get(name)} (data set {content.get('dataset')}), but here it is {value}; use the data set "
                    "and the order of samples that the file was made with"
                )
        clients = content.get("clients")
        if not isinstance(clients, list) or not clients or not all(isinstance(x, dict) for x in clients):
            raise self._wrong('clients must be a list such as [{"id": "0", "train": [3, 17]}, ...]')
        if unknown := {key for client in clients for key in client} - {"id", *SPLITS}:
            raise self._wrong(f"a client has the key {min(unknown)!r}; use id, {', '.join(SPLITS)}")
        ids = [str(client.get("id", number)) for number, client in enumerate(clients)]
        (name, count), *_ = Counter(ids).most_common(1)
        if count > 1:
            raise self._wrong(f"{count} clients have the id {name!r}; give each client its own")
        parts = {
            split: [
                self._samples(client.get(split, []), f"client {name}, {split}", len(labels))
                for name, client in zip(ids, clients, strict=True)
            ]
            for split in SPLITS
        }
        self._check_shared(ids, parts, content.get("overlap") is True)
        return parts, space == "train+test"

    def client_of_each(self, labels: Tensor) -> Tensor:
        """Return the client of each sample, int64 ``[N]``.

        Args:
            labels: Class of each sample, int64 ``[N]``.

        Raises:
            ConfigurationError: A sample is evaluation data, or does not belong to exactly one client.
        """
        parts, _ = self.read(labels, labels[:0])
        counts = torch.cat(parts["train"]).bincount(minlength=len(labels))
        for sample in (counts != 1).nonzero().flatten()[:1].tolist():
            raise self._wrong(
                f"the sample {sample} is training data of {int(counts[sample])} clients; with data.folds, each sample must be training data of one client"
            )
        client = torch.empty_like(labels)
        for number, samples in enumerate(parts["train"]):
            client[samples] = number
        return client

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(user_path("partition.path", self.path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self._wrong(
                f"cannot be read as JSON ({type(error).__name__}: {error}); write it anew"
            ) from error
        kind = content.get("format") if isinstance(content, dict) else None
        if kind != FORMAT:
            raise self._wrong(f"the format is {kind!r}; it must be {FORMAT!r}, see docs/data.md")
        return dict(content)

    def _wrong(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"partition.path: {self.path}: {problem}")

    def _samples(self, given: Any, whose: str, total: int) -> Tensor:
        if not isinstance(given, list) or not all(type(sample) is int for sample in given):
            raise self._wrong(f"{whose} is no list of whole numbers")
        if outside := [sample for sample in given if not 0 <= sample < total]:
            raise self._wrong(f"{whose} has the sample {outside[0]}; samples are 0 to {total - 1}")
        return torch.tensor(sorted(given), dtype=torch.int64)

    def _check_shared(self, ids: list[str], parts: dict[str, list[Tensor]], overlap: bool) -> None:
        owners: dict[int, str] = {}
        trained = torch.cat(parts["train"])
        for name, train, *held in zip(ids, *parts.values(), strict=True):
            if not len(train):
                raise self._wrong(f"client {name} has no training sample; leave the client out")
            for sample, count in Counter(torch.cat([train, *held]).tolist()).items():
                if count > 1:
                    raise self._wrong(f"client {name} has the sample {sample} twice; list it once")
                if owners.setdefault(sample, name) != name and not overlap:
                    raise self._wrong(
                        f'clients {owners[sample]} and {name} both have the sample {sample}; list it at one client, or set "overlap": true'
                    )
            if len(seen := [sample for part in held for sample in part[torch.isin(part, trained)].tolist()]):
                raise self._wrong(
                    f"client {name} evaluates on the sample {seen[0]}, which a client trains on; only training samples may be shared"
                )


def _labels_sha256(labels: Tensor) -> str:
    return hashlib.sha256(labels.numpy().astype("<i8").tobytes()).hexdigest()
