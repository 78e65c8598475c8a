"""The layouts ``train/<class>/*.jpg`` with ``test/<class>/*.jpg``, and ``<class>/*.jpg``: where the classes are, and their images."""

from collections.abc import Sequence
from pathlib import Path

import torch

from fl_lightning.datamodules.decoding import list_images, subfolders
from fl_lightning.datamodules.images import balanced_subset
from fl_lightning.errors import ConfigurationError

LAYOUT = "train/<class>/*.jpg and test/<class>/*.jpg (or val/<class>/*.jpg)"


class ClassFolders:
    """A data set in class folders. Where there is no ``test/``, ``val/`` is the test set.

    Args:
        data_dir: The folder that holds ``train`` and ``test``, or the class folders themselves.
        test_fraction: Share of the images of each class, in (0, 1), that becomes the test set, where ``data_dir`` holds the
            class folders; None where it holds ``train`` and ``test``.

    Attributes:
        classes: The folders of ``train`` (or of ``data_dir``) in alphabetical order: class c is the c-th.

    Raises:
        ConfigurationError: The folder is missing or laid out otherwise.
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

    def samples(
        self, classes: Sequence[str], split: torch.Generator
    ) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
        """The training and the test images, each with its label.

        Args:
            classes: The classes in the order of their labels, those of this folder among them.
            split: The source of the choice of test images, where there is one.

        Raises:
            ConfigurationError: A class has no training image, or there is no test image.
        """
        train = self._images(self.train_folder, classes)
        found = {label for _, label in train}
        for name in self.classes:
            if classes.index(name) not in found:
                place = (self.train_folder / name).relative_to(self.data_dir)
                raise ConfigurationError(
                    f"data_dir={self.data_dir} has no image in {place}; expected {self.layout}"
                )
        if self.test_fraction is None:
            test = self._images(self.test_folder, classes)
        else:
            labels = torch.tensor([label for _, label in train])
            chosen = set(balanced_subset(labels, round(self.test_fraction * len(train)), split).tolist())
            test = [sample for index, sample in enumerate(train) if index in chosen]
            train = [sample for index, sample in enumerate(train) if index not in chosen]
        if not test or not train:
            what = (
                f"in {self.test_folder.name}/"
                if self.test_fraction is None
                else f"left for both parts with test_fraction={self.test_fraction}"
            )
            raise ConfigurationError(f"data_dir={self.data_dir} has no image {what}; expected {self.layout}")
        return train, test

    def _images(self, folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
        own = set(self.classes)
        return [
            (path, label)
            for label, name in enumerate(classes)
            if name in own
            for path in list_images(folder / name)
        ]

    def _class_names(self) -> list[str]:
        names, train = subfolders(self.train_folder), self.train_folder
        if self.test_fraction is not None and "train" in names:
            raise ConfigurationError(
                f"test_fraction={self.test_fraction} splits class folders, but data_dir={self.data_dir} holds train/; leave "
                "test_fraction out"
            )
        if not names:
            place = "" if train == self.data_dir else " in train/"
            found = (
                f"holds no class folder{place}"
                if train.is_dir()
                else "holds no train/"
                if self.data_dir.is_dir()
                else "does not exist"
            )
            raise ConfigurationError(
                f"data_dir={self.data_dir} {found}; expected the layout {self.layout}: unpack the data set there, "
                "one folder per class, or set data_dir to where it lies"
            )
        return names

    def _test_folder(self) -> Path:
        folders = [self.data_dir / name for name in ("test", "val") if (self.data_dir / name).is_dir()]
        if not folders:
            raise ConfigurationError(
                f"data_dir={self.data_dir} holds neither test/ nor val/; expected the layout {LAYOUT}"
            )
        # ImageNet has images without labels in test/
        folder = next((folder for folder in folders if subfolders(folder)), folders[0])
        unknown = sorted(set(subfolders(folder)) - set(self.classes))
        if unknown:
            raise ConfigurationError(
                f"data_dir={self.data_dir} has the class folder {folder.name}/{unknown[0]} without a "
                f"train/{unknown[0]}; every class needs training images"
            )
        return folder
