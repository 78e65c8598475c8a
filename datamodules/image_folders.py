"""Data sets of images in class folders, optionally with one domain per client."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from fl_lightning.datamodules.class_folders import (
    LAYOUT,
    ClassFolders,
    ClassImages,
    subfolders,
    wrong_layout,
)
from fl_lightning.datamodules.folds import check_fold, folds_of_samples
from fl_lightning.datamodules.image_files import ImageFiles
from fl_lightning.datamodules.images import ImageData
from fl_lightning.datamodules.partitions import Natural
from fl_lightning.datamodules.subjects import Subjects
from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import generator
from fl_lightning.recorded import describe


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
        subjects: Regular expression that finds the subject, such as a patient, in a file's path below
            ``data_dir``: for example ``P[0-9]+``, or ``([^/]+)/[^/]+$`` for the name of the folder.
            All images of a subject stay together in each part of the data that is drawn, and shares
            are shares of the subjects. Default: each image is a subject.
        **settings: Settings of :class:`~fl_lightning.datamodules.image_files.ImageFiles`.

    Raises:
        ConfigurationError: The folder is missing or has another layout, or a setting is out of its
            range. In ``setup``: an image cannot be read, or a class has no training image.
    """

    num_classes: int
    class_names: list[str]

    def __init__(
        self,
        data_dir: str,
        image_size: int,
        *,
        test_fraction: float | None = None,
        subjects: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(data_dir, image_size, **settings)
        self.subjects, self.test_fraction = subjects, test_fraction
        self._draws_test = self._draws_test or test_fraction is not None
        self.folders = self._folders("" if test_fraction is None else f"test_fraction={test_fraction}")
        self.class_names = sorted({name for folders in self.folders.values() for name in folders.classes})
        self.num_classes = len(self.class_names)

    def _folders(self, drawn_by: str) -> dict[str, ClassFolders]:
        return {"": ClassFolders(self.data_dir, drawn_by)}

    def _test_masks(
        self, parts: Sequence[ClassImages], subjects: Sequence[Sequence[str]]
    ) -> Iterable[Tensor]:
        """Draw the test images, and return a mask for the images of each domain."""
        assert self.test_fraction is not None
        domains = zip(self.folders.values(), parts, subjects, strict=True)
        for domain, (folders, images, names) in enumerate(domains):
            yield folders.drawn(images, self.test_fraction, names, self._draws(domain))

    def _draws(self, domain: int) -> Generator:
        return generator(self.seed, "test split")

    def load(self) -> ImageData:
        """Return the images, from the cache if it is valid."""
        parts = [folders.images(self.class_names) for folders in self.folders.values()]
        if self._draws_test:
            every = [images for images, _ in parts]
            masks = self._test_masks(every, [*map(self._subjects_of, every)])
            parts = [(x.part(~mask), x.part(mask)) for x, mask in zip(every, masks, strict=True)]
        train, test = ([part[split] for part in parts] for split in (0, 1))
        files, test_files = ([x for images in y for x in images.samples()] for y in (train, test))
        subjects = [name for images in (*train, *test) for name in self._subjects_of(images)]
        if not (names := [*filter(None, self.folders)]):
            return self.read(files, test_files, subjects=subjects)
        groups, of_test = (
            [i for i, images in enumerate(x) for _ in range(len(images))] for x in (train, test)
        )
        return self.read(files, test_files, groups, of_test, names, subjects)

    def _subjects_of(self, images: ClassImages) -> list[str]:
        return [] if self.subjects is None else images.subjects(self.subjects, self.data_dir)


class ImageDomains(ImageFolder):
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
        folds: Number of folds of a cross-validation, for the layout ``<domain>/<class>/*.jpg``. The
            subjects of each domain are divided into folds, stratified by class and the same for
            every seed.
        fold: Fold, from 0 to ``folds - 1``, that becomes the test set.
        subjects: See :class:`ImageFolder`. A subject may not be in two domains. If domains number
            their subjects alike, let the pattern match the domain, too: ``^.*P[0-9]+``.
        **settings: Settings of :class:`~fl_lightning.datamodules.image_files.ImageFiles`.

    Raises:
        ConfigurationError: The folder is missing or has another layout, or a setting is out of its
            range. In ``setup``: an image cannot be read, a class folder of a domain has no training
            image, or a domain has no test image.
    """

    default_partition = Natural

    def __init__(
        self,
        data_dir: str,
        image_size: int,
        *,
        test_fraction: float | None = None,
        folds: int | None = None,
        fold: int = 0,
        **settings: Any,
    ) -> None:
        check_fold(folds, fold)
        self.folds, self.fold, self._draws_test = folds, fold, folds is not None
        super().__init__(data_dir, image_size, test_fraction=test_fraction, **settings)
        if folds is not None and (test_fraction is not None or type(self.partition) is not Natural):
            other = f"data.test_fraction={test_fraction}" if test_fraction else describe(self.partition)
            raise ConfigurationError(
                f"data.folds={folds} divides each domain, but {other} is set; leave one of them out"
            )

    def _folders(self, drawn_by: str) -> dict[str, ClassFolders]:
        drawn_by = drawn_by if self.folds is None else f"folds={self.folds}"
        domains = subfolders(self.data_dir)
        if not domains:
            layouts = f"{LAYOUT}, or with <class>/*.jpg and test_fraction set"
            raise wrong_layout(self.data_dir, "folder", f"a folder for each domain, each with {layouts}")
        return {name: ClassFolders(self.data_dir / name, drawn_by) for name in domains}

    def _draws(self, domain: int) -> Generator:
        return generator(self.seed, "test split", domain)

    def _test_masks(
        self, parts: Sequence[ClassImages], subjects: Sequence[Sequence[str]]
    ) -> Iterable[Tensor]:
        if self.folds is None:
            return super()._test_masks(parts, subjects)
        labels, sizes = torch.cat([images.labels for images in parts]), [*map(len, parts)]
        domains, of = torch.arange(len(parts)).repeat_interleave(torch.tensor(sizes)), None
        if self.subjects is not None:
            of = Subjects.of_names([name for names in subjects for name in names], labels).of
        fold_of, notes = folds_of_samples(labels, domains, [*self.folders], of, self.folds, self.fold)
        self.notes += notes
        return torch.split(fold_of == self.fold, sizes)
