"""Images in class folders: names of the classes, files and labels."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fl_lightning.datamodules.images import balanced_subset
from fl_lightning.errors import ConfigurationError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LAYOUT = "train/<class>/*.jpg and test/<class>/*.jpg (or val/<class>/*.jpg)"

Sample = tuple[Path, int]
"""Path of an image file, with its class."""


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of a folder's visible subfolders; [] if the folder is missing."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def wrong_layout(data_dir: Path, missing: str, expected: str) -> ConfigurationError:
    """Return the error for a data folder that does not exist or does not contain ``missing``."""
    state = f"holds no {missing}" if data_dir.is_dir() else "does not exist"
    return ConfigurationError(f"data_dir={data_dir} {state}; expected {expected}")


class ClassImages:
    """The images in the class folders of a folder, sorted by class and path.

    A class folder may have subfolders. Symbolic links are followed. Hidden files, and files
    without the suffix of an image, are ignored.

    Args:
        folder: The folder that holds the class folders.
        classes: Names of the class folders in the order of the labels. A folder may be missing.

    Attributes:
        names: Paths of all files below their class folder, as bytes. 1.28 million names take 35 MB.
        labels: Class of each file, int64, shape ``[N]``.

    Raises:
        ConfigurationError: A link leads to a folder that contains the link.
    """

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self.folder, self.classes = folder, classes
        names = [np.array([*map(os.fsencode, image_names(folder / name))], dtype="S") for name in classes]
        self.names = np.concatenate(names)
        self.labels = torch.arange(len(names)).repeat_interleave(torch.tensor([len(x) for x in names]))

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return self.folder / self.classes[int(self.labels[index])] / os.fsdecode(self.names[int(index)])

    def samples(self) -> list[Sample]:
        """Return the path and the class of each image."""
        folders = [self.folder / name for name in self.classes]
        both = zip(self.names.tolist(), self.labels.tolist(), strict=True)
        return [(folders[label] / os.fsdecode(name), label) for name, label in both]

    def check_classes(self, names: Sequence[str], data_dir: Path, layout: str) -> None:
        """Raise a ConfigurationError if one of the classes has no image."""
        sizes = dict(zip(self.classes, self.labels.bincount(minlength=len(self.classes)), strict=True))
        if empty := [name for name in names if not sizes[name]]:
            place = (self.folder / empty[0]).relative_to(data_dir)
            raise wrong_layout(data_dir, f"image in {place}", layout)


def image_names(folder: Path) -> list[str]:
    """Return the sorted paths of all images below a folder, relative to it.

    Raises:
        ConfigurationError: A link leads to a folder that contains the link.
    """
    found = []
    for parent, _, names in os.walk(folder, followlinks=True):
        if os.path.islink(parent) and (here := Path(parent)).parent.resolve().is_relative_to(here.resolve()):
            raise ConfigurationError(
                f"data_dir holds {here}, a link to the folder {here.resolve()} that contains it; remove the link"
            )
        place = () if parent == str(folder) else Path(parent).relative_to(folder).parts
        found += [
            (*place, name) for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    return [os.path.join(*parts) for parts in sorted(found)]


class ClassFolders:
    """A data set in class folders. If there is no ``test/``, ``val/`` is the test set.

    Args:
        data_dir: The folder that holds either ``train`` and ``test``, or the class folders.
        test_fraction: Share of each class's images, in (0, 1), that becomes the test set. Set this
            share only if ``data_dir`` directly holds the class folders.

    Attributes:
        classes: Names of the class folders in alphabetical order. A label is an index in this list.

    Raises:
        ConfigurationError: The folder is missing or has another layout.
    """

    def __init__(self, data_dir: Path, test_fraction: float | None = None) -> None:
        if test_fraction is not None and not 0 < test_fraction < 1:
            raise ConfigurationError(f"test_fraction must be in (0, 1), such as 0.2, found {test_fraction}")
        self.data_dir, self.test_fraction = data_dir, test_fraction
        self.layout = LAYOUT if test_fraction is None else "<class>/*.jpg"
        self.train_folder = data_dir / "train" if test_fraction is None else data_dir
        self.classes = self._class_names()
        self.test_folder = self._test_folder() if test_fraction is None else data_dir

    def images(self, classes: Sequence[str] | None = None) -> tuple[ClassImages, ClassImages]:
        """Return the images of ``train/`` and of ``test/`` or ``val/``.

        With ``test_fraction``, both are all images.

        Args:
            classes: All classes in the order of the labels. The folder may lack some of them.
                None: the folder's classes.

        Raises:
            ConfigurationError: A class has no training image, or there is no test image.
        """
        names = self.classes if classes is None else classes
        train = ClassImages(self.train_folder, names)
        train.check_classes(self.classes, self.data_dir, self.layout)
        test = train if self.test_fraction is not None else ClassImages(self.test_folder, names)
        if not len(test):
            raise wrong_layout(self.data_dir, f"image in {self.test_folder.name}/", self.layout)
        return train, test

    def samples(
        self, split: torch.Generator, classes: Sequence[str] | None = None
    ) -> tuple[list[Sample], list[Sample]]:
        """Return the training images and the test images, with their labels.

        Args:
            split: Random number generator that draws the test set if ``test_fraction`` is set.
            classes: See :meth:`images`.

        Raises:
            ConfigurationError: A class has no training image, or there is no test image.
        """
        train, test = self.images(classes)
        if self.test_fraction is None:
            return train.samples(), test.samples()
        count = round(self.test_fraction * len(train))
        if not 0 < count < len(train):
            both = f"for both training and test with test_fraction={self.test_fraction}"
            raise wrong_layout(self.data_dir, f"image {both}", self.layout)
        chosen = set(balanced_subset(train.labels, count, split).tolist())
        every = list(enumerate(train.samples()))
        return [x for i, x in every if i not in chosen], [x for i, x in every if i in chosen]

    def _class_names(self) -> list[str]:
        names, train = subfolders(self.train_folder), self.train_folder
        if self.test_fraction is not None and "train" in names:
            raise ConfigurationError(
                f"test_fraction={self.test_fraction} splits class folders, but data_dir={self.data_dir} holds train/; leave "
                "test_fraction out"
            )
        if not names:
            place = "" if train == self.data_dir else " in train/"
            missing = f"class folder{place}" if train.is_dir() else "train/"
            remedy = "unpack the data set there, one folder per class, or set data_dir to its folder"
            raise wrong_layout(self.data_dir, missing, f"the layout {self.layout}: {remedy}")
        return names

    def _test_folder(self) -> Path:
        folders = [self.data_dir / name for name in ("test", "val") if (self.data_dir / name).is_dir()]
        if not folders:
            raise ConfigurationError(
                f"data_dir={self.data_dir} holds neither test/ nor val/; expected the layout {LAYOUT}"
            )
        # ImageNet's test/ has no class folders, because its images have no labels: take val/
        folder = next((folder for folder in folders if subfolders(folder)), folders[0])
        unknown = sorted(set(subfolders(folder)) - set(self.classes))
        if unknown:
            raise ConfigurationError(
                f"data_dir={self.data_dir} has the class folder {folder.name}/{unknown[0]} without a "
                f"train/{unknown[0]}; every class needs training images"
            )
        return folder
