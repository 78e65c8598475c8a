"""The base of data sets that are read from files once, into a cache."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fl_lightning.datamodules.image_cache import cached_images
from fl_lightning.datamodules.images import ImageData
from fl_lightning.datamodules.in_memory import InMemoryDataModule
from fl_lightning.errors import ConfigurationError

Samples = Sequence[tuple[Path, int]]
"""Image files and the class of each."""


class ImageFiles(InMemoryDataModule):
    """The base of data sets of image files: a subclass sets ``num_classes`` and says in ``load()`` what to :meth:`read`.

    Images become RGB; one that is not of the right size has its shorter side resized to ``image_size`` and is cropped to
    the centre. They are decoded once, into a cache that is checked against the files and its own checksum at every
    start. Mean and standard deviation of the normalisation are those of the training images.

    Args:
        data_dir: The folder of the files.
        image_size: Height and width of the images in pixels.
        cache_dir: Folder of the decoded images; None is ``data/cache`` below the working directory.
        **settings: Those of :class:`~fl_lightning.datamodules.in_memory.InMemoryDataModule`.

    Raises:
        ConfigurationError: A setting is out of its range, or (in ``setup``) an image cannot be read.
    """

    in_channels = 3
    image_size: int

    def __init__(
        self, data_dir: str, image_size: int, *, cache_dir: str | None = None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        if image_size < 1:
            raise ConfigurationError(f"image_size must be at least 1 pixel, found {image_size}")
        self.data_dir, self.image_size = Path(data_dir).expanduser(), image_size
        self.cache_dir = Path("data/cache" if cache_dir is None else cache_dir).expanduser()

    def prepare_data(self) -> None:
        """Build the cache where it is missing or out of date; nothing once the data are in memory."""
        if not self.clients:
            self.load()

    def cache_file(self, kind: str) -> Path:
        """Where the decoded images lie.

        Args:
            kind: What else than the files decides about them.
        """
        place = hashlib.sha256(str(self.data_dir.resolve()).encode()).hexdigest()[:8]
        return self.cache_dir / f"{self.data_dir.resolve().name}-{kind}-{place}.pt"

    def read(
        self,
        train: Samples,
        test: Samples,
        train_groups: Sequence[int] | None = None,
        test_groups: Sequence[int] | None = None,
        group_names: Sequence[str] = (),
    ) -> ImageData:
        """Read images, from the cache where it is up to date.

        Args:
            train: The training images, files below ``data_dir``.
            test: The test images.
            train_groups: For data that come in groups, the group of each training image.
            test_groups: The group of each test image.
            group_names: What group g is called.

        Raises:
            ConfigurationError: An image cannot be read.
        """
        samples, count = [*train, *test], len(train)
        cache = self.cache_file(f"{self.image_size}px")
        images = cached_images([path for path, _ in samples], self.data_dir, self.image_size, cache)
        labels = torch.tensor([label for _, label in samples])
        return ImageData(
            images[:count],
            labels[:count],
            images[count:],
            labels[count:],
            None if train_groups is None else torch.tensor(train_groups),
            None if test_groups is None else torch.tensor(test_groups),
            group_names,
        )
