"""Street scenes with a label per pixel, in the layout of Cityscapes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import datasets

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.client_data.fingerprint import files_digest
from fl_lightning.client_data.preprocessing import channel_normalization
from fl_lightning.datamodules.class_folders import subfolders, wrong_layout
from fl_lightning.datamodules.images import Batch
from fl_lightning.datamodules.streamed import (
    IGNORED,
    UNKNOWN,
    LabelledImages,
    Pair,
    StreamedClient,
    augmentation,
)
from fl_lightning.errors import ConfigurationError, check_at_least

LAYOUT = (
    "leftImg8bit/<split>/<city>/<name>_leftImg8bit.png and gtFine/<split>/<city>/<name>_gtFine_labelIds.png"
)
_CLASSES = {
    kind.id: (kind.name, kind.color) for kind in datasets.Cityscapes.classes if not kind.ignore_in_eval
}
"""Name and colour of each of the 19 evaluated classes. The keys are label ids."""


def _labels() -> Tensor:
    """Return a lookup table from label id to class.

    Ids up to 33 that have no class get the label that metrics ignore. So does 255, which is the id
    -1 stored as a byte.
    """
    labels = torch.full((256,), UNKNOWN, dtype=torch.uint8)
    labels[:34] = labels[255] = IGNORED
    labels[list(_CLASSES)] = torch.arange(len(_CLASSES), dtype=torch.uint8)
    return labels


class Cityscapes(FederatedDataModule):
    """Street scenes in 19 classes (Cordts et al. 2016); a client is a city or a user of a split file.

    Download leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from Cityscapes' site, which
    asks for a registration. Unpack both into ``data_dir``. Images are read from disk one batch at a
    time. The evaluation data are the split ``val``, because the labels of ``test`` are not public.
    The setting ``evaluation_cities`` replaces ``val``.

    Args:
        data_dir: The folder that holds ``leftImg8bit`` and ``gtFine``.
        split_file: JSON file of the clients, or a folder of such files, in FedDrive's layout:
            ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``. ``x`` are paths
            below ``leftImg8bit``, and ``y`` are paths below ``gtFine``. Default: each city of
            ``train`` is a client.
        evaluation_cities: Cities of ``train`` that serve as evaluation data instead of ``val``.
            They are not clients.
        batch_size: Number of images in a client's batch. The FixBN paper uses 8.
        image_size: Height and width to which images and masks are resized before augmentation.
            None: no resizing.
        crop_size: Height and width of random crops. The FixBN paper uses (768, 768). None: no
            crops.
        scale: Smallest and largest factor of the random scaling of training images. Images are
            scaled before they are cropped.
        horizontal_flip: Whether each training image is mirrored with probability 1/2.
        color_jitter: Strength of the jitter of brightness, contrast and saturation. FedDrive uses
            0.4. 0: no jitter.
        eval_batch_size: Number of images in a batch of the evaluation.
        threads: Number of threads that read the images of a batch. Results do not depend on this
            number.
        mean: Mean of each channel, in [0, 1].
        std: Standard deviation of each channel.
        seed: Seed of the data order and the augmentation.

    Raises:
        ConfigurationError: The folder or a file is missing, a file cannot be read, or a setting is
            out of its range.
    """

    num_classes = len(_CLASSES)
    class_names = tuple(name for name, _ in _CLASSES.values())
    palette = tuple(colour for _, colour in _CLASSES.values())
    in_channels = 3
    fit_split = "test"

    deciding_files = ("split_file",)

    def __init__(
        self,
        data_dir: str = "data/cityscapes",
        split_file: str | None = None,
        evaluation_cities: Sequence[str] = (),
        batch_size: int = 8,
        image_size: tuple[int, int] | None = None,
        crop_size: tuple[int, int] | None = None,
        scale: tuple[float, float] = (1.0, 1.0),
        horizontal_flip: bool = False,
        color_jitter: float = 0.0,
        eval_batch_size: int = 4,
        threads: int = 1,
        mean: tuple[float, float, float] = (0.5, 0.5, 0.5),
        std: tuple[float, float, float] = (0.5, 0.5, 0.5),
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed)
        check_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size, threads=threads)
        if not 0 < scale[0] <= scale[1]:
            raise ConfigurationError(f"scale must be two factors such as [0.5, 1.5], found {list(scale)}")
        self.data_dir = Path(data_dir).expanduser()
        if not (self.data_dir / "leftImg8bit" / "train").is_dir():
            expected = f"the layout {LAYOUT}: unpack the data set there, or set data_dir to its folder"
            raise wrong_layout(self.data_dir, "leftImg8bit/train/", expected)
        self.split_file, self.batch_size, self.eval_batch_size = split_file, batch_size, eval_batch_size
        if evaluation_cities:
            self._draws_test = True
        self.evaluation_cities, self.threads = list(evaluation_cities), threads
        self._image_size = image_size
        self._augmentation = crop_size, scale, horizontal_flip, color_jitter
        self._reading: dict[str, Any] = {"normalize": channel_normalization(mean, std), "threads": threads}

    def setup(self, stage: str) -> None:
        """List the files at the first call, and check the masks.

        Raises:
            ConfigurationError: An image has no mask, or an image of the split file is evaluation data.
        """
        if self._clients:
            return
        cities = self._cities("train")
        if unknown := sorted(set(self.evaluation_cities) - set(cities)):
            raise ConfigurationError(
                f"evaluation_cities: {unknown[0]!r} is not a city of train; use {', '.join(cities)}"
            )
        clients = {city: pairs for city, pairs in cities.items() if city not in self.evaluation_cities}
        if self.split_file is not None:
            clients = self._users(Path(self.split_file).expanduser())
        held_out = [cities[city] for city in self.evaluation_cities] or self._cities("val").values()
        evaluated = [pair for pairs in held_out for pair in pairs]
        if twice := sorted(
            {pair[0] for pairs in clients.values() for pair in pairs} & {x[0] for x in evaluated}
        ):
            raise ConfigurationError(
                f"split_file: {twice[0]} is also evaluation data; leave it out of the split file, or its city out of "
                "evaluation_cities"
            )
        augment = augmentation(*self._augmentation)
        shares = [self._images(pairs, augment) for pairs in clients.values()]
        self._clients = [StreamedClient(share, self.batch_size) for share in shares]
        self.evaluation_images = self._images(evaluated, None)
        self.client_names = list(clients)
        self.note_small_clients([*map(len, clients.values())], self.batch_size)
        files = sorted({path for pair in sum(clients.values(), evaluated) for path in pair})
        self.loaded = files_digest(files, self.data_dir)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the evaluation data."""
        return DataLoader(self.evaluation_images, batch_size=self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the evaluation data."""
        return self.val_dataloader()

    def describe_partition(self) -> str:
        """Return the number and kind of the clients, such as ``"18 cities, one client each"``."""
        kind = "cities" if self.split_file is None else f"users of {Path(self.split_file).name}"
        return f"{self.num_clients} {kind}, one client each"

    def picture(self, inputs: Tensor) -> Tensor:
        """Return a normalised image ``[3, H, W]`` as uint8 ``[H, W, 3]``."""
        return self.evaluation_images.picture(inputs)

    def _images(self, pairs: Sequence[Pair], augment: Any) -> LabelledImages:
        return LabelledImages(pairs, _labels(), self._image_size, augment, **self._reading)

    def _cities(self, split: str) -> dict[str, list[Pair]]:
        images = self.data_dir / "leftImg8bit" / split
        cities = {
            city: [self._pair(path) for path in sorted((images / city).glob("*_leftImg8bit.png"))]
            for city in subfolders(images)
        }
        if not any(cities.values()):
            raise wrong_layout(self.data_dir, f"image in leftImg8bit/{split}/", LAYOUT)
        return {city: pairs for city, pairs in cities.items() if pairs}

    def _pair(self, image: Path, mask: Path | None = None) -> Pair:
        if mask is None:
            name = image.name.replace("_leftImg8bit", "_gtFine_labelIds")
            mask = self.data_dir / "gtFine" / image.parent.relative_to(self.data_dir / "leftImg8bit") / name
        for path in (image, mask):
            if not path.is_file():
                raise ConfigurationError(f"data: {path} is missing; expected {LAYOUT}")
        return image, mask

    def _users(self, path: Path) -> dict[str, list[Pair]]:
        files: dict[str, list[tuple[str, str]]] = {}
        try:
            for part in sorted(path.glob("*.json")) if path.is_dir() else [path]:
                data = json.loads(part.read_text())["user_data"]
                files |= {user: list(zip(xy["x"], xy["y"], strict=True)) for user, xy in data.items()}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"split_file: {part} cannot be read ({type(error).__name__}: {error}); expected FedDrive's layout, "
                '{"user_data": {user: {"x": [...], "y": [...]}}} with as many x as y'
            ) from error
        if not files:
            raise ConfigurationError(f"split_file: {path} names no user; expected FedDrive's all_data_*.json")
        images, masks = self.data_dir / "leftImg8bit", self.data_dir / "gtFine"
        return {user: [self._pair(images / x, masks / y) for x, y in pairs] for user, pairs in files.items()}
