"""Image classification data sets in memory, and their clients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fl_lightning.client_data.batches import BatchStack, copied
from fl_lightning.client_data.federated import ClientDataModule
from fl_lightning.client_data.fingerprint import digest
from fl_lightning.client_data.raw_inputs import Normalize
from fl_lightning.datamodules.images import (
    Batch,
    ImageData,
    Images,
    Normalization,
    Samples,
    TrainImages,
    channel_statistics,
)
from fl_lightning.datamodules.partition_file import Distribution
from fl_lightning.datamodules.partitioned_data import PartitionedDataModule
from fl_lightning.errors import ConfigurationError, check_at_least
from fl_lightning.randomness import generator, permutation


class InMemoryClient(ClientDataModule):
    """A client's share of the training samples.

    The order of the samples in epoch e is a random permutation that depends only on (seed, client,
    e). An incomplete last batch is dropped. Local step s uses batch ``s % steps_per_epoch`` of
    epoch ``s // steps_per_epoch``. If the client has fewer samples than a batch, all its samples are
    one batch.

    Args:
        client_id: Id of the client, from 0.
        images: The training samples of all clients.
        indices: Indices of the client's samples in ``images``, int64, shape ``[n]``.
        batch_size: Number of samples in a batch.
        horizontal_flip: Whether each sample is flipped with probability 1/2.
        seed: The run's seed.
    """

    def __init__(
        self,
        client_id: int,
        images: Samples,
        indices: Tensor,
        batch_size: int,
        horizontal_flip: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.client_id = client_id
        self.images = images
        self.indices = indices
        self.batch_size = min(batch_size, len(indices))
        self.horizontal_flip = horizontal_flip
        self.seed = seed
        self.num_examples = len(indices)
        self.steps_per_epoch = len(indices) // self.batch_size
        self._epoch = -1
        self._draws = torch.empty(0)

    def step_draws(self, step: int) -> Tensor:
        """Return the random numbers of local step ``step``, int64, ``[batch_size, 4]``.

        The four numbers of a sample are its index, two offsets of the crop, and the flip (see
        :meth:`~fl_lightning.datamodules.images.TrainImages.batch`). The order of the samples does
        not depend on the augmentation.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            order = permutation(self.num_examples, self.seed, "data order", self.client_id, epoch)
            augmentation = generator(self.seed, "augmentation", self.client_id, epoch)
            offsets = torch.randint(
                2 * self.images.padding + 1, (self.num_examples, 2), generator=augmentation
            )
            flips = torch.randint(1 + self.horizontal_flip, (self.num_examples, 1), generator=augmentation)
            draws = torch.cat([self.indices[order][:, None], offsets, flips], dim=1)
            used = self.steps_per_epoch * self.batch_size
            self._draws = draws[:used].view(self.steps_per_epoch, self.batch_size, 4)
            self._epoch = epoch
        return self._draws[index]

    def train_batch(self, step: int) -> Batch:
        """Return the batch of local step ``step``, counted from 0 over the whole training."""
        return self.images.batch(self.step_draws(step))


class InMemorySamples(PartitionedDataModule):
    """Base class of data sets in memory. All clients share one tensor of samples."""

    horizontal_flip = False
    train_images: Any
    val_images: Any
    test_images: Any

    def __init__(self, num_clients: int = 10, batch_size: int = 20, **settings: Any) -> None:
        super().__init__(num_clients, batch_size, **settings)
        self._shares: list[InMemoryClient] = []
        self._own: dict[str, tuple[Any, list[Tensor]]] = {}

    @property
    def clients(self) -> Sequence[InMemoryClient]:
        """Return one data module per client, in the order of ids. None exist before ``setup``."""
        return self._shares

    def cohort_batch(self, client_ids: Sequence[int], steps: Sequence[int]) -> BatchStack:
        """Return one batch per client, stacked: inputs ``[C, b, ...]`` and targets ``[C, b, ...]``.

        If the batches have different sizes, they are not stacked.

        Args:
            client_ids: The clients that take this local step.
            steps: Number of the local step of each client, counted from 0 over the whole training.
        """
        pairs = zip(client_ids, steps, strict=True)
        draws = [self._shares[client_id].step_draws(step) for client_id, step in pairs]
        if len({len(draw) for draw in draws}) > 1:
            return BatchStack(batches=[self.train_images.batch(draw) for draw in draws])
        return BatchStack(stack=self.train_images.batch(torch.stack(draws)))

    def keep_on(self, device: torch.device) -> None:
        """Move all samples to a GPU if they fill less than half of its free memory."""
        own = (images for images, _ in self._own.values())
        parts = {self.train_images, self.val_images, self.test_images, *own}
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if sum(part.tensors[0].nbytes for part in parts) > free / 2:
                return
        for part in parts:
            part.to(device)

    def own_dataloader(self, client_id: int, split: str) -> DataLoader[Batch] | None:
        """Return a client's own evaluation data, or None if the client has none."""
        if split not in self._own or not len(self._own[split][1][client_id]):
            return None
        images, samples = self._own[split]
        batches = torch.split(samples[client_id], self.eval_batch_size)
        return DataLoader(images, sampler=batches, batch_size=None)

    def evaluation_digest(self) -> str:
        """Return the digest of all evaluation data."""
        return digest([part.tensors for part in (self.val_images, self.test_images)])

    def training_digest(self) -> str:
        """Return the digest of all training data."""
        return digest(*self.train_images.tensors)

    def _give(
        self, dealt: Distribution, trained: Callable[[Tensor], Any], evaluated: Callable[[Tensor], Any]
    ) -> None:
        """Create the clients, and the data sets of clients and server.

        Args:
            dealt: Indices of the samples of each client and of the server.
            trained: Function that returns training data for sample indices.
            evaluated: Function that returns evaluation data for sample indices.
        """
        train = torch.unique(torch.cat(dealt.clients))
        self.train_images = trained(train)
        self.val_images, self.test_images = evaluated(dealt.val), evaluated(dealt.test)
        for split, parts in dealt.own.items():
            samples, images_of_split = dealt.test, self.test_images
            # clients may have evaluation samples that the server does not use
            if not bool(torch.isin(everyone := torch.unique(torch.cat(parts)), samples).all()):
                samples, images_of_split = everyone, evaluated(everyone)
            self._own[split] = images_of_split, [torch.searchsorted(samples, part) for part in parts]
        settings = self.batch_size, self.horizontal_flip, self.seed
        self._shares = [
            InMemoryClient(client_id, self.train_images, torch.searchsorted(train, part), *settings)
            for client_id, part in enumerate(dealt.clients)
        ]

    def _evaluation_loader(self, images: Any) -> DataLoader[Batch]:
        size = self.eval_batch_size
        batches = [slice(x, min(x + size, len(images))) for x in range(0, len(images), size)]
        return DataLoader(images, sampler=batches, batch_size=None, collate_fn=copied)


class InMemoryDataModule(InMemorySamples):
    """Base class of image classification data sets in memory; a subclass defines :meth:`load`.

    Args:
        num_clients: Number of clients. Ignored if the partition decides this number.
        batch_size: Number of samples in a client's batch. The FixBN paper uses 20. Every batch is
            complete.
        crop_padding: Width in pixels of the black border for random crops. The FixBN paper uses 2,
            and the FedTAN paper 4. 0: no crops.
        horizontal_flip: Whether training images are flipped with probability 1/2.
        **settings: Settings of
            :class:`~fl_lightning.datamodules.partitioned_data.PartitionedDataModule`.

    Attributes:
        scale: Number by which pixels are divided before normalisation.
        mean: Mean of each channel after division by ``scale``. Default: the mean of the training
            images.
        std: Standard deviation of each channel after division by ``scale``. Default: the standard
            deviation of the training images.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    scale: float = 255.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __init__(
        self,
        num_clients: int = 10,
        batch_size: int = 20,
        *,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(num_clients, batch_size, **settings)
        check_at_least(0, crop_padding=crop_padding)
        self.crop_padding = crop_padding
        self.horizontal_flip = horizontal_flip

    def load(self) -> ImageData:
        """Load and return the data set. This method is called once."""
        raise NotImplementedError(f"{type(self).__name__} must define load() -> ImageData")

    def _make_clients(self) -> None:
        data = self.load()
        self.loaded = digest(data.train_images, data.train_labels, data.test_images, data.test_labels)
        groups = data.train_groups, data.test_groups, data.group_names
        dealt = self.distribute(data.train_labels, data.test_labels, *groups)
        normalize = self._normalization(data.train_images)
        self.input_shape = data.train_images.shape[1:]
        self.normalize = Normalize(normalize.mean, normalize.std, normalize.scale, len(normalize.mean) > 1)

        def trained(samples: Tensor) -> TrainImages:
            images = _images_at(data, samples)
            return TrainImages(images, dealt.labels[samples], normalize, self.crop_padding)

        def evaluated(samples: Tensor) -> Images:
            return Images(_images_at(data, samples), dealt.labels[samples], normalize)

        self._give(dealt, trained, evaluated)

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


def _images_at(data: ImageData, samples: Tensor) -> Tensor:
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
