"""Image classification data sets larger than memory, such as ImageNet."""

import os
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset
from torchvision.transforms import v2

from fl_lightning.client_data.fingerprint import digest, files_digest
from fl_lightning.datamodules.distribution import PartitionedDataModule
from fl_lightning.datamodules.folders import LAYOUT, ClassFolders
from fl_lightning.datamodules.image_files import image_names, read_image, wrong_layout
from fl_lightning.datamodules.images import Batch
from fl_lightning.datamodules.streamed import StreamedClient, StreamedSamples
from fl_lightning.errors import ConfigurationError, check_at_least

Transform = Callable[[Image.Image], Tensor]


class ImageStream(StreamedSamples):
    """Normalised images of class folders, float32 ``[3, H, W]``, with their labels.

    Args:
        folder: The folder that holds the class folders.
        classes: Names of the class folders in the order of the labels. A folder may be missing.
        transform: Function that turns an image into uint8 ``[3, H, W]``. Its random numbers come
            from torch's global generator.
        **settings: Arguments of :class:`~fl_lightning.datamodules.streamed.StreamedSamples`.

    Attributes:
        names: Names of all files, sorted by class, as bytes. 1.28 million names take 35 MB.
        labels: Class of each file, int64, shape ``[N]``.
    """

    def __init__(self, folder: Path, classes: Sequence[str], transform: Transform, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder, self.classes, self.transform = folder, classes, transform
        names = [_image_names(folder / name) for name in classes]
        self.names = np.concatenate(names)
        self.labels = torch.arange(len(names)).repeat_interleave(torch.tensor([len(x) for x in names]))

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        """Return the path of a sample's file."""
        return self.folder / self.classes[int(self.labels[index])] / os.fsdecode(self.names[int(index)])

    def read(self, index: int) -> tuple[Image.Image, Tensor]:
        """Return the image as RGB, and its label."""
        return read_image(self.path(index)), self.labels[index]

    def finish(self, sample: tuple[Image.Image, Tensor]) -> Batch:
        """Return the transformed, normalised image and its label."""
        image, label = sample
        return self.normalised(self.transform(image)), label

    def seen_by(self, transform: Transform) -> "ImageStream":
        """Return a view of the images with another transform."""
        images = copy(self)
        images.transform = transform
        return images

    def contents(self) -> str:
        """Return a digest of the files' names, labels and contents."""
        files = [self.path(index) for index in range(len(self))]
        return digest(self.names, self.labels, files_digest(files, self.folder))


class StreamedImages(PartitionedDataModule):
    """Images in ``train/<class>/*.jpg`` and ``test/<class>/*.jpg``, read from disk batch by batch.

    Use this class for data larger than memory. For smaller data,
    :class:`~fl_lightning.datamodules.folders.ImageFolder` is faster. If ``test/`` has no class
    folders, ``val/`` is the test set.

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
        **settings: Settings of
            :class:`~fl_lightning.datamodules.distribution.PartitionedDataModule`.

    Raises:
        ConfigurationError: The folder is missing or has another layout, or a setting is out of its
            range. In training: an image cannot be read.
    """

    in_channels = 3
    image_size: int
    num_classes: int
    val_images: Subset[Batch]
    test_images: ImageStream

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
        **settings: Any,
    ) -> None:
        super().__init__(eval_batch_size=eval_batch_size, **settings)
        check_at_least(1, image_size=image_size, threads=threads)
        if not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            raise ConfigurationError(
                f"crop_scale must be two shares such as [0.08, 1.0], found {list(crop_scale)}"
            )
        self.folders = ClassFolders(Path(data_dir).expanduser())
        self.class_names, self.num_classes = self.folders.classes, len(self.folders.classes)
        self.image_size = image_size
        self._stream = {"mean": mean, "std": std, "threads": threads}
        crop = v2.RandomResizedCrop(image_size, tuple(crop_scale))
        flip = [v2.RandomHorizontalFlip()] if horizontal_flip else []
        self._augment = v2.Compose([crop, *flip, v2.PILToTensor()])
        self._plain = v2.Compose(
            [v2.Resize(round(image_size * 8 / 7)), v2.CenterCrop(image_size), v2.PILToTensor()]
        )

    def evaluation_digests(self) -> list[str]:
        """Return one digest of the test images and the indices of the validation images."""
        return [digest(self.test_images.contents(), self.val_images.indices)]

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the training data, the evaluation data and the partition."""
        return {
            "training": self.train_images.contents(),
            "evaluation": self.evaluation_digests()[0],
            "partition": digest(self._index_digests),
        }

    def _make_clients(self) -> None:
        self.train_images = self._images(self.folders.train_folder, self._augment)
        self.test_images = self._images(self.folders.test_folder, self._plain)
        self._check_files()
        self.loaded = digest(self.train_images.contents(), self.test_images.contents())
        dealt = self.distribute(self.train_images.labels, self.test_images.labels)
        if any(map(len, dealt.own.values())) or len(dealt.test) < len(self.test_images):
            raise ConfigurationError(
                f"{self.partition} gives clients their own evaluation data, which {type(self).__name__} cannot use; leave "
                "val and test of the file empty"
            )
        self.val_images = _part(self.train_images.seen_by(self._plain), dealt.val)
        shares = [_part(self.train_images, samples) for samples in dealt.clients]
        self._clients = [StreamedClient(share, self.batch_size) for share in shares]

    def _images(self, folder: Path, transform: Transform) -> ImageStream:
        return ImageStream(folder, self.folders.classes, transform, **self._stream)

    def _check_files(self) -> None:
        counts = self.train_images.labels.bincount(minlength=self.num_classes).tolist()
        empty = [name for name, count in zip(self.folders.classes, counts, strict=True) if not count]
        place = f"train/{empty[0]}" if empty else f"{self.folders.test_folder.name}/<class>/"
        if empty or not len(self.test_images):
            raise wrong_layout(self.folders.data_dir, f"image in {place}", LAYOUT)


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


def _image_names(folder: Path) -> "np.ndarray[Any, Any]":
    """Return the sorted relative paths of all images below a folder, as bytes."""
    return np.array(sorted(map(os.fsencode, image_names(folder))), dtype="S")


def _part(images: ImageStream, indices: Tensor) -> Subset[Batch]:
    return Subset(images, indices)  # type: ignore[arg-type]  # a tensor needs an eighth of a list's memory
