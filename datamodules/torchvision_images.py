"""Image classification data sets of torchvision. CIFAR-10 can also be read from class folders."""

from inspect import signature
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets

from fl_lightning.datamodules.image_cache import building
from fl_lightning.datamodules.image_files import converted, square, stacked
from fl_lightning.datamodules.image_folders import ImageFolder
from fl_lightning.datamodules.images import ImageData
from fl_lightning.datamodules.in_memory import InMemoryDataModule
from fl_lightning.errors import ConfigurationError, check_at_least


class TorchvisionImages(InMemoryDataModule):
    """A labelled data set of ``torchvision.datasets`` with a training and a test part.

    The shorter side of an image is resized to ``image_size``, and the centre is cropped. Images are
    normalised by the mean and standard deviation of the training images.

    Args:
        dataset: Name of the class, such as ``"SVHN"``. Its constructor must have an argument
            ``train`` or ``split``.
        num_classes: Number of classes.
        data_dir: The folder that torchvision calls ``root``.
        download: Whether missing files are downloaded into ``data_dir``.
        image_size: Height and width of the images in pixels.
        in_channels: 3 for RGB, 1 for greyscale.
        **settings: Settings of :class:`~fl_lightning.datamodules.in_memory.InMemoryDataModule`.

    Raises:
        ConfigurationError: The data set is unknown, its files are missing or damaged, or a setting
            is out of its range.
    """

    num_classes: int
    in_channels: int
    image_size: int

    def __init__(
        self,
        dataset: str,
        num_classes: int,
        data_dir: str = "data/torchvision",
        download: bool = False,
        image_size: int = 32,
        in_channels: int = 3,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_at_least(1, image_size=image_size)
        if in_channels not in (1, 3):
            raise ConfigurationError(f"in_channels must be 1 or 3, found {in_channels}")
        self.dataset, self.num_classes, self.download = dataset, num_classes, download
        self.data_dir, self.image_size = Path(data_dir).expanduser(), image_size
        self.in_channels = in_channels
        if not download:
            self._check_files()

    def prepare_data(self) -> None:
        """Download missing files if ``download`` is set."""
        if self.download and not self.clients:
            with building(self.data_dir / self.dataset):  # only one of two concurrent runs downloads
                self._files(0, download=True), self._files(1, download=True)

    def load(self) -> ImageData:
        """Return the images."""
        return ImageData(*self._tensors(self._files(0)), *self._tensors(self._files(1)))

    def _check_files(self) -> None:
        self._files(0)

    def _files(self, part: int, download: bool = False) -> Any:
        """Open the training (0) or test (1) part, and download missing files if ``download`` is True."""
        kind: Any = getattr(datasets, self.dataset, None)
        names = signature(kind).parameters if callable(kind) else {}
        if not {"train", "split"} & set(names):
            raise ConfigurationError(
                f"dataset: torchvision.datasets has no {self.dataset!r} with a training and a test part; use MNIST, SVHN, STL10, ..."
            )
        which = {"train": part == 0, "split": ("train", "test")[part], "download": download}
        which.pop("split" if "train" in names else "train")
        try:
            return kind(str(self.data_dir), **{name: x for name, x in which.items() if name in names})
        except URLError as error:
            raise ConfigurationError(
                f"download: {self.dataset} could not be fetched ({error.reason}); try again, or put its files into {self.data_dir} by hand"
            ) from error
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise ConfigurationError(
                f"data_dir={self.data_dir} has no {self.dataset}, or a damaged or incomplete one ({str(error).splitlines()[0]}); "
                "set download: true, or data_dir to the folder with torchvision's files"
            ) from error

    def _tensors(self, files: Any) -> tuple[Tensor, Tensor]:
        size, count = self.image_size, len(files)
        if isinstance(files, datasets.CIFAR10) and (size, self.in_channels) == (32, 3):
            return torch.from_numpy(files.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(files.targets)
        mode = "RGB" if self.in_channels == 3 else "L"
        labels = torch.empty(count, dtype=torch.int64)

        def image(index: int) -> Image.Image:
            sample, labels[index] = files[index]
            return square(converted(sample, mode), size)

        return stacked(map(image, range(count)), count, self.in_channels, size), labels


class CIFAR100(TorchvisionImages):
    """CIFAR-100 (Krizhevsky 2009): 50,000 training and 10,000 test images, RGB 32x32, 100 classes.

    Args:
        data_dir: The folder that holds ``cifar-100-python``.
        download: Whether missing files (169 MB) are downloaded into ``data_dir``.
        image_size: Height and width of the images in pixels. Use less than 32 for reduced runs.
        **settings: Settings of :class:`~fl_lightning.datamodules.in_memory.InMemoryDataModule`.
    """

    def __init__(
        self, data_dir: str = "data/cifar100", download: bool = False, image_size: int = 32, **settings: Any
    ) -> None:
        super().__init__("CIFAR100", 100, data_dir, download, image_size, **settings)


class FashionMNIST(TorchvisionImages):
    """Fashion-MNIST (Xiao et al. 2017): images of clothes, greyscale 28x28, in 10 classes.

    There are 60,000 training and 10,000 test images.

    Args:
        data_dir: The folder that holds ``FashionMNIST/raw`` with the four unpacked IDX files.
        download: Whether missing files (31 MB) are downloaded into ``data_dir``.
        image_size: Height and width of the images in pixels.
        **settings: Settings of :class:`~fl_lightning.datamodules.in_memory.InMemoryDataModule`.
    """

    class_names = (
        "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"
    )  # fmt: skip

    def __init__(
        self,
        data_dir: str = "data/fashion_mnist",
        download: bool = False,
        image_size: int = 28,
        **settings: Any,
    ) -> None:
        super().__init__("FashionMNIST", 10, data_dir, download, image_size, in_channels=1, **settings)


class CIFAR10(TorchvisionImages):
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images, RGB 32x32, 10 classes.

    Args:
        data_dir: The folder that holds ``cifar-10-batches-py`` (torchvision's layout), or the class
            folders ``train/<class>`` and ``test/<class>``.
        download: Whether missing files (170 MB) are downloaded into ``data_dir``.
        image_size: Height and width of the images in pixels. Use less than 32 for reduced runs.
        num_clients: Number of clients. The FixBN paper uses 5.
        crop_padding: Width in pixels of the black border for random crops. The FixBN paper uses 2,
            and the FedTAN paper 4. 0: no crops.
        horizontal_flip: Whether training images are flipped with probability 1/2.
        cache_dir: Folder of the decoded images of class folders. None: ``data/cache``.
        **settings: Settings of :class:`~fl_lightning.datamodules.in_memory.InMemoryDataModule`.

    Raises:
        ConfigurationError: The data are missing or damaged, or a setting is out of its range.
    """

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
        cache_dir: str | None = None,
        **settings: Any,
    ) -> None:
        root = Path(data_dir).expanduser()
        self._folders: ImageFolder | None = None
        if (root / "train").is_dir() and not (root / "cifar-10-batches-py").is_dir():
            self._folders = ImageFolder(data_dir, image_size, cache_dir=cache_dir)
            download = False
            if (classes := self._folders.class_names) != list(self.class_names):
                raise ConfigurationError(
                    f"data_dir={root} has the class folders {', '.join(classes[:12])} in train/; those of "
                    f"CIFAR-10 are {', '.join(self.class_names)}; use ImageFolder for other images"
                )
        settings |= {"crop_padding": crop_padding, "horizontal_flip": horizontal_flip}
        super().__init__("CIFAR10", 10, data_dir, download, image_size, num_clients=num_clients, **settings)

    def load(self) -> ImageData:
        """Return the images."""
        return super().load() if self._folders is None else self._folders.load()

    def _check_files(self) -> None:
        if self._folders is None and not (self.data_dir / "cifar-10-batches-py").is_dir():
            raise ConfigurationError(
                f"data_dir={self.data_dir} holds neither cifar-10-batches-py/ nor train/; set download: true to fetch "
                "CIFAR-10 (170 MB), or data_dir to a folder with torchvision's files or with train/<class>/*.jpg and "
                "test/<class>/*.jpg"
            )
