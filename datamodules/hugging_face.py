"""Image classification data sets of Hugging Face's ``datasets``, read from disk."""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from io import BytesIO
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.datamodules.class_folders import wrong_layout
from fl_lightning.datamodules.image_cache import cached_tensors
from fl_lightning.datamodules.image_files import ImageFiles, decode, stacked, value_range
from fl_lightning.datamodules.images import ImageData
from fl_lightning.errors import ConfigurationError

LAYOUT = "what DatasetDict.save_to_disk writes, or the parquet files of a data set (<split>*.parquet or data/<split>*.parquet)"


class HuggingFaceImages(ImageFiles):
    """Labelled images of Hugging Face's ``datasets``: a ``save_to_disk`` folder or parquet files.

    Install ``fl_lightning[hf]`` first. To download a data set, call
    ``datasets.load_dataset("user/name").save_to_disk(data_dir)`` once. With the partition
    ``Natural``, each value of ``group_column`` (a writer, a hospital) is a client.

    Args:
        data_dir: The folder of the data set.
        image_size: Height and width of the images in pixels.
        image_column: Name of the column of images. Default: the only column of type ``Image``.
        label_column: Name of the column of labels. Default: the only column of type ``ClassLabel``.
            In a column of another type, every distinct value is a class. The classes are sorted.
        group_column: Name of the column of groups. None: no groups.
        subject_column: Name of the column of subjects, such as patients. All images of a subject
            stay together, as in :class:`~fl_lightning.datamodules.tensors.TensorData`.
        train_split: Name of the training split.
        test_split: Name of the test split.
        **settings: Settings of :class:`~fl_lightning.datamodules.image_files.ImageFiles`.

    Raises:
        ConfigurationError: ``datasets`` is not installed, the folder is missing or has another
            layout, or a column is missing. In ``setup``: an image cannot be read.
    """

    num_classes: int

    def __init__(
        self,
        data_dir: str,
        image_size: int,
        *,
        image_column: str | None = None,
        label_column: str | None = None,
        group_column: str | None = None,
        subject_column: str | None = None,
        train_split: str = "train",
        test_split: str = "test",
        **settings: Any,
    ) -> None:
        super().__init__(data_dir, image_size, **settings)
        try:
            from datasets import ClassLabel, Image
        except ImportError as error:
            raise ConfigurationError(
                "data: HuggingFaceImages needs the package datasets; pip install 'fl_lightning[hf]'"
            ) from error
        self._splits = {"train": train_split, "test": test_split}
        columns = self._open(train_split).features
        self._image = self._column("image_column", image_column, columns, Image)
        self._label = self._column("label_column", label_column, columns, ClassLabel)
        self._group = None
        if group_column is not None:
            self._group = self._column("group_column", group_column, columns, None)
        self._subject = None
        if subject_column is not None:
            self._subject = self._column("subject_column", subject_column, columns, None)
            self._subject_setting = f"data.subject_column {self._subject}"
        if isinstance(columns[self._label], ClassLabel):
            self.class_names = list(columns[self._label].names)
            self._labels = [
                torch.tensor([-1 if label is None else label for label in values])
                for values in self._values(self._label)
            ]
        else:
            self.class_names, self._labels = self._numbered(self._label)
        self.num_classes = len(self.class_names)

    def load(self) -> ImageData:
        """Return the images, from the cache if it is valid."""
        files = [file for split in self._splits.values() for file in self._files(split)]
        kind = "-".join((*self._splits.values(), self._image, f"{self.image_size}px"))
        settings = str(self.pixel_range)
        images = cached_tensors(files, self.data_dir, self.cache_file(kind), self._read, settings)
        self.use_range(images["pixels"].tolist())
        labels, test_labels = self._labels
        data = ImageData(images["train"], labels, images["test"], test_labels)
        if self._subject is not None:
            names, numbers = self._numbered(self._subject)
            data = replace(data, subjects=[names[x] for x in torch.cat(numbers).tolist()])
        if self._group is None:
            return data
        names, (groups, test_groups) = self._numbered(self._group)
        return replace(data, train_groups=groups, test_groups=test_groups, group_names=names)

    def _files(self, split: str) -> list[Path]:
        patterns = "{}/*.arrow", "{}.parquet", "{}-*.parquet", "{}/*.parquet", "data/{}-*.parquet"
        listed = (sorted(self.data_dir.glob(pattern.format(split))) for pattern in patterns)
        files = next(filter(None, listed), [])
        if not files:
            expected = f"{LAYOUT}: set data_dir, train_split and test_split"
            raise wrong_layout(self.data_dir, split, expected)
        return files

    def _open(self, split: str, columns: list[str] | None = None) -> Any:
        """Open a split.

        Args:
            split: Name of the split.
            columns: Columns to read from parquet files. Default: no column.
        """
        import datasets
        from pyarrow import parquet

        files = self._files(split)
        try:
            if files[0].suffix == ".arrow":
                return datasets.load_from_disk(str(files[0].parent))
            if columns is None:
                return datasets.Dataset(parquet.read_schema(files[0]).empty_table())
            return datasets.Dataset(parquet.read_table(files, columns=columns))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(
                f"data: {split} of {self.data_dir} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}); expected "
                f"{LAYOUT}"
            ) from error

    def _column(self, setting: str, given: str | None, columns: Any, feature: Any) -> str:
        fitting: list[str] = [name for name in columns if given in (None, name)]
        if given is None:
            fitting = [name for name in fitting if isinstance(columns[name], feature)]
        if len(fitting) != 1:
            raise ConfigurationError(
                f"{setting}: {given!r} is no column, or several columns fit; set one of {', '.join(columns)}"
            )
        return fitting[0]

    def _values(self, column: str) -> list[list[Any]]:
        return [list(self._open(split, [column])[column]) for split in self._splits.values()]

    def _numbered(self, column: str) -> tuple[list[str], list[Tensor]]:
        """Replace the values of a column by numbers.

        Returns:
            The distinct values, sorted, and the number of each sample. This number is the position
            of the sample's value. Training and test samples have separate tensors of numbers.
        """
        parts = self._values(column)
        for value in (value for part in parts for value in part):
            missing = value is None or (isinstance(value, float) and isnan(value))
            if missing or not isinstance(value, Hashable):
                raise ConfigurationError(
                    f"data: the column {column!r} of {self.data_dir} has the value {str(value)[:40]}, which is no valid value; choose another "
                    "column, or leave these samples out"
                )
        values = sorted({value for part in parts for value in part}, key=lambda x: (type(x).__name__, x))
        number = {value: index for index, value in enumerate(values)}
        return [str(value) for value in values], [torch.tensor([number[x] for x in part]) for part in parts]

    def _read(self) -> dict[str, Tensor]:
        pixels = self.pixel_range or value_range(self._encoded(self._splits["train"]))
        images = {"pixels": torch.tensor(pixels)}
        for kind, split in self._splits.items():
            files = (
                decode(file, self.image_size, name, pixels or None) for file, name in self._encoded(split)
            )
            images[kind] = stacked(files, len(self._open(split, [self._image])), 3, self.image_size)
        return images

    def _encoded(self, split: str) -> Iterator[tuple[Path | BytesIO, str]]:
        """Return the files of a split's images, and their names in messages."""
        from datasets import Image

        part = self._open(split, [self._image]).select_columns(self._image)
        try:
            files = part.cast_column(self._image, Image(decode=False))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ConfigurationError(
                f"image_column: {self._image!r} holds no images; set the column of images"
            ) from error

        for index, row in enumerate(files):
            encoded = row[self._image] or {"bytes": b"", "path": None}
            file = Path(encoded["path"]) if encoded["bytes"] is None else BytesIO(encoded["bytes"])
            yield file, f"image {index} of {split} in {self.data_dir}"
