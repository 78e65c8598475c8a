"""Images with labels or masks, read from disk batch by batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from fl_lightning.client_data.preprocessing import Normalize
from fl_lightning.datamodules.image_files import FULL, read_image
from fl_lightning.datamodules.images import Batch
from fl_lightning.errors import ConfigurationError


@dataclass(eq=False, kw_only=True)
class StreamedSamples(Dataset[Batch], ABC):
    """Samples that are read from disk on access.

    A subclass defines :meth:`read` and :meth:`finish`.

    Args:
        normalize: Normalisation of the images.
        threads: Number of threads that read the samples of a batch.
    """

    normalize: Normalize
    threads: int = 1

    @abstractmethod
    def read(self, index: int) -> Any:
        """Read a sample. Threads call this method, so it must not draw random numbers."""

    @abstractmethod
    def finish(self, sample: Any) -> Batch:
        """Augment a sample, and return its image and its label.

        Random numbers come from torch's global generator.
        """

    def __getitem__(self, index: int) -> Batch:
        return self.finish(self.read(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Return the samples of a batch."""
        if self.threads == 1:
            return [self[index] for index in indices]
        with ThreadPoolExecutor(self.threads) as pool:
            return [self.finish(sample) for sample in pool.map(self.read, indices)]

    def picture(self, inputs: Tensor) -> Tensor:
        """Return a normalised image ``[3, H, W]`` as uint8 ``[H, W, 3]``."""
        pixels = (inputs.cpu() * self.normalize.std + self.normalize.mean) * 255
        return pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)


class StreamedClient(L.LightningDataModule):
    """A client whose samples are read from disk batch by batch.

    Args:
        samples: The client's samples.
        batch_size: Number of samples in a batch. Every batch is complete. If the client has fewer
            samples, all its samples are one batch.
    """

    def __init__(self, samples: Dataset[Batch], batch_size: int) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, min(batch_size, len(samples))  # type: ignore[arg-type]  # a Dataset need not have a length

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return a loader of shuffled batches."""
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True, drop_last=True)


IGNORED = 255
"""Label of the pixels that loss and metrics ignore."""

UNKNOWN = 254
Pair = tuple[Path, Path]


@dataclass(eq=False)
class LabelledImages(StreamedSamples):
    """Normalised images, float32 ``[3, H, W]``, each with a label per pixel, uint8 ``[H, W]``.

    Args:
        samples: Files of the images and of their masks.
        labels: Lookup table from a mask's value to its label, uint8 ``[256]``. The label 254 marks
            invalid values.
        size: Height and width to which image and mask are resized. None: no resizing.
        augment: Augmentation of an image and its mask. It draws from torch's global generator.
        **settings: Arguments of :class:`StreamedSamples`.
    """

    samples: Sequence[Pair]
    labels: Tensor
    size: tuple[int, int] | None
    augment: Callable[[Any, Any], Any] | None

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
        """Return an image and the label of each of its pixels."""
        path, mask_path = self.samples[index]
        image = tv_tensors.Image(torch.from_numpy(_read(path, "RGB", self.size)).permute(2, 0, 1))
        ids = torch.from_numpy(_read(mask_path, "L", self.size))
        if image.shape[1:] != ids.shape:
            raise ConfigurationError(
                f"data: {mask_path} has {list(ids.shape)} pixels, its image {list(image.shape[1:])}; the sizes must be equal"
            )
        labels = self.labels[ids.long()]
        if bool((labels == UNKNOWN).any()):
            unknown = int(ids[labels == UNKNOWN][0])
            raise ConfigurationError(
                f"data: {mask_path} has the label id {unknown}, which the data set does not define"
            )
        return image, tv_tensors.Mask(labels)

    def finish(self, sample: tuple[tv_tensors.Image, tv_tensors.Mask]) -> Batch:
        """Augment image and mask together."""
        image, mask = sample if self.augment is None else self.augment(*sample)
        return self.normalize(image.as_subclass(Tensor)), mask.as_subclass(Tensor)


def _read(path: Path, mode: str, size: tuple[int, int] | None) -> "np.ndarray[Any, Any]":
    """Read an image as uint8 ``[H, W, 3]`` (``"RGB"``), or a mask as uint8 ``[H, W]`` (``"L"``)."""
    image = read_image(path, "RGB" if mode == "RGB" else None, pixels=FULL)
    if mode == "L" and image.mode not in ("L", "P"):
        raise ConfigurationError(
            f"data: {path} is an image of mode {image.mode}, but a mask has one 8-bit number per pixel"
        )
    if size is not None and image.size != size[::-1]:
        how = Image.Resampling.BILINEAR if mode == "RGB" else Image.Resampling.NEAREST
        image = image.resize(size[::-1], how)
    return np.array(image)


class _RandomScale(v2.Transform):  # type: ignore[misc]  # torchvision has no types
    """Resize image and mask by a factor that is drawn uniformly from an interval.

    torchvision's ``ScaleJitter`` scales relative to a target size instead, so that its factors
    depend on the image's aspect ratio.
    """

    def __init__(self, lowest: float, highest: float) -> None:
        super().__init__()
        self.lowest, self.highest = lowest, highest

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        factor = self.lowest + float(torch.rand(1)) * (self.highest - self.lowest)
        return {"size": [max(1, round(side * factor)) for side in flat_inputs[0].shape[-2:]]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(v2.functional.resize, inpt, size=params["size"], antialias=True)


def augmentation(
    crop: tuple[int, int] | None, scale: tuple[float, float], flip: bool, jitter: float
) -> Callable[[Any, Any], Any] | None:
    """Return an augmentation of image and mask: random scale, crop, flip and colour jitter.

    Args:
        crop: Height and width of the crop. None: no crop. If the image is smaller than the crop, it
            is padded with black pixels, which have the label 255.
        scale: Smallest and largest factor by which the size changes.
        flip: Whether each image and its mask are mirrored with probability 1/2.
        jitter: Strength of the jitter of brightness, contrast and saturation (torchvision's
            ``ColorJitter``).
    """
    steps: list[Any] = []
    if tuple(scale) != (1.0, 1.0):
        steps.append(_RandomScale(*scale))
    if crop is not None:
        fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORED}
        steps.append(v2.RandomCrop(tuple(crop), pad_if_needed=True, fill=fill))
    if flip:
        steps.append(v2.RandomHorizontalFlip())
    if jitter:
        steps.append(v2.ColorJitter(jitter, jitter, jitter))
    return v2.Compose(steps) if steps else None
