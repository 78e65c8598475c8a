"""Data sets of images in class folders, optionally with one domain per client."""

from typing import Any

from torch import Generator

from fl_lightning.datamodules.class_folders import LAYOUT, ClassFolders, Sample, subfolders, wrong_layout
from fl_lightning.datamodules.image_files import ImageFiles
from fl_lightning.datamodules.images import ImageData
from fl_lightning.datamodules.partitions import Natural
from fl_lightning.datamodules.subjects import subjects_of_files
from fl_lightning.randomness import generator


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
        self.subjects = subjects
        if test_fraction is not None:
            self._draws_test = True
        self.folders = self._folders(test_fraction)
        self.class_names = sorted({name for folders in self.folders.values() for name in folders.classes})
        self.num_classes = len(self.class_names)

    def _folders(self, test_fraction: float | None) -> dict[str, ClassFolders]:
        return {"": ClassFolders(self.data_dir, test_fraction, self.subjects)}

    def _split(self, domain: int) -> Generator:
        return generator(self.seed, "test split")

    def load(self) -> ImageData:
        """Return the images, from the cache if it is valid."""
        train, test, groups, of_test = list[Sample](), list[Sample](), list[int](), list[int]()
        subjects = list[str]()
        for domain, folders in enumerate(self.folders.values()):
            images, test_images = folders.images(self.class_names, self._split(domain))
            train, test = train + images.samples(), test + test_images.samples()
            groups += [domain] * len(images)
            of_test += [domain] * len(test_images)
        if self.subjects is not None:
            files = [path.relative_to(self.data_dir) for path, _ in (*train, *test)]
            subjects = subjects_of_files(self.subjects, files)
        if not (names := [*filter(None, self.folders)]):
            return self.read(train, test, subjects=subjects)
        return self.read(train, test, groups, of_test, names, subjects)


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
        subjects: See :class:`ImageFolder`. A subject may not be in two domains. If domains number
            their subjects alike, let the pattern match the domain, too: ``^.*P[0-9]+``.
        **settings: Settings of :class:`~fl_lightning.datamodules.image_files.ImageFiles`.

    Raises:
        ConfigurationError: The folder is missing or has another layout, or a setting is out of its
            range. In ``setup``: an image cannot be read, a class folder of a domain has no training
            image, or a domain has no test image.
    """

    default_partition = Natural

    def _folders(self, test_fraction: float | None) -> dict[str, ClassFolders]:
        domains = subfolders(self.data_dir)
        if not domains:
            layouts = f"{LAYOUT}, or with <class>/*.jpg and test_fraction set"
            raise wrong_layout(self.data_dir, "folder", f"a folder for each domain, each with {layouts}")
        given = test_fraction, self.subjects, self.data_dir
        return {name: ClassFolders(self.data_dir / name, *given) for name in domains}

    def _split(self, domain: int) -> Generator:
        return generator(self.seed, "test split", domain)
