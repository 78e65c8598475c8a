"""Any image classification data set in class folders."""

from pathlib import Path
from typing import Any

from datamodules.class_folders import ClassFolders
from datamodules.images import ImageData
from datamodules.in_memory import InMemoryDataModule
from fl_lightning.errors import ConfigurationError


class ImageFolder(InMemoryDataModule):
    """Images in class folders: ``train/<class>/*.jpg`` and ``test/<class>/*.jpg``.

    Where there is no ``test/``, ``val/`` is the test set. The classes are the folders of ``train`` in
    alphabetical order. Images become RGB; one that is not of the right size has its shorter side resized to
    ``image_size`` and is cropped to the centre. They are decoded once, into a cache that is checked against
    the files and its own checksum at every start. Mean and standard deviation of the normalisation are those
    of the training images.

    Args:
        data_dir: The folder that holds ``train`` and ``test``.
        image_size: Height and width of the images in pixels.
        cache_dir: Folder of the decoded images; None is ``data/cache`` below the working directory.
        **settings: Those of :class:`~datamodules.in_memory.InMemoryDataModule`.

    Raises:
        ConfigurationError: The folder is missing or laid out otherwise, a setting is out of its range, or (in
            ``setup``) an image cannot be read.
    """

    in_channels = 3
    image_size: int
    num_classes: int

    def __init__(
        self,
        data_dir: str,
        image_size: int,
        *,
        cache_dir: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if image_size < 1:
            raise ConfigurationError(f"image_size must be at least 1 pixel, found {image_size}")
        self.data_dir = Path(data_dir).expanduser()
        self.image_size = image_size
        self.cache_dir = Path("data/cache" if cache_dir is None else cache_dir).expanduser()
        self.folders = ClassFolders(self.data_dir)
        self.class_names = self.folders.classes
        self.num_classes = len(self.class_names)

    def prepare_data(self) -> None:
        """Build the cache of decoded images where it is missing or out of date; nothing once they are in memory."""
        if not self.clients:
            self.load()

    def load(self) -> ImageData:
        """Read the images, from the cache where it is up to date.

        Raises:
            ConfigurationError: An image cannot be read, a class has no training image, or there is no test
                image.
        """
        return self.folders.read(self.image_size, self.cache_dir)
