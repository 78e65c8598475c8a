"""Any image classification data set in class folders."""

from pathlib import Path

from datamodules.class_folders import ClassFolders
from datamodules.images import ImageData
from datamodules.in_memory import InMemoryDataModule
from datamodules.partitions import Partition
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
        num_clients: Number of clients.
        batch_size: Samples in a client's batch.
        partition: How the training data are spread over the clients; None is ``IID()``.
        val_fraction: Share of the training data, in [0, 1), for the server's validation set.
        eval_batch_size: Samples in a batch of the server's evaluation.
        crop_padding: Black border in pixels for random crops, 0 for no crops.
        horizontal_flip: Whether training images are flipped with probability 1/2.
        seed: Seed of everything random about the data.
        max_examples: Use only that many training images, every class in proportion; None for all.
        cache_dir: Folder of the decoded images; None is ``data/cache`` below the working directory.

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
        num_clients: int = 10,
        batch_size: int = 20,
        partition: Partition | None = None,
        val_fraction: float = 0.0,
        eval_batch_size: int = 500,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        seed: int = 0,
        max_examples: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            num_clients=num_clients,
            batch_size=batch_size,
            partition=partition,
            val_fraction=val_fraction,
            eval_batch_size=eval_batch_size,
            crop_padding=crop_padding,
            horizontal_flip=horizontal_flip,
            seed=seed,
            max_examples=max_examples,
        )
        if image_size < 1:
            raise ConfigurationError(f"image_size must be at least 1 pixel, found {image_size}")
        self.data_dir = Path(data_dir).expanduser()
        self.image_size = image_size
        self.cache_dir = Path("data/cache" if cache_dir is None else cache_dir).expanduser()
        self.folders = ClassFolders(self.data_dir)
        self.class_names = self.folders.classes
        self.num_classes = len(self.class_names)

    def prepare_data(self) -> None:
        """Build the cache of decoded images where it is missing or out of date."""
        self.load()

    def load(self) -> ImageData:
        """Read the images, from the cache where it is up to date.

        Raises:
            ConfigurationError: An image cannot be read, a class has no training image, or there is no test
                image.
        """
        return self.folders.read(self.image_size, self.cache_dir)
