"""Image classification data sets larger than memory, such as ImageNet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision.transforms import v2

from fl_lightning.client_data.fingerprint import digest, files_digest
from fl_lightning.client_data.new_samples import NewSamples
from fl_lightning.client_data.preprocessing import Normalize, channel_normalization
from fl_lightning.datamodules.class_folders import ClassFolders, ClassImages
from fl_lightning.datamodules.image_files import checked_range, read_image, value_range
from fl_lightning.datamodules.images import Batch
from fl_lightning.datamodules.new_images import new_images
from fl_lightning.datamodules.partitioned_data import PartitionedDataModule
from fl_lightning.datamodules.streamed import StreamedClient, StreamedSamples
from fl_lightning.datamodules.subjects import Subjects
from fl_lightning.errors import ConfigurationError, check_at_least

Transform = Callable[[Image.Image], Tensor]

_OF_8_BITS = (".bmp", ".gif", ".jpeg", ".jpg", ".ppm", ".webp")
"""Suffixes of files that need not be opened to know their number of bits."""


@dataclass(eq=False)
class ImageStream(StreamedSamples):
    """Normalised images of class folders, float32 ``[3, H, W]``, with their labels.

    Args:
        files: The files of the images.
        transform: Function that turns an image into uint8 ``[3, H, W]``. Its random numbers come
            from torch's global generator.
        pixels: Values of images of more than 8 bits that become 0 and 255. None: such images are
            refused.
        **settings: Arguments of :class:`~fl_lightning.datamodules.streamed.StreamedSamples`.
    """

    files: ClassImages
    transform: Transform
    pixels: Sequence[float] | None = None

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Image.Image, Tensor]:
        """Return the image as RGB, and its label."""
        return read_image(self.files.path(index), pixels=self.pixels), self.files.labels[index]

    def finish(self, sample: tuple[Image.Image, Tensor]) -> Batch:
        """Return the transformed, normalised image and its label."""
        image, label = sample
        return self.normalize(self.transform(image)), label


class StreamedImages(PartitionedDataModule):
    """Images in ``train/<class>/*.jpg`` and ``test/<class>/*.jpg``, read from disk batch by batch.

    Use this class for data larger than memory. A run starts by listing the files: for 1.28 million
    files, the list takes a few seconds and 50 MB. The model does not train while images are read. For
    smaller data, :class:`~fl_lightning.datamodules.image_folders.ImageFolder` is faster. If
    ``test/`` has no class folders, ``val/`` is the test set.

    Training images are augmented by torchvision's ``RandomResizedCrop`` and a random flip, which
    depend only on (seed, client, step). For evaluation, the shorter side is resized to ``image_size
    * 8 / 7`` (256 for 224), and the centre is cropped.

    Args:
        data_dir: The folder that holds ``train`` and ``test``.
        image_size: Height and width of the model's input in pixels.
        crop_scale: Smallest and largest share of an image's area in a random crop.
        horizontal_flip: Whether each training image is mirrored with probability 1/2.
        threads: Number of threads that decode images.
        eval_batch_size: Number of images in a batch of the server's evaluation.
        mean: Mean of each channel, in [0, 1]. Default: the mean of ImageNet.
        std: Standard deviation of each channel. Default: the standard deviation of ImageNet.
        pixel_range: Values of images of more than 8 bits that become 0 and 255, such as [0, 4095].
            Values beyond them also become 0 or 255. Default: the smallest and the largest value of
            the training images, which are then read at each start. If these have 8 bits, other
            images of more bits are refused. With ``held_out``, there is no default.
        subjects: Regular expression that finds the subject, such as a patient, in a file's path below
            ``data_dir``: for example ``P[0-9]+``, or ``([^/]+)/[^/]+$`` for the name of the folder.
            All images of a subject stay together in each part of the data that is drawn, and shares
            are shares of the subjects. Default: each image is a subject.
        **settings: Settings of
            :class:`~fl_lightning.datamodules.partitioned_data.PartitionedDataModule`.

    Raises:
        ConfigurationError: The folder is missing or has another layout, or a setting is out of its
            range. In training: an image cannot be read.
    """

    in_channels = 3
    image_size: int
    num_classes: int
    normalize: Normalize

    def __init__(
        self,
        data_dir: str,
        image_size: int = 224,
        *,
        crop_scale: tuple[float, float] = (0.08, 1.0),
        horizontal_flip: bool = True,
        threads: int = 4,
        eval_batch_size: int = 100,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        pixel_range: tuple[float, float] | None = None,
        subjects: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(eval_batch_size=eval_batch_size, **settings)
        check_at_least(1, image_size=image_size, threads=threads)
        if not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            raise ConfigurationError(
                f"crop_scale must be two shares such as [0.08, 1.0], found {list(crop_scale)}"
            )
        self.pixel_range = checked_range(pixel_range)
        self.folders, self.subjects = ClassFolders(Path(data_dir).expanduser()), subjects
        self.class_names, self.num_classes = self.folders.classes, len(self.folders.classes)
        self.image_size, self.input_shape = image_size, (3, image_size, image_size)
        self.threads, self.normalize = threads, channel_normalization(mean, std)
        crop = v2.RandomResizedCrop(image_size, tuple(crop_scale))
        flip = [v2.RandomHorizontalFlip()] if horizontal_flip else []
        self._augment = v2.Compose([crop, *flip, v2.PILToTensor()])
        self._plain = _plain(image_size)

    @classmethod
    def new_samples(cls, path: Path, known: Any, labelled: bool) -> NewSamples:
        """Read a folder of new images. For targets, it needs a folder for each class."""
        transform = _plain(known.image_size)

        def read(file: Path) -> Tensor:
            return transform(read_image(file, pixels=known.pixel_range))

        return new_images(path, known.class_names, labelled, read)

    def _make_clients(self) -> None:
        train, test = self.folders.images()
        labels = torch.cat([train.labels, test.labels])
        files = ClassImages(train.data_dir, np.concatenate([train.names, test.names]), labels)
        if self.pixel_range is None:
            may_be_deep = (path for path, _ in train.samples() if path.suffix.lower() not in _OF_8_BITS)
            self.use_range(value_range((path, None) for path in may_be_deep))
        self.train_images, self.images = (
            ImageStream(files, transform, self.pixel_range, normalize=self.normalize, threads=self.threads)
            for transform in (self._augment, self._plain)
        )
        self.loaded = self._content(torch.arange(len(files)))
        subjects = None
        if self.subjects is not None:
            subjects = Subjects.of_names(files.subjects(self.subjects), labels)
        dealt = self.distribute(train.labels, test.labels, subjects=subjects)
        shares = [self._part(self.train_images, x) for x in dealt.clients]
        self._clients = [StreamedClient(share, self.batch_size) for share in shares]

    def _loader(self, samples: Tensor) -> DataLoader[Batch]:
        return DataLoader(self._part(self.images, samples), self.eval_batch_size)

    def _content(self, samples: Tensor) -> str:
        files = self.images.files.part(samples)
        paths = [path for path, _ in files.samples()]
        return digest(files.names, files.labels, files_digest(paths, files.data_dir))

    def _part(self, images: ImageStream, samples: Tensor) -> Subset[Batch]:
        return Subset(images, samples)  # type: ignore[arg-type]  # a tensor needs an eighth of a list's memory


class ImageNet(StreamedImages):
    """ImageNet-1K (Russakovsky et al. 2015), or a subset of its classes.

    ImageNet has 1.28 million training and 50,000 test images in 1,000 classes. This class does not
    download it. The files are ``train/<wnid>/*.JPEG`` and ``val/<wnid>/*.JPEG``, as torchvision
    expects them.

    Args:
        data_dir: The folder that holds ``train`` and ``val``.
        **settings: Settings of :class:`~fl_lightning.datamodules.streamed_images.StreamedImages`.
    """

    def __init__(self, data_dir: str = "data/imagenet", **settings: Any) -> None:
        super().__init__(data_dir, **settings)


def _plain(image_size: int) -> Transform:
    steps = [v2.Resize(round(image_size * 8 / 7)), v2.CenterCrop(image_size), v2.PILToTensor()]
    transform: Transform = v2.Compose(steps)
    return transform
