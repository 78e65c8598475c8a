"""Samples that are read from files when a batch needs them: no more than a batch is in memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fl_lightning.datamodules.images import Batch


class StreamedSamples(Dataset[Batch], ABC):
    """Samples that a subclass can :meth:`read` from files and :meth:`finish`; images are normalised as ``(pixel / 255 - mean) / std``.

    Args:
        mean: Mean of each channel, in [0, 1].
        std: Standard deviation of each channel.
        threads: Threads that read the samples of a batch.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], threads: int = 1) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        self.threads = threads

    @abstractmethod
    def read(self, index: int) -> Any:
        """Read a sample, in any thread: without random numbers."""

    @abstractmethod
    def finish(self, found: Any) -> Batch:
        """Augment what was read, with torch's global generator, and give image and label: one sample after the other."""

    def __getitem__(self, index: int) -> Batch:
        return self.finish(self.read(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """The samples of a batch."""
        if self.threads == 1:
            return [self[index] for index in indices]
        with ThreadPoolExecutor(self.threads) as pool:
            return [self.finish(found) for found in pool.map(self.read, indices)]

    def normalised(self, pixels: Tensor) -> Tensor:
        """``(pixel / 255 - mean) / std``."""
        return (pixels.float() / 255 - self.mean) / self.std

    def picture(self, inputs: Tensor) -> Tensor:
        """A normalised image ``[3, H, W]`` as one to look at, uint8 ``[H, W, 3]``."""
        pixels = (inputs.cpu() * self.std + self.mean) * 255
        return pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)


class StreamedClient(L.LightningDataModule):
    """A client with samples of its own that are read when a batch needs them.

    Args:
        samples: They.
        batch_size: Of its batches, all complete.
    """

    def __init__(self, samples: Dataset[Batch], batch_size: int) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled batches."""
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True, drop_last=True)
