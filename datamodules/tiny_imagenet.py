"""Tiny-ImageNet in its original layout."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from datamodules.image_cache import cached_images, list_images
from datamodules.images import ImageData
from datamodules.in_memory import InMemoryDataModule
from fl_lightning.errors import ConfigurationError

LAYOUT = "train/<wnid>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt"


class TinyImageNet(InMemoryDataModule):
    """Colour images of 64x64 pixels in 200 classes of ImageNet (Le, Yang 2015): 100,000 for training, 10,000 for testing.

    The layout is that of ``tiny-imagenet-200.zip`` (http://cs231n.stanford.edu/tiny-imagenet-200.zip, 248 MB; nothing is downloaded
    here). Its ``val`` is the test set, with the labels of ``val_annotations.txt``; the labels of its own ``test`` are not public. The
    classes are the folders of ``train`` in alphabetical order, their names the first words of ``words.txt`` where it is there. Images
    become RGB and are decoded once, into a cache that is checked against the files and its own checksum at every start.
    Mean and standard deviation of the normalisation are those of the training images.

    Args:
        data_dir: The folder ``tiny-imagenet-200``.
        image_size: Height and width in pixels to which the images are resized, for reduced runs; 64 leaves them.
        cache_dir: Folder of the decoded images; None is ``data/cache`` below the working directory.
        **settings: Those of :class:`~datamodules.in_memory.InMemoryDataModule`.

    Raises:
        ConfigurationError: The folder is missing or laid out otherwise, a setting is out of its range, or (in ``setup``) an image
            cannot be read.
    """

    in_channels = 3
    image_size: int
    num_classes: int

    def __init__(
        self,
        data_dir: str = "data/tiny-imagenet-200",
        image_size: int = 64,
        *,
        cache_dir: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if image_size < 1:
            raise ConfigurationError(f"image_size must be at least 1 pixel, found {image_size}")
        self.data_dir = Path(data_dir).expanduser()
        self.cache_dir = Path("data/cache" if cache_dir is None else cache_dir).expanduser()
        self.image_size = image_size
        train = self.data_dir / "train"
        self._wnids = sorted(path.name for path in train.iterdir() if path.is_dir()) if train.is_dir() else []
        if not self._wnids or not self._annotations.is_file():
            missing = "val/val_annotations.txt" if self._wnids else "train/<wnid>/"
            found = f"holds no {missing}" if self.data_dir.is_dir() else "does not exist"
            raise ConfigurationError(
                f"data_dir={self.data_dir} {found}; expected the layout {LAYOUT}: unpack tiny-imagenet-200.zip, and set data_dir to "
                "its folder"
            )
        self.num_classes = len(self._wnids)
        self.class_names = self._names()

    @property
    def _annotations(self) -> Path:
        return self.data_dir / "val" / "val_annotations.txt"

    def prepare_data(self) -> None:
        """Build the cache of decoded images where it is missing or out of date; nothing once they are in memory."""
        if not self.clients:
            self.load()

    def load(self) -> ImageData:
        """Read the images, from the cache where it is up to date.

        Raises:
            ConfigurationError: An image is missing or cannot be read, or a class is unknown.
        """
        train = [list_images(self.data_dir / "train" / wnid) for wnid in self._wnids]
        for wnid, files in zip(self._wnids, train, strict=True):
            if not files:
                raise ConfigurationError(
                    f"data_dir={self.data_dir} has no image in train/{wnid}; expected {LAYOUT}"
                )
        test = self._test_images()
        paths = [path for files in train for path in files] + [path for path, _ in test]
        place = hashlib.sha256(str(self.data_dir.resolve()).encode()).hexdigest()[:8]
        cache = self.cache_dir / f"{self.data_dir.resolve().name}-{self.image_size}px-{place}.pt"
        images = cached_images(paths, self.data_dir, self.image_size, cache)
        sizes = torch.tensor([len(files) for files in train])
        train_labels = torch.arange(len(train)).repeat_interleave(sizes)
        count = len(train_labels)
        return ImageData(
            images[:count], train_labels, images[count:], torch.tensor([label for _, label in test])
        )

    def _test_images(self) -> list[tuple[Path, int]]:
        labels, found = {wnid: label for label, wnid in enumerate(self._wnids)}, []
        for number, line in enumerate(self._annotations.read_text().splitlines(), 1):
            name, _, rest = line.partition("\t")
            wnid, path = rest.partition("\t")[0], self.data_dir / "val" / "images" / name
            if wnid not in labels or not path.is_file():
                wrong = (
                    f"the class {wnid!r}, which train/ has not"
                    if path.is_file()
                    else f"{name}, which val/images/ has not"
                )
                raise ConfigurationError(
                    f"data: line {number} of {self._annotations} has {wrong}; expected {LAYOUT}"
                )
            found.append((path, labels[wnid]))
        if not found:
            raise ConfigurationError(f"data: {self._annotations} names no image; expected {LAYOUT}")
        return found

    def _names(self) -> list[str]:
        words = self.data_dir / "words.txt"
        lines = words.read_text().splitlines() if words.is_file() else []
        known = dict(line.split("\t", 1) for line in lines if "\t" in line)
        return [known.get(wnid, wnid).split(",")[0] for wnid in self._wnids]
