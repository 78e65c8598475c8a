"""Images held in memory as uint8: augmentation and normalisation of whole batches.

Normalised images are ``x = (pixel / scale - mean) / std`` in float32, per channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ImageData:
    """An image classification data set as it is loaded.

    Attributes:
        train_images: uint8, shape ``[N, C, H, W]``.
        train_labels: int64, shape ``[N]``.
        test_images: uint8, shape ``[M, C, H, W]``.
        test_labels: int64, shape ``[M]``.
        train_groups: For data that come in groups, the group of each training image, int64, shape ``[N]``.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    train_groups: Tensor | None = None


class Normalization:
    """``(pixel / scale - mean) / std`` per channel, in float32.

    Args:
        mean: Mean of each channel, after division by ``scale``.
        std: Standard deviation of each channel, after division by ``scale``.
        scale: The pixel value that stands for 1.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], scale: float) -> None:
        self.mean = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)
        self.scale = scale

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise uint8 images ``[..., C, H, W]``; colour images ``[N, C, H, W]`` come in channels_last memory format.

        Convolutions on a CPU are faster in that format, whatever the format of their weights.
        """
        mean, std = self.mean.to(images.device), self.std.to(images.device)
        colour = images.ndim == 4 and images.shape[1] > 1
        layout = torch.channels_last if colour else torch.contiguous_format
        return images.to(torch.float32, memory_format=layout).div_(self.scale).sub_(mean).div_(std)


class TrainImages:
    """The training images of all clients, with batched random crops and flips at random access.

    A random crop shifts the image by up to ``padding`` pixels in each direction. As in the usual CIFAR recipe
    (``RandomCrop`` on the image), the border is black: it is padded with pixels of value 0, before
    normalisation.

    Args:
        images: uint8, shape ``[N, C, H, W]``.
        labels: int64, shape ``[N]``.
        normalize: Applied to the augmented pixels.
        padding: Width of the black border, 0 for none.
    """

    def __init__(self, images: Tensor, labels: Tensor, normalize: Normalization, padding: int) -> None:
        self.size = images.shape[-2:]
        self.padded = F.pad(images, (padding,) * 4) if padding else images
        self.labels = labels
        self.normalize = normalize
        self.padding = padding
        self.to(images.device)

    def to(self, device: torch.device) -> None:
        """Keep the images in the memory of a device, where :meth:`batch` then works."""
        self.padded, self.labels = self.padded.to(device), self.labels.to(device)
        # A view of every crop of every image, [N, C, 2 * padding + 1, 2 * padding + 1, H, W].
        self.crops = self.padded.unfold(2, self.size[0], 1).unfold(3, self.size[1], 1)

    def batch(self, draws: Tensor) -> Batch:
        """The samples that are drawn, augmented and normalised.

        Args:
            draws: int64, shape ``[..., 4]``: sample, vertical and horizontal offset of the crop within the
                padded image (``padding`` is the middle), and 1 for a horizontal flip.

        Returns:
            Images, float32, ``[..., C, H, W]``, and labels, int64, ``[...]``.
        """
        sample, top, left, flip = draws.to(self.labels.device).flatten(0, -2).unbind(-1)
        images = self.crops[sample, :, top, left]
        images = torch.where(flip.bool()[:, None, None, None], images.flip(-1), images)
        shape = draws.shape[:-1]
        images = self.normalize(images)
        return images.view(*shape, *images.shape[1:]), self.labels[sample].view(shape)


class EvaluationImages(Dataset[Batch]):
    """Normalised images without augmentation; indexed by a sample or by a slice of samples.

    Args:
        images: uint8, shape ``[N, C, H, W]``.
        labels: int64, shape ``[N]``.
        normalize: Applied to the pixels.
    """

    def __init__(self, images: Tensor, labels: Tensor, normalize: Normalization) -> None:
        self.images = images
        self.labels = labels
        self.normalize = normalize

    def to(self, device: torch.device) -> None:
        """Keep the images in the memory of a device."""
        self.images, self.labels = self.images.to(device), self.labels.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int | slice) -> Batch:
        return self.normalize(self.images[index]), self.labels[index]


def channel_statistics(images: Tensor, scale: float) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of ``images / scale``, for uint8 images ``[N, C, H, W]``.

    They are computed from the histogram of the pixel values, hence exact up to the last rounding.
    """
    histogram = torch.stack(
        [channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]
    ).double()
    share = histogram / histogram.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / scale
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp(min=0).sqrt()
    return mean.tolist(), std.tolist()


def balanced_subset(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """A random subset in which every class has the same share as in the whole, up to one sample.

    Args:
        labels: Class of each sample, shape ``[N]``.
        count: Size of the subset, in [0, N].
        generator: Source of the choice.

    Returns:
        The chosen indices, ascending, int64, shape ``[count]``.
    """
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    sizes = labels.bincount()
    rank = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[order]]
    quantile = (rank + 0.5) / sizes[labels[order]]
    return order[quantile.argsort(stable=True)[:count]].sort().values
