"""Images in memory as uint8, augmented and normalised one batch at a time.

A normalised image is ``(pixel / scale - mean) / std`` in float32, per channel.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.client_data.preprocessing import Normalize
from fl_lightning.errors import ConfigurationError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ImageData:
    """An image classification data set with its own test set.

    Attributes:
        train_images: uint8, shape ``[N, C, H, W]``.
        train_labels: int64, shape ``[N]``.
        test_images: uint8, shape ``[M, C, H, W]``.
        test_labels: int64, shape ``[M]``.
        train_groups: Group of each training image, int64, shape ``[N]``. None: no groups.
        test_groups: Group of each test image, int64, shape ``[M]``. None: all groups share the test
            images.
        group_names: Names of the groups 0, 1, ...
        subjects: Name of the subject of each training image, then of each test image. Empty: each
            image is a subject.

    Raises:
        ConfigurationError: Images, labels or groups have another type or shape, or the number of
            labels differs from the number of images.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    train_groups: Tensor | None = None
    test_groups: Tensor | None = None
    group_names: Sequence[str] = ()
    subjects: Sequence[str] = ()

    def __post_init__(self) -> None:
        kinds = {
            "images": (torch.uint8, 4, "[N, channels, height, width]"),
            "labels": (torch.int64, 1, "[N]"),
            "groups": (torch.int64, 1, "[N]"),
        }
        for split, (name, (dtype, dims, shape)) in product(("train", "test"), kinds.items()):
            tensor, count = getattr(self, f"{split}_{name}"), len(getattr(self, f"{split}_images"))
            if tensor is not None and (tensor.dtype, tensor.dim(), len(tensor)) != (dtype, dims, count):
                raise ConfigurationError(
                    f"ImageData.{split}_{name}: {tensor.dtype} {list(tensor.shape)}; load() must give {dtype} {shape}, with N = {count} "
                    "images; TensorData takes tensors of any type and shape"
                )


def normalized(pixels: Tensor, normalize: Normalize) -> Tensor:
    """Return normalised images ``[..., C, H, W]`` for uint8 pixels ``[..., H, W, C]``.

    Colour images have the channels_last memory format, because convolutions on a CPU are then
    faster.
    """
    *lead, height, width, channels = pixels.shape
    # normalise entire rows of pixels at once: an inner loop over three channels would be slow
    mean, std = normalize.mean.flatten().repeat(width), normalize.std.flatten().repeat(width)
    lines = pixels.reshape(*lead, height, width * channels).to(torch.float32)
    lines.div_(normalize.scale).sub_(mean).div_(std)
    if channels == 1:
        return lines.view(*lead, 1, height, width)
    return lines.view(pixels.shape).movedim(-1, -3)


@dataclass(eq=False)
class Samples(Dataset[Batch]):
    """Inputs and labels in memory. The index is an integer, a slice or a tensor of indices.

    Args:
        inputs: Inputs, shape ``[N, ...]``.
        labels: Labels or other targets, shape ``[N, ...]``.

    Attributes:
        padding: Width in pixels of the border that random crops add.
    """

    padding = 0
    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> None:
        """Move the samples to the memory of a device."""
        self.inputs, self.labels = self.inputs.to(device), self.labels.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int | slice | Tensor) -> Batch:
        return self.inputs[index], self.labels[index]

    def batch(self, draws: Tensor) -> Batch:
        """Return the samples with indices ``draws[..., 0]``.

        The other columns of ``draws`` are random numbers for the augmentation of images, and are
        ignored.
        """
        return self[draws[..., 0].to(self.inputs.device)]


@dataclass(eq=False)
class Images(Samples):
    """Images stored as bytes, and normalised on access.

    The images of a training batch are cropped and flipped at random. A random crop shifts the image
    by up to ``padding`` pixels in each direction. The border is black (0 before normalisation), as
    is common for CIFAR.

    Args:
        inputs: uint8, shape ``[N, H, W, C]``.
        labels: int64, shape ``[N]``.
        normalize: Normalisation of the pixels.
        padding: Width of the black border in pixels. 0: no border.
    """

    normalize: Normalize
    padding: int = 0

    def to(self, device: torch.device) -> None:
        """Move the images to the memory of a device."""
        super().to(device)
        self.normalize = copy.deepcopy(self.normalize).to(device)

    def __getitem__(self, index: int | slice | Tensor) -> Batch:
        return normalized(self.inputs[index], self.normalize), self.labels[index]

    def batch(self, draws: Tensor) -> Batch:
        """Return augmented, normalised images, float32 ``[..., C, H, W]``, and labels ``[...]``.

        Args:
            draws: int64, shape ``[..., 4]``. The four numbers are the index of the sample, the
                vertical offset of the crop, its horizontal offset, and the flip. Offsets count from
                the corner of the padded image. If both offsets equal ``padding``, the crop is the
                original image. The flip is 1 if the image is mirrored, otherwise 0.
        """
        if self.labels.is_cuda:
            draws = draws.pin_memory().to(self.labels.device, non_blocking=True)
        sample, top, left, flip = draws.flatten(0, -2).unbind(-1)
        images = normalized(self._augmented(self.inputs[sample], top, left, flip), self.normalize)
        shape = draws.shape[:-1]
        return images.view(*shape, *images.shape[1:]), self.labels[sample].view(shape)

    def _augmented(self, images: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
        """Crop and flip images ``[n, H, W, C]``."""
        count, height, width, channels = images.shape
        border = self.padding
        # index 0: the images with their borders; index 1: the mirror images with their borders
        padded = images.new_zeros(2, count, height + 2 * border, width + 2 * border, channels)
        inner = padded[:, :, border : border + height, border : border + width]
        inner[0] = images
        inner[1] = images.flip(2)
        # a view of all possible crops, [2, n, 2 * border + 1, 2 * border + 1, H, W, C]
        crops = padded.unfold(2, height, 1).unfold(3, width, 1).movedim(4, -1)
        left = torch.where(flip == 1, 2 * border - left, left)
        return crops[flip, torch.arange(count, device=images.device), top, left]


def channel_statistics(images: Tensor, scale: float) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each channel of ``images / scale``.

    They are computed from the histogram of the pixel values, so only the final rounding adds an
    error. The standard deviation of a constant channel is 1.

    Args:
        images: uint8, shape ``[N, C, H, W]``.
        scale: Number by which pixels are divided.
    """
    histogram = torch.stack(
        [channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]
    ).double()
    share = histogram / histogram.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / scale
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp(min=0).sqrt()
    std[histogram.count_nonzero(1) == 1] = 1
    return mean.tolist(), std.tolist()


def balanced_subset(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw a stratified subset, which has the same class proportions as all samples.

    The number of samples of a class is rounded up or down. If a class has less than one sample on
    average, chance decides which of these classes have one.

    Args:
        labels: Class of each sample, shape ``[N]``.
        count: Size of the subset, in [0, N].
        generator: Random number generator of the draw.

    Returns:
        The drawn indices, ascending, int64, shape ``[count]``.
    """
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    sizes = labels.bincount()
    rank = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[order]]
    quantile = (rank + 0.5) / sizes[labels[order]]
    taken = quantile.argsort(stable=True)[:count]
    quotas, wanted, total = labels[order[taken]].bincount(minlength=len(sizes)), sizes * count, len(labels)
    far, rare = (quotas * total - wanted).abs() >= total, (wanted > 0) & (wanted < total)
    if bool(
        (far | rare).any()
    ):  # many classes are small: round each class's share, and decide ties by chance
        quotas = wanted // total
        classes = torch.randperm(len(sizes), generator=generator)
        remainders = (wanted - quotas * total)[classes]
        added = remainders.argsort(stable=True, descending=True)[: count - int(quotas.sum())]
        quotas[classes[added]] += 1
        taken = (rank < quotas[labels[order]]).nonzero().flatten()
    return order[taken].sort().values
