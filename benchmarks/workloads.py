"""Workloads of the benchmarks: three federations with as many images as CIFAR-10."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from benchmarks.recipe import BATCH_SIZE, CIFAR10_MEAN, CIFAR10_STD, CROP_PADDING
from fl_lightning.datamodules.images import ImageData
from fl_lightning.datamodules.in_memory import InMemoryDataModule


@dataclass(frozen=True)
class Workload:
    """A federation and its local work.

    Attributes:
        num_clients: Number of clients. Each client gets the same number of images.
        cohort_size: Number of clients that take part in a round.
        local_steps: Local steps E of each client in a round, with batches of 20 images.
        rounds: Default number of rounds in one measurement.
    """

    num_clients: int
    cohort_size: int
    local_steps: int
    rounds: int

    @property
    def client_steps(self) -> int:
        """Number of local steps in a round, of all clients together."""
        return self.cohort_size * self.local_steps


WORKLOADS = {
    "W1": Workload(num_clients=10, cohort_size=10, local_steps=20, rounds=1),
    "W2": Workload(num_clients=100, cohort_size=10, local_steps=20, rounds=1),
    "W3": Workload(num_clients=5, cohort_size=5, local_steps=1, rounds=100),
}


class SyntheticImages(InMemoryDataModule):
    """Data module of random 32x32 colour images in ten classes.

    Random pixels suffice, since the time of a step does not depend on the pixels.

    Args:
        num_images: Training images of all clients together; CIFAR-10 has 50,000.
        num_clients: Number of clients, of equal size.
        augment: Whether images are cropped at random (padding 2) and flipped.
    """

    mean = CIFAR10_MEAN
    std = CIFAR10_STD
    num_classes = 10
    in_channels = 3
    image_size = 32
    pixels: Tensor

    def __init__(self, num_images: int, num_clients: int, augment: bool = True) -> None:
        super().__init__(
            num_clients=num_clients,
            batch_size=BATCH_SIZE,
            crop_padding=CROP_PADDING if augment else 0,
            horizontal_flip=augment,
        )
        self.num_images = num_images

    def client_samples(self, client_id: int) -> Tensor:
        """Return the indices of a client's training images, int64, shape ``[n]``."""
        samples: Tensor = self._clients[client_id].indices
        return samples

    def step_draws(self, client_id: int, step: int) -> Tensor:
        """Return the random choices (samples and augmentation) of a step, int64, ``[20, 4]``."""
        draws: Tensor = self._clients[client_id].step_draws(step)
        return draws

    @cached_property
    def pictures(self) -> np.ndarray:
        """All training images in PIL's layout, uint8, shape ``[n, 32, 32, 3]``."""
        return self.pixels.permute(0, 2, 3, 1).contiguous().numpy()

    def load(self) -> ImageData:
        """Draw random pixels and labels."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.num_images, 3, 32, 32)
        self.pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(10, (self.num_images,), generator=generator)
        return ImageData(self.pixels, labels, self.pixels[:1].clone(), labels[:1].clone())
