"""Any image classification data set in class folders."""

import hashlib
from pathlib import Path

import torch

from datamodules.image_cache import cached_images, list_images
from datamodules.images import ImageData
from datamodules.in_memory import InMemoryDataModule
from datamodules.partitions import Partition
from fl_lightning.errors import ConfigurationError

LAYOUT = "train/<class>/*.jpg and test/<class>/*.jpg (or val/<class>/*.jpg)"


class ImageFolder(InMemoryDataModule):
    """Images in class folders: ``train/<class>/*.jpg`` and ``test/<class>/*.jpg``.

    Where there is no ``test/``, ``val/`` is the test set. The classes are the folders of ``train`` in
    alphabetical order. Images become RGB; one that is not of the right size has its shorter side resized to
    ``image_size`` and is cropped to the centre. They are decoded once, into a cache that is checked against
    the files and its own checksum at every start. Mean and standard deviation of the normalisation are those
    of the training images.

    Args:
        data_dir: The folder that holds ``train`` and ``test``.
        image_size: Height and width of the images in pixels.
        num_clients: Number of clients.
        batch_size: Samples in a client's batch.
        partition: How the training data are spread over the clients; None is ``IID()``.
        val_fraction: Share of the training data, in [0, 1), for the server's validation set.
        eval_batch_size: Samples in a batch of the server's evaluation.
        crop_padding: Black border in pixels for random crops, 0 for no crops.
        horizontal_flip: Whether training images are flipped with probability 1/2.
        seed: Seed of everything random about the data.
        max_examples: Use only that many training images, every class in proportion; None for all.
        cache_dir: Folder of the decoded images; None is ``data/cache`` below the working directory.

    Raises:
        ConfigurationError: The folder is missing or laid out otherwise, a setting is out of its range, or (in
            ``setup``) an image cannot be read.
    """

    in_channels = 3
    image_size: int
    num_classes: int

    def __init__(
        self,
        data_dir: str,
        image_size: int,
        num_clients: int = 10,
        batch_size: int = 20,
        partition: Partition | None = None,
        val_fraction: float = 0.0,
        eval_batch_size: int = 500,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        seed: int = 0,
        max_examples: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            num_clients=num_clients,
            batch_size=batch_size,
            partition=partition,
            val_fraction=val_fraction,
            eval_batch_size=eval_batch_size,
            crop_padding=crop_padding,
            horizontal_flip=horizontal_flip,
            seed=seed,
            max_examples=max_examples,
        )
        if image_size < 1:
            raise ConfigurationError(f"image_size must be at least 1 pixel, found {image_size}")
        self.data_dir = Path(data_dir)
        self.image_size = image_size
        self.cache_dir = Path("data/cache" if cache_dir is None else cache_dir)
        self.classes = _class_names(self.data_dir)
        self.num_classes = len(self.classes)
        self.test_folder = _test_folder(self.data_dir, self.classes)

    def prepare_data(self) -> None:
        """Build the cache of decoded images where it is missing or out of date."""
        self.load()

    def load(self) -> ImageData:
        """Read the images, from the cache where it is up to date.

        Raises:
            ConfigurationError: An image cannot be read, a class has no training image, or there is no test
                image.
        """
        train = [list_images(self.data_dir / "train" / name) for name in self.classes]
        test = [list_images(self.test_folder / name) for name in self.classes]
        for name, files in zip(self.classes, train, strict=True):
            if not files:
                raise ConfigurationError(
                    f"data_dir={self.data_dir} has no image in train/{name}; expected {LAYOUT}"
                )
        if not any(test):
            raise ConfigurationError(
                f"data_dir={self.data_dir} has no image in {self.test_folder.name}/; expected {LAYOUT}"
            )
        place = hashlib.sha256(str(self.data_dir.resolve()).encode()).hexdigest()[:8]
        cache = self.cache_dir / f"{self.data_dir.resolve().name}-{self.image_size}px-{place}.pt"
        paths = [path for files in (*train, *test) for path in files]
        images = cached_images(paths, self.data_dir, self.image_size, cache)
        label_of_class = torch.arange(self.num_classes)
        train_labels = label_of_class.repeat_interleave(torch.tensor([len(files) for files in train]))
        test_labels = label_of_class.repeat_interleave(torch.tensor([len(files) for files in test]))
        return ImageData(images[: len(train_labels)], train_labels, images[len(train_labels) :], test_labels)


def _class_names(data_dir: Path) -> list[str]:
    train = data_dir / "train"
    names = _subfolders(train) if train.is_dir() else []
    if not names:
        found = (
            "holds no class folder in train/"
            if train.is_dir()
            else "holds no train/"
            if data_dir.is_dir()
            else "does not exist"
        )
        raise ConfigurationError(
            f"data_dir={data_dir} {found}; expected the layout {LAYOUT}: unpack the data set there, "
            "one folder per class, or set data_dir to where it lies"
        )
    return names


def _test_folder(data_dir: Path, classes: list[str]) -> Path:
    folder = next((data_dir / name for name in ("test", "val") if (data_dir / name).is_dir()), None)
    if folder is None:
        raise ConfigurationError(
            f"data_dir={data_dir} holds neither test/ nor val/; expected the layout {LAYOUT}"
        )
    unknown = sorted(set(_subfolders(folder)) - set(classes))
    if unknown:
        raise ConfigurationError(
            f"data_dir={data_dir} has the class folder {folder.name}/{unknown[0]} without a "
            f"train/{unknown[0]}; every class needs training images"
        )
    return folder


def _subfolders(folder: Path) -> list[str]:
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
