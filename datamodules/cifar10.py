"""CIFAR-10, from torchvision's files or from class folders."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from PIL import Image

from fl_lightning.datamodules.class_folders import ClassFolders
from fl_lightning.datamodules.decoding import square
from fl_lightning.datamodules.image_cache import building
from fl_lightning.datamodules.image_files import ImageFiles
from fl_lightning.datamodules.images import ImageData
from fl_lightning.errors import ConfigurationError
from fl_lightning.randomness import generator


class CIFAR10(ImageFiles):
    """60,000 colour images of 32x32 pixels in 10 classes (Krizhevsky 2009): 50,000 for training, 10,000 for testing.

    They are read from ``data_dir/cifar-10-batches-py``, torchvision's place, or from class folders
    ``data_dir/train/<class>/*`` and ``data_dir/test/<class>/*``, which are decoded once into a cache that is checked
    against the files and its own checksum at every start. Nothing is downloaded unless ``download`` is set. Mean and
    standard deviation of the normalisation are those of the training images.

    Args:
        data_dir: The folder that holds one of the two.
        download: Fetch the data set with torchvision (170 MB) into ``data_dir`` where neither is there.
        image_size: Height and width in pixels to which the images are resized, for reduced runs; 32 leaves them.
        num_clients: Number of clients, 5 in the FixBN paper.
        crop_padding: Black border in pixels for random crops, 0 for no crops; FixBN pads by 2, FedTAN by 4.
        horizontal_flip: Whether training images are flipped with probability 1/2.
        **settings: The others of :class:`~fl_lightning.datamodules.image_files.ImageFiles`.

    Raises:
        ConfigurationError: The data are not there or damaged, or a setting is out of its range.
    """

    num_classes = 10
    class_names = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
    )  # fmt: skip

    def __init__(
        self,
        data_dir: str = "data/cifar10",
        download: bool = False,
        image_size: int = 32,
        num_clients: int = 5,
        *,
        crop_padding: int = 2,
        horizontal_flip: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(
            data_dir,
            image_size,
            num_clients=num_clients,
            crop_padding=crop_padding,
            horizontal_flip=horizontal_flip,
            **settings,
        )
        self.download = download
        self.folders = self._class_folders()
        if self.folders is None and not download and not self._pickles.is_dir():
            raise ConfigurationError(
                f"data_dir={self.data_dir} holds neither cifar-10-batches-py/ nor train/; set download: true to fetch "
                "CIFAR-10 (170 MB), or data_dir to where it lies as torchvision's files or as train/<class>/*.jpg and "
                "test/<class>/*.jpg"
            )

    def prepare_data(self) -> None:
        """Download the data set where that is asked for and needed; build the cache of decoded images.

        Nothing once they are in memory.
        """
        if self.clients:
            return
        if self.folders is not None:
            self.load()
        elif self.download:
            self._torchvision_files(download=True)

    def load(self) -> ImageData:
        """Read the images.

        Raises:
            ConfigurationError: A file cannot be read or is damaged.
        """
        if self.folders is not None:
            return self.read(*self.folders.samples(self.class_names, generator(self.seed, "test split")))
        train, test = self._torchvision_files(download=False)
        return ImageData(*self._tensors(train), *self._tensors(test))

    @property
    def _pickles(self) -> Path:
        return self.data_dir / "cifar-10-batches-py"

    @property
    def _train(self) -> Path:
        return self.data_dir / "train"

    def _class_folders(self) -> ClassFolders | None:
        if self._pickles.is_dir() or not self._train.is_dir():
            return None
        folders = ClassFolders(self.data_dir)
        if folders.classes != list(self.class_names):
            raise ConfigurationError(
                f"data_dir={self.data_dir} has the class folders {', '.join(folders.classes[:12])} in train/; those of "
                f"CIFAR-10 are {', '.join(self.class_names)}; use ImageFolder for other images"
            )
        return folders

    def _torchvision_files(self, download: bool) -> tuple[Any, Any]:
        from torchvision.datasets import CIFAR10 as Files  # takes seconds to import

        try:
            # of two runs that start together one downloads
            with building(self._pickles) if download else nullcontext():
                train = Files(str(self.data_dir), train=True, download=download)
            return train, Files(str(self.data_dir), train=False)
        except URLError as error:
            raise ConfigurationError(
                f"download: CIFAR-10 could not be fetched ({error.reason}); try again, or unpack it into "
                f"{self.data_dir} by hand"
            ) from error
        except (RuntimeError, EOFError, OSError) as error:
            instead = "to read train/ instead" if self._train.is_dir() else "and set download: true"
            raise ConfigurationError(
                f"data_dir={self.data_dir} holds a damaged or incomplete cifar-10-batches-py/ "
                f"({type(error).__name__}); remove it {instead}"
            ) from error

    def _tensors(self, files: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = files.data  # [N, 32, 32, 3]
        if self.image_size != pixels.shape[1]:
            pixels = np.stack(
                [np.asarray(square(Image.fromarray(image), self.image_size)) for image in pixels]
            )
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor(files.targets)
