"""The layout ``train/<class>/*.jpg`` and ``test/<class>/*.jpg``: where the classes are, and their images."""

import hashlib
from pathlib import Path

import torch

from datamodules.image_cache import cached_images, list_images
from datamodules.images import ImageData
from fl_lightning.errors import ConfigurationError

LAYOUT = "train/<class>/*.jpg and test/<class>/*.jpg (or val/<class>/*.jpg)"


class ClassFolders:
    """A data set in class folders. Where there is no ``test/``, ``val/`` is the test set.

    Args:
        data_dir: The folder that holds ``train`` and ``test``.

    Attributes:
        classes: The folders of ``train`` in alphabetical order: class c is the c-th.

    Raises:
        ConfigurationError: The folder is missing or laid out otherwise.
    """

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.classes = _class_names(data_dir)
        self.test_folder = _test_folder(data_dir, self.classes)

    def read(self, image_size: int, cache_dir: Path) -> ImageData:
        """Read all images, from the cache where it is up to date.

        Args:
            image_size: Height and width of the result in pixels.
            cache_dir: Folder of the decoded images.

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
        cache = cache_dir / f"{self.data_dir.resolve().name}-{image_size}px-{place}.pt"
        paths = [path for files in (*train, *test) for path in files]
        images = cached_images(paths, self.data_dir, image_size, cache)
        label_of_class = torch.arange(len(self.classes))
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
