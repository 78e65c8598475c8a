"""Data sets of images in class folders, optionally with one domain per client."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fl_lightning.datamodules.image_files import ImageFiles, list_images, subfolders, wrong_layout
from fl_lightning.datamodules.images import ImageData, balanced_subset
from fl_lightning.datamodules.partitions import Natural
from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import generator

Sample = tuple[Path, int]
LAYOUT = "train/<class>/*.jpg and test/<class>/*.jpg (or val/<class>/*.jpg)"


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
            raise ConfigurationError(
                f"test_fraction must be between 0 and 1, such as 0.2, found {test_fraction}"
            )
        self.data_dir, self.test_fraction = data_dir, test_fraction
        self.layout = LAYOUT if test_fraction is None else "<class>/*.jpg"
        self.train_folder = data_dir / "train" if test_fraction is None else data_dir
        self.classes = self._class_names()
        self.test_folder = self._test_folder() if test_fraction is None else data_dir

    def samples(self, classes: Sequence[str], split: torch.Generator) -> tuple[list[Sample], list[Sample]]:
        """Return the training images and the test images, with their labels.

        Args:
            classes: All classes in the order of the labels. The folder may lack some of them.
            split: Random number generator that draws the test set if ``test_fraction`` is set.

        Raises:
            ConfigurationError: A class has no training image, or there is no test image.
        """
        train = self._images(self.train_folder, classes)
        present = {label for _, label in train}
        for name in self.classes:
            if classes.index(name) not in present:
                place = (self.train_folder / name).relative_to(self.data_dir)
                raise wrong_layout(self.data_dir, f"image in {place}", self.layout)
        if self.test_fraction is None:
            test = self._images(self.test_folder, classes)
        else:
            labels = torch.tensor([label for _, label in train])
            chosen = set(balanced_subset(labels, round(self.test_fraction * len(train)), split).tolist())
            test = [sample for index, sample in enumerate(train) if index in chosen]
            train = [sample for index, sample in enumerate(train) if index not in chosen]
        if not test or not train:
            both = f"for both training and test with test_fraction={self.test_fraction}"
            where = f"in {self.test_folder.name}/" if self.test_fraction is None else both
            raise wrong_layout(self.data_dir, f"image {where}", self.layout)
        return train, test

    def _images(self, folder: Path, classes: Sequence[str]) -> list[Sample]:
        present = set(self.classes)
        numbered = [(label, name) for label, name in enumerate(classes) if name in present]
        return [(path, label) for label, name in numbered for path in list_images(folder / name)]

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


class ImageFolder(ImageFiles):
    """A data set of images in class folders.

    The layout is ``train/<class>/*.jpg`` and ``test/<class>/*.jpg``, or only ``<class>/*.jpg``. If
    there is no ``test/``, ``val/`` is the test set. The classes are in alphabetical order.

    Args:
        data_dir: The folder that holds either ``train`` and ``test``, or the class folders.
        image_size: Height and width of the images in pixels.
        test_fraction: Share of each class's images, in (0, 1), that becomes the test set. The draw
            depends on the seed. Set this share only if ``data_dir`` directly holds the class
            folders.
        **settings: Settings of :class:`~fl_lightning.datamodules.image_files.ImageFiles`.

    Raises:
        ConfigurationError: The folder is missing or has another layout, or a setting is out of its
            range. In ``setup``: an image cannot be read, or a class has no training image.
    """

    num_classes: int

    def __init__(
        self, data_dir: str, image_size: int, *, test_fraction: float | None = None, **settings: Any
    ) -> None:
        super().__init__(data_dir, image_size, **settings)
        self.folders = ClassFolders(self.data_dir, test_fraction)
        if test_fraction is not None:
            self.drawn_splits = ("val", "test")
        self.class_names = self.folders.classes
        self.num_classes = len(self.class_names)

    def load(self) -> ImageData:
        """Return the images, from the cache if it is valid."""
        return self.read(*self.folders.samples(self.folders.classes, generator(self.seed, "test split")))


class ImageDomains(ImageFiles):
    """Images of several domains, one client per domain.

    The layout is ``<domain>/train/<class>/*.jpg`` and ``<domain>/test/<class>/*.jpg``, or
    ``<domain>/<class>/*.jpg``. As in FedBN (Li et al. 2021, https://arxiv.org/abs/2102.07623), all
    domains have the same classes and differ in style. The client of a domain is evaluated on the
    domain's test images. The server is evaluated on the test images of all domains. Domains
    (clients) and classes are in alphabetical order.

    Args:
        data_dir: The folder that holds the domains.
        image_size: Height and width of the images in pixels.
        test_fraction: Share of the images of each class and domain, in (0, 1), that becomes the
            test set. The draw depends on the seed. Set this share only for the layout
            ``<domain>/<class>/*.jpg``.
        **settings: Settings of :class:`~fl_lightning.datamodules.image_files.ImageFiles`.

    Raises:
        ConfigurationError: The folder is missing or has another layout, or a setting is out of its
            range. In ``setup``: an image cannot be read, a class folder of a domain has no training
            image, or a domain has no test image.
    """

    num_classes: int
    default_partition = Natural

    def __init__(
        self, data_dir: str, image_size: int, *, test_fraction: float | None = None, **settings: Any
    ) -> None:
        super().__init__(data_dir, image_size, **settings)
        domains = subfolders(self.data_dir)
        if not domains:
            layouts = f"{LAYOUT}, or with <class>/*.jpg and test_fraction set"
            raise wrong_layout(self.data_dir, "folder", f"a folder for each domain, each with {layouts}")
        self.domains = {name: ClassFolders(self.data_dir / name, test_fraction) for name in domains}
        if test_fraction is not None:
            self.drawn_splits = ("val", "test")
        self._classes = sorted({name for folders in self.domains.values() for name in folders.classes})
        self.class_names, self.num_classes = self._classes, len(self._classes)

    def load(self) -> ImageData:
        """Return the images, from the cache if it is valid."""
        parts = [
            folders.samples(self._classes, generator(self.seed, "test split", domain))
            for domain, folders in enumerate(self.domains.values())
        ]
        splits = list(zip(*parts, strict=True))
        train, test = ([sample for samples in split for sample in samples] for split in splits)
        groups, of_test = ([g for g, samples in enumerate(split) for _ in samples] for split in splits)
        return self.read(train, test, groups, of_test, list(self.domains))
