"""Federated image classification with all data in memory as uint8."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.client import InMemoryClient
from datamodules.distribution import Distribution, distribute, images_at
from datamodules.images import (
    Batch,
    EvaluationImages,
    ImageData,
    Normalization,
    TrainImages,
    channel_statistics,
)
from datamodules.partitions import IID, Partition
from fl_lightning.client_data.cohort_batch import CohortBatch
from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.client_data.fingerprint import digest
from fl_lightning.errors import ConfigurationError


class InMemoryDataModule(FederatedDataModule):
    """The base of the shipped image classification data sets: a subclass says how to :meth:`load` the images.

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
        crop_padding: Black border in pixels for random crops, 0 for no crops. FixBN pads by 2, FedTAN by 4.
        horizontal_flip: Whether training images are flipped with probability 1/2.
        seed: Seed of the subset, the validation set, the partition, the data order and the augmentation.
        max_examples: Use only that many training images, every class in proportion, for reduced runs; None
            for all.

    Attributes:
        scale: The pixel value that stands for 1.
        mean: Mean of each channel after division by ``scale``; None computes it from all training images.
        std: Standard deviation of each channel after division by ``scale``; None computes it likewise.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    scale: float = 255.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    train_images: TrainImages
    val_images: EvaluationImages
    test_images: EvaluationImages
    distribution: Distribution

    def __init__(
        self,
        num_clients: int = 10,
        batch_size: int = 20,
        partition: Partition | None = None,
        val_fraction: float = 0.0,
        eval_batch_size: int = 500,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
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
        if crop_padding < 0:
            raise ConfigurationError(
                f"crop_padding must be at least 0 pixels (0 for no crops), found {crop_padding}"
            )
        if not 0 <= val_fraction < 1:
            raise ConfigurationError(f"val_fraction must be in [0, 1), such as 0.1, found {val_fraction}")
        self.batch_size = batch_size
        self.partition = partition if partition is not None else IID()
        self.val_fraction = val_fraction
        self.eval_batch_size = eval_batch_size
        self.crop_padding = crop_padding
        self.horizontal_flip = horizontal_flip
        self.max_examples = max_examples
        self.fit_split: Literal["val", "test"] = "val" if val_fraction > 0 else "test"
        self._num_clients = num_clients
        self._shares: list[InMemoryClient] = []
        self._own: dict[str, tuple[EvaluationImages, list[Tensor]]] = {}
        self._index_digests: list[str] = []
        self._class_histograms: list[list[int]] = []

    @property
    def num_clients(self) -> int:
        """Number of clients of the federation; with ``Natural`` it is known after ``setup``."""
        return len(self._shares) or self._num_clients

    @property
    def clients(self) -> Sequence[InMemoryClient]:
        """One data module per client, in the order of their ids; empty before ``setup``."""
        return self._shares

    def load(self) -> ImageData:
        """Load the data set; called once."""
        raise NotImplementedError(f"{type(self).__name__} must define load() -> ImageData")

    def setup(self, stage: str) -> None:
        """Load and partition the data, once; ``"fit"`` checks that every client can fill a batch.

        Raises:
            ConfigurationError: The partition is impossible, the validation set would be empty, or a client
                has fewer samples than a batch.
        """
        if not self._shares:
            self._distribute(self.load())
        if stage == "fit":
            self._check_client_sizes()

    def samples_per_step(self, client_id: int) -> float:
        """Training samples in a client's batch: every batch is complete."""
        return self.batch_size

    def cohort_batch(self, client_ids: Sequence[int], steps: Sequence[int]) -> CohortBatch:
        """The batches of one local step, stacked: ``x [C, b, channels, H, W]`` and ``y [C, b]``.

        Args:
            client_ids: The active clients of the cohort.
            steps: For each of them its local step, from 0, counted over the whole training.
        """
        draws = [
            self._shares[client_id].step_draws(step)
            for client_id, step in zip(client_ids, steps, strict=True)
        ]
        return CohortBatch(stack=self.train_images.batch(torch.stack(draws)))

    def keep_on(self, device: torch.device) -> None:
        """Hold all images in the memory of a GPU, as bytes, if they take less than half of what is free there."""
        own = (images for images, _ in self._own.values())
        parts: set[TrainImages | EvaluationImages] = {
            self.train_images,
            self.val_images,
            self.test_images,
            *own,
        }
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if sum(part.pixels.nbytes for part in parts) > free / 2:
                return
        for part in parts:
            part.to(device)

    def val_dataloader(self) -> DataLoader[Batch]:
        """The server's validation data, or its test data where ``fit_split`` is ``"test"``."""
        return self._evaluation_loader(self.val_images if self.val_fraction > 0 else self.test_images)

    def test_dataloader(self) -> DataLoader[Batch]:
        """The server's test data."""
        return self._evaluation_loader(self.test_images)

    def own_dataloader(self, client_id: int, split: str) -> DataLoader[Batch] | None:
        """The evaluation data of a client where its group has some, or the file that the partition is from."""
        if split not in self._own or not len(self._own[split][1][client_id]):
            return None
        images, own = self._own[split]
        batches = torch.split(own[client_id], self.eval_batch_size)
        return DataLoader(images, sampler=batches, batch_size=None)

    def describe_partition(self) -> str:
        """The partition and the number of clients, such as ``"Shards(class_fraction=0.2), 5 clients"``."""
        return f"{self.partition}, {self.num_clients} clients"

    def partition_record(self) -> dict[str, Any]:
        """Sizes, seed, class histogram and digests of the partition.

        ``class_histogram[i][c]`` counts the samples of class c at client i. ``sha256["clients"][i]`` is the
        digest of client i's indices into the whole training set (ascending, int64, little-endian),
        ``sha256["total"]`` that of all the clients' hexadecimal digests joined.
        """
        total = hashlib.sha256("".join(self._index_digests).encode()).hexdigest()
        return {
            **super().partition_record(),
            "seed": self.seed,
            "val_size": len(self.val_images) if self.val_fraction > 0 else 0,
            "class_histogram": self.class_histograms(),
            "sha256": {"total": total, "clients": self._index_digests},
        }

    def fingerprint(self) -> dict[str, str]:
        """Digests of all images and labels, and of who has which."""
        held_out = (self.val_images, self.test_images)
        return {
            "training": digest(self.train_images.pixels, self.train_images.labels),
            "evaluation": digest([(part.pixels, part.labels) for part in held_out]),
            "partition": digest(self._index_digests),
        }

    def class_histograms(self) -> list[list[int]]:
        """``[i][c]``: client i's training examples of class c."""
        return self._class_histograms

    def _distribute(self, data: ImageData) -> None:
        self._check_labels("train_labels", data.train_labels)
        self._check_labels("test_labels", data.test_labels)
        found = self.distribution = distribute(
            data, self.partition, self._num_clients, self.val_fraction, self.max_examples, self.seed
        )
        normalize = self._normalization(data.train_images)
        train = torch.unique(torch.cat(found.clients))
        images = images_at(data, train)
        self.train_images = TrainImages(images, found.labels[train], normalize, self.crop_padding)

        def evaluated(samples: Tensor) -> EvaluationImages:
            return EvaluationImages(images_at(data, samples), found.labels[samples], normalize)

        self.val_images, self.test_images = evaluated(found.val), evaluated(found.test)
        for split, parts in found.own.items():
            samples, own_images = found.test, self.test_images
            if not bool(torch.isin(everyone := torch.unique(torch.cat(parts)), samples).all()):
                samples, own_images = everyone, evaluated(everyone)
            self._own[split] = own_images, [torch.searchsorted(samples, part) for part in parts]
        classes = self.num_classes or 0
        self._class_histograms = [
            found.labels[part].bincount(minlength=classes).tolist() for part in found.clients
        ]
        self._index_digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in found.clients]
        self._shares = [
            InMemoryClient(
                client_id,
                self.train_images,
                torch.searchsorted(train, part),
                self.batch_size,
                self.horizontal_flip,
                self.seed,
            )
            for client_id, part in enumerate(found.clients)
        ]

    def _normalization(self, train_images: Tensor) -> Normalization:
        if self.mean is not None and self.std is not None:
            return Normalization(self.mean, self.std, self.scale)
        for channel, pixels in enumerate(train_images.unbind(1)):
            if pixels.min() == pixels.max():
                raise ConfigurationError(
                    f"data: channel {channel} of {type(self).__name__} is {int(pixels.min())} in all training images, and cannot "
                    "be scaled to standard deviation 1; leave the channel out, or set mean and std of the class"
                )
        return Normalization(*channel_statistics(train_images, self.scale), self.scale)

    def _check_labels(self, name: str, labels: Tensor) -> None:
        lowest, highest = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if lowest < 0 or (self.num_classes is not None and highest >= self.num_classes):
            raise ConfigurationError(
                f"data: {name} of {type(self).__name__} are {lowest} to {highest}, but its classes are "
                f"0 to {self.num_classes - 1 if self.num_classes else '...'}; number the classes from 0, and set num_classes"
            )

    def _check_client_sizes(self) -> None:
        smallest = min(client.num_examples for client in self._shares)
        for client in self._shares:
            if client.num_examples < self.batch_size:
                raise ConfigurationError(
                    f"batch_size={self.batch_size} is more than the {client.num_examples} samples of client "
                    f"{client.client_id} ({self.describe_partition()}); "
                    f"use batch_size <= {smallest}, fewer clients or a more even partition"
                )

    def _evaluation_loader(self, images: EvaluationImages) -> DataLoader[Batch]:
        batches = [
            slice(start, start + self.eval_batch_size)
            for start in range(0, len(images), self.eval_batch_size)
        ]
        return DataLoader(images, sampler=batches, batch_size=None)
