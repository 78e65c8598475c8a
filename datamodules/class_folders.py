"""Images in class folders: names of the classes, files and labels."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.datamodules.images import balanced_subset
from fl_lightning.datamodules.subjects import Subjects, subjects_of_files
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


@dataclass
class ClassImages:
    """Image files with their classes.

    Attributes:
        data_dir: The folder of the data set.
        names: Paths of all files below ``data_dir``, as bytes. 1.28 million names take 50 MB.
        labels: Class of each file, int64, shape ``[N]``.
    """

    data_dir: Path
    names: NDArray[Any]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return self.data_dir / os.fsdecode(self.names[int(index)])

    def subjects(self, pattern: str, root: Path | None = None) -> list[str]:
        """Return the subject of each image: what the pattern matches in the path below ``root``.

        Args:
            pattern: See :func:`~fl_lightning.datamodules.subjects.subjects_of_files`.
            root: A folder that holds ``data_dir``. Default: ``data_dir``.
        """
        below = self.data_dir.relative_to(root or self.data_dir)
        return subjects_of_files(pattern, (below / os.fsdecode(name) for name in self.names))

    def part(self, chosen: Tensor) -> "ClassImages":
        """Return some of the images, given by their indices or by a mask."""
        return ClassImages(self.data_dir, self.names[chosen.numpy()], self.labels[chosen])

    def samples(self) -> list[Sample]:
        """Return the path and the class of each image."""
        return list(zip(map(self.path, range(len(self))), self.labels.tolist(), strict=True))


def find_images(data_dir: Path, folders: Sequence[str], layout: str | None = None) -> ClassImages:
    """Return the images in class folders, sorted by class and path.

    A class folder may have subfolders. Symbolic links are followed. Hidden files, and files
    without the suffix of an image, are ignored.

    Args:
        data_dir: The folder of the data set.
        folders: Path of each class folder below ``data_dir``, in the order of the labels. A folder
            may be missing.
        layout: The layout to be expected, for the error about a class folder without an image.
            None: class folders may be empty.

    Raises:
        ConfigurationError: A class folder has no image, or a link leads to a folder that contains
            the link.
    """
    names = [np.array(_image_names(data_dir, folder), dtype="S") for folder in folders]
    for folder, part in zip(folders, names, strict=True):
        if layout is not None and not len(part) and (data_dir / folder).is_dir():
            raise wrong_layout(data_dir, f"image in {folder}", layout)
    labels = torch.arange(len(names)).repeat_interleave(torch.tensor([*map(len, names)]))
    return ClassImages(data_dir, np.concatenate(names), labels)


def _image_names(data_dir: Path, folder: str) -> list[bytes]:
    found: list[tuple[str, ...]] = []
    for parent, _, names in os.walk(data_dir / folder, followlinks=True):
        here = Path(parent)
        if here.is_symlink() and here.parent.resolve().is_relative_to(here.resolve()):
            raise ConfigurationError(
                f"data_dir holds {here}, a link to the folder {here.resolve()} that contains it; remove the link"
            )
        images = [x for x in names if x.lower().endswith(SUFFIXES) and not x.startswith(".")]
        found += [(*here.relative_to(data_dir).parts, name) for name in images]
    return [os.fsencode(os.path.join(*parts)) for parts in sorted(found)]


class ClassFolders:
    """A data set in class folders. If there is no ``test/``, ``val/`` is the test set.

    Args:
        data_dir: The folder that holds either ``train`` and ``test``, or the class folders.
        drawn_by: Setting by which the test images are drawn, such as ``"folds=5"``. ``data_dir`` then
            holds the class folders. Default: ``data_dir`` holds ``train`` and ``test``.

    Attributes:
        classes: Names of the class folders in alphabetical order. A label is an index in this list.

    Raises:
        ConfigurationError: The folder is missing or has another layout.
    """

    def __init__(self, data_dir: Path, drawn_by: str = "") -> None:
        self.data_dir, self.drawn_by = data_dir, drawn_by
        self.layout = "<class>/*.jpg" if drawn_by else LAYOUT
        self.train_folder = data_dir if drawn_by else data_dir / "train"
        self.classes = self._class_names()
        self.test_folder = data_dir if drawn_by else self._test_folder()

    def images(self, classes: Sequence[str] | None = None) -> tuple[ClassImages, ClassImages]:
        """Return the training images and the test images; all images twice if they are not yet drawn.

        Args:
            classes: All classes in the order of the labels. The folder may lack some of them.
                None: the folder's classes.

        Raises:
            ConfigurationError: A class has no training image, or there is no test image.
        """
        places = (x.relative_to(self.data_dir) for x in (self.train_folder, self.test_folder))
        train, test = ([str(place / name) for name in classes or self.classes] for place in places)
        images = find_images(self.data_dir, train, self.layout)
        if self.drawn_by:
            return images, images
        test_images = find_images(self.data_dir, test)
        if not len(test_images):
            raise wrong_layout(self.data_dir, f"image in {self.test_folder.name}/", self.layout)
        return images, test_images

    def drawn(
        self, images: ClassImages, share: float, names: Sequence[str], draws: torch.Generator
    ) -> Tensor:
        """Draw a share of the images, or of their subjects, stratified by class; return a mask.

        Args:
            images: All images.
            share: The share, in (0, 1).
            names: Subject of each image. Empty: each image is a subject.
            draws: Random number generator of the draw.

        Raises:
            ConfigurationError: The share takes no image, or all.
        """
        size, unit = (len({*names}), "subject") if names else (len(images), "image")
        count = round(share * size)
        if not 0 < count < size:
            both = f"for both training and test with test_fraction={share}"
            raise wrong_layout(self.data_dir, f"{unit} {both}", self.layout)
        every = torch.arange(len(images))
        if names:
            taken = Subjects.of_names(names, images.labels).subset(every, share, draws)
        else:
            taken = balanced_subset(images.labels, count, draws)
        return torch.isin(every, taken)

    def _class_names(self) -> list[str]:
        names, train = subfolders(self.train_folder), self.train_folder
        if self.drawn_by and "train" in names:
            raise ConfigurationError(
                f"{self.drawn_by} splits class folders, but data_dir={self.data_dir} holds train/; leave {self.drawn_by.partition('=')[0]} out"
            )
        if not names:
            place = "" if train == self.data_dir else " in train/"
            missing = f"class folder{place}" if train.is_dir() else "train/"
            remedy = "unpack the data set there, one folder per class, or set data_dir to its folder"
            raise wrong_layout(self.data_dir, missing, f"the layout {self.layout}: {remedy}")
        return names

    def _test_folder(self) -> Path:
        # ImageNet's test/ has no class folders, because its images have no labels: take val/
        folders = self.data_dir / "test", self.data_dir / "val"
        folder = next((folder for folder in folders if subfolders(folder)), folders[0])
        unknown = sorted(set(subfolders(folder)) - set(self.classes))
        if unknown:
            raise ConfigurationError(
                f"data_dir={self.data_dir} has the class folder {folder.name}/{unknown[0]} without a "
                f"train/{unknown[0]}; every class needs training images"
            )
        return folder
