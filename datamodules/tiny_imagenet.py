"""Tiny ImageNet, and its download."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.hub import download_url_to_file

from fl_lightning.datamodules.class_folders import Sample, find_images, subfolders, wrong_layout
from fl_lightning.datamodules.image_cache import building
from fl_lightning.datamodules.image_files import ImageFiles
from fl_lightning.datamodules.images import ImageData
from fl_lightning.errors import ConfigurationError

LAYOUT = "train/<wnid>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt"


class TinyImageNet(ImageFiles):
    """Tiny ImageNet (Le, Yang 2015): 200 classes of ImageNet, RGB 64x64.

    There are 100,000 training and 10,000 test images. The files have the layout of
    ``tiny-imagenet-200.zip``. The folder ``val`` is the test set, because the labels of ``test``
    are not public. The classes are the folders of ``train`` in alphabetical order. If the file
    ``words.txt`` exists, the name of a class is the first word that the file gives for the class.

    Args:
        data_dir: The folder ``tiny-imagenet-200``.
        image_size: Height and width of the images in pixels. Use less than 64 for reduced runs.
        download: Whether missing files (248 MB) are downloaded into ``data_dir``.
        **settings: Settings of :class:`~fl_lightning.datamodules.image_files.ImageFiles`.

    Attributes:
        url: Address of the archive.
        md5: MD5 of the archive.

    Raises:
        ConfigurationError: The folder is missing or has another layout, or a setting is out of its
            range. In ``setup``: an image cannot be read, or its class is unknown.
    """

    num_classes: int
    url = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    md5 = "90528d7ca1a48142e341f4ef8d21d0de"

    def __init__(
        self,
        data_dir: str = "data/tiny-imagenet-200",
        image_size: int = 64,
        download: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(data_dir, image_size, **settings)
        self.download, self.num_classes = download, 200
        self._annotations = self.data_dir / "val" / "val_annotations.txt"
        self._wnids: list[str] = []
        if not download or self._annotations.is_file():
            self._find_classes()

    def prepare_data(self) -> None:
        """Download missing files if ``download`` is set."""
        if self.download and not self._annotations.is_file():
            with building(self.data_dir):  # only one of two concurrent runs downloads
                if not self._annotations.is_file():
                    self._fetch()

    def _fetch(self) -> None:
        """Download the archive. The folder is created only once it is complete."""
        from torchvision.datasets.utils import check_md5, extract_archive  # this import takes seconds

        target = self.data_dir
        try:
            with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
                archive, unpacked = f"{folder}/archive.zip", f"{folder}/unpacked"
                download_url_to_file(self.url, archive)
                if not check_md5(archive, self.md5):
                    raise ValueError(f"it has another MD5 than {self.md5}")
                extract_archive(archive, unpacked)
                (only,) = Path(unpacked).iterdir()
                os.replace(only, target)
        except (RuntimeError, OSError, ValueError) as error:
            raise ConfigurationError(
                f"download: {self.url} could not be fetched into {target} ({getattr(error, 'reason', error)}); try again, or unpack it "
                "there by hand"
            ) from error

    def load(self) -> ImageData:
        """Return the images, from the cache if it is valid."""
        self._find_classes()
        train = find_images(self.data_dir, [f"train/{wnid}" for wnid in self._wnids], LAYOUT)
        return self.read(train.samples(), self._test_images())

    def _find_classes(self) -> None:
        self._wnids = subfolders(self.data_dir / "train")
        if not self._wnids or not self._annotations.is_file():
            missing = "val/val_annotations.txt" if self._wnids else "train/<wnid>/"
            remedy = f"unpack {self.url} and set data_dir to its folder, or set download: true"
            raise wrong_layout(self.data_dir, missing, f"the layout {LAYOUT}: {remedy}")
        self.num_classes = len(self._wnids)
        self.class_names = self._names()

    def _test_images(self) -> list[Sample]:
        labels = {wnid: label for label, wnid in enumerate(self._wnids)}
        samples = []
        for number, line in enumerate(self._annotations.read_text().splitlines(), 1):
            name, wnid = (*line.split("\t"), "")[:2]
            path = self.data_dir / "val" / "images" / name
            if wnid not in labels or not path.is_file():
                raise ConfigurationError(
                    f"data: line {number} of {self._annotations} names {name} of class {wnid!r}; the file must be in val/images/ and "
                    "the class in train/"
                )
            samples.append((path, labels[wnid]))
        if not samples:
            raise ConfigurationError(f"data: {self._annotations} names no image; expected {LAYOUT}")
        return samples

    def _names(self) -> list[str]:
        words = self.data_dir / "words.txt"
        lines = words.read_text().splitlines() if words.is_file() else []
        known = dict(line.split("\t", 1) for line in lines if "\t" in line)
        return [known.get(wnid, wnid).split(",")[0] for wnid in self._wnids]
