"""Image classification data sets in memory, and their clients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.client_data.federated import ClientDataModule
from fl_lightning.client_data.fingerprint import digest
from fl_lightning.client_data.preprocessing import channel_normalization
from fl_lightning.datamodules.images import Batch, ImageData, Images, Samples, channel_statistics
from fl_lightning.datamodules.partitioned_data import PartitionedDataModule
from fl_lightning.datamodules.subjects import Subjects
from fl_lightning.errors import ConfigurationError, check_at_least, check_choice
from fl_lightning.randomness import generator, permutation


class InMemoryClient(ClientDataModule):
    """A client's share of the training samples.

    The order of the samples in epoch e is a random permutation that depends only on (seed, client,
    e). An incomplete last batch is dropped. Local step s uses batch ``s % steps_per_epoch`` of
    epoch ``s // steps_per_epoch``. If the client has fewer samples than a batch, all its samples are
    one batch. With ``sampling: poisson``, each local step draws its own batch.

    Args:
        client_id: Id of the client, from 0.
        data: The data module of all clients, with their ``samples`` and ``distribution``.

    Attributes:
        indices: Indices of the client's samples, int64, shape ``[n]``.
        batch_size: Number of samples in a batch. With ``sampling: poisson``, their expected number.
    """

    def __init__(self, client_id: int, data: "InMemorySamples") -> None:
        super().__init__()
        self.client_id, self.data = client_id, data
        self.indices = data.distribution.clients[client_id]
        self.num_examples = len(self.indices)
        self.batch_size = min(data.batch_size, self.num_examples)
        self.steps_per_epoch = self.num_examples // self.batch_size
        self.sampling_rate = self.batch_size / self.num_examples if data.sampling == "poisson" else None
        self._epoch = -1
        self._draws = torch.empty(0)

    def step_draws(self, step: int) -> Tensor:
        """Return the random numbers of local step ``step``, int64, ``[samples, 4]``.

        The four numbers of a sample are its index, two offsets of the crop, and the flip (see
        :meth:`~fl_lightning.datamodules.images.Images.batch`). The order of the samples does
        not depend on the augmentation.
        """
        seed, count = self.data.seed, self.num_examples
        if self.sampling_rate is not None:
            draws = torch.rand(
                count, generator=generator(seed, "sampling", self.client_id, step), dtype=torch.float64
            )
            return self._augmented(self.indices[draws < self.sampling_rate], step)
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            order = permutation(count, seed, "data order", self.client_id, epoch)
            draws = self._augmented(self.indices[order], epoch)
            used = self.steps_per_epoch * self.batch_size
            self._draws = draws[:used].view(self.steps_per_epoch, self.batch_size, 4)
            self._epoch = epoch
        return self._draws[index]

    def _augmented(self, indices: Tensor, number: int) -> Tensor:
        """Return indices of samples with random numbers of their augmentation; ``number`` selects the draw."""
        data, count = self.data, len(indices)
        draws = generator(data.seed, "augmentation", self.client_id, number)
        offsets = torch.randint(2 * data.samples.padding + 1, (count, 2), generator=draws)
        flips = torch.randint(1 + data.horizontal_flip, (count, 1), generator=draws)
        return torch.cat([indices[:, None], offsets, flips], dim=1)

    def train_batch(self, step: int) -> Batch:
        """Return the batch of local step ``step``, counted from 0 over the whole training."""
        return self.data.samples.batch(self.step_draws(step))


class InMemorySamples(PartitionedDataModule):
    """Base class of data sets in memory.

    Args:
        num_clients: Number of clients. Ignored if the partition decides this number.
        batch_size: Number of samples in a client's batch. The FixBN paper uses 20. Every batch is
            complete.
        sampling: ``"epochs"``: the batches of an epoch are parts of a random permutation.
            ``"poisson"``: each local step draws each sample with probability ``batch_size / n``, where
            n is the client's number of samples. Batches then differ in size, and may be empty.
            ``PrivateSGD`` needs such batches.
        canaries: Number of the clients' training samples that become random inputs with random labels,
            for the audit of a method with differential privacy. Each of them stays in the training
            data with probability 1/2. 0, or at least 40.
        **settings: Settings of
            :class:`~fl_lightning.datamodules.partitioned_data.PartitionedDataModule`.

    Attributes:
        samples: The samples of clients and server, training samples first. It is known after
            ``setup``.
        planted: Indices of the canaries, and whether each is in the training data; None without
            canaries.
    """

    horizontal_flip = False
    samples: Samples
    planted: tuple[Tensor, Tensor] | None = None
    _clients: Any

    def __init__(
        self,
        num_clients: int = 10,
        batch_size: int = 20,
        *,
        sampling: Literal["epochs", "poisson"] = "epochs",
        canaries: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(num_clients, batch_size, **settings)
        check_choice("data.sampling", sampling, ("epochs", "poisson"))
        self.sampling, self.canaries = sampling, canaries
        check_at_least(40 if canaries else 0, canaries=canaries)

    def cohort_batch(self, client_ids: Sequence[int], steps: Sequence[int]) -> BatchStack:
        """Return one batch per client, stacked: inputs ``[C, b, ...]`` and targets ``[C, b, ...]``.

        If the batches have different sizes, they are not stacked.

        Args:
            client_ids: The clients that take this local step.
            steps: Number of the local step of each client, counted from 0 over the whole training.
        """
        draws = [self._clients[x].step_draws(step) for x, step in zip(client_ids, steps, strict=True)]
        if len({len(draw) for draw in draws}) > 1:
            return BatchStack(batches=[self.samples.batch(draw) for draw in draws])
        return BatchStack(stack=self.samples.batch(torch.stack(draws)))

    def keep_on(self, device: torch.device) -> None:
        """Move all samples to a GPU if they fill less than half of its free memory."""
        if device.type != "cuda" or self.samples.inputs.nbytes <= torch.cuda.mem_get_info(device)[0] / 2:
            self.samples.to(device)

    def _give(self, samples: Samples) -> None:
        self.samples = samples
        if self.canaries:
            self._plant(samples)
        self._clients = [InMemoryClient(client, self) for client in range(len(self.distribution.clients))]

    def _plant(self, samples: Samples) -> None:
        """Replace some training samples by canaries, and take half of these out of the training data."""
        draws, clients = generator(self.seed, "canaries"), self.distribution.clients
        trained = torch.cat(clients[: self.num_clients])
        if not self.num_classes:
            raise ConfigurationError("data.canaries: the targets are no classes; leave canaries out")
        if self.canaries > len(trained) // 2:
            raise ConfigurationError(
                f"data.canaries: {self.canaries} must be at most half of the clients' {len(trained)} samples"
            )
        chosen = trained[torch.randperm(len(trained), generator=draws)[: self.canaries]]
        shape, images = (len(chosen), *samples.inputs.shape[1:]), samples.inputs.dtype == torch.uint8
        highest = int(self.scale) if images and hasattr(self, "scale") else 255
        values = (
            torch.randint(highest + 1, shape, generator=draws)
            if images
            else torch.randn(shape, generator=draws)
        )
        samples.inputs[chosen] = values.to(samples.inputs.dtype)
        samples.labels[chosen] = torch.randint(self.num_classes, (len(chosen),), generator=draws)
        included = torch.rand(len(chosen), generator=draws) < 0.5
        left = [x[~torch.isin(x, chosen[~included])] for x in clients]
        if not all(map(len, left)):
            raise ConfigurationError(
                f"data.canaries: {self.canaries} leave {self.named([*map(len, left)].index(0))} without samples; use fewer canaries or clients"
            )
        self.distribution, self.planted = replace(self.distribution, clients=left), (chosen, included)

    def _loader(self, samples: Tensor) -> DataLoader[Batch]:
        return DataLoader(self.samples, sampler=torch.split(samples, self.eval_batch_size), batch_size=None)

    def _content(self, samples: Tensor) -> str:
        return digest(self.samples.inputs[samples], self.samples.labels[samples])


class InMemoryDataModule(InMemorySamples):
    """Base class of image classification data sets in memory; a subclass defines :meth:`load`.

    Args:
        num_clients: Number of clients. Ignored if the partition decides this number.
        batch_size: Number of samples in a client's batch. The FixBN paper uses 20. Every batch is
            complete.
        crop_padding: Width in pixels of the black border for random crops. The FixBN paper uses 2,
            and the FedTAN paper 4. 0: no crops.
        horizontal_flip: Whether training images are flipped with probability 1/2.
        **settings: Settings of :class:`InMemorySamples`.

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
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

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
        labels = data.train_labels, data.test_labels
        self.loaded = digest(data.train_images, data.test_images, *labels)
        subjects = Subjects.of_names(data.subjects, torch.cat(labels)) if data.subjects else None
        self.distribute(*labels, data.train_groups, data.test_groups, data.group_names, subjects)
        seen = data.train_images[self.trained()] if self.held_out else data.train_images
        mean, std = channel_statistics(seen, self.scale)
        known = self.mean or mean, self.std or std
        self.normalize = channel_normalization(*known, self.scale, channels_last=len(mean) > 1)
        self.input_shape = data.train_images.shape[1:]
        images = data.train_images, data.test_images
        pixels = torch.cat([part.permute(0, 2, 3, 1) for part in images]).contiguous()
        self._give(Images(pixels, torch.cat(labels), self.normalize, self.crop_padding))
