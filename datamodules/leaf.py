"""FEMNIST in the layout of LEAF (Caldas et al., arXiv 1812.01097)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.datamodules.class_folders import wrong_layout
from fl_lightning.datamodules.image_cache import cached_tensors
from fl_lightning.datamodules.image_files import ImageFiles
from fl_lightning.datamodules.images import ImageData
from fl_lightning.datamodules.partitions import Natural
from fl_lightning.errors import ConfigurationError

LAYOUT = 'train/*.json and test/*.json, each {"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}'


class FEMNIST(ImageFiles):
    """FEMNIST: handwritten digits and letters, greyscale 28x28, 62 classes; a writer is a client.

    Create the files with LEAF's ``./preprocess.sh -s niid --sf 1.0 -k 0 -t sample``. The files have
    about 3,500 writers. This class does not download the files. LEAF's files contain the first
    image of most writers twice. So this class drops exact duplicates among a writer's training
    images, and among its test images. A white pixel has the value 1 in LEAF. A client is evaluated
    on its writer's test images. The server is evaluated on the test images of all writers.

    Args:
        data_dir: The folder that holds ``train`` and ``test``.
        min_examples: Minimum number of training images of a writer. Writers with fewer images are
            dropped.
        **settings: Settings of :class:`~fl_lightning.datamodules.image_files.ImageFiles`.

    Raises:
        ConfigurationError: The folder is missing or has another layout. In ``setup``: a file cannot
            be read or is not in LEAF's layout, or no writer has enough images.
    """

    num_classes = 62
    class_names = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    in_channels = 1
    image_size = 28
    default_partition = Natural

    def __init__(self, data_dir: str = "data/femnist", min_examples: int = 1, **settings: Any) -> None:
        super().__init__(data_dir, 28, **settings)
        self.min_examples = min_examples
        self.files = {split: sorted((self.data_dir / split).glob("*.json")) for split in ("train", "test")}
        for split, files in self.files.items():
            if not files:
                raise wrong_layout(self.data_dir, f"{split}/*.json", f"LEAF's layout, {LAYOUT}")

    def load(self) -> ImageData:
        """Return the images, from the cache if it is valid."""
        paths = [path for files in self.files.values() for path in files]
        tensors = cached_tensors(paths, self.data_dir, self.cache_file("leaf"), self._read)
        names = "images", "labels", "writers"
        parts = [[tensors[f"{split} {name}"] for name in names] for split in ("train", "test")]
        sizes = parts[0][2].bincount(minlength=int(max(writers.max() for *_, writers in parts)) + 1)
        large = sizes >= max(self.min_examples, 1)
        if not bool(large.any()):
            raise ConfigurationError(
                f"min_examples={self.min_examples} leaves no writer; use at most {int(sizes.max())}, the most images of a writer"
            )
        kept = ([tensor[large[part[2]]] for tensor in part] for part in parts)
        (images, labels, writers), (test_images, test_labels, test_writers) = kept
        return ImageData(images, labels, test_images, test_labels, writers, test_writers)

    def _read(self) -> dict[str, Tensor]:
        parts: dict[str, list[tuple[Any, Any, str]]] = {
            split: [writer for path in files for writer in _writers(path)]
            for split, files in self.files.items()
        }
        everyone = sorted({name for part in parts.values() for *_, name in part})
        number = {name: index for index, name in enumerate(everyone)}
        tensors: dict[str, Tensor] = {}
        for split, writers in parts.items():
            images, labels, names = zip(*sorted(writers, key=lambda writer: writer[2]), strict=True)
            tensors[f"{split} images"] = torch.from_numpy(np.concatenate(images)).view(-1, 1, 28, 28)
            tensors[f"{split} labels"] = torch.from_numpy(np.concatenate(labels))
            sizes = torch.tensor([len(x) for x in labels])
            tensors[f"{split} writers"] = torch.tensor([number[x] for x in names]).repeat_interleave(sizes)
        return tensors


def _writers(path: Path) -> Iterator[tuple[Any, Any, str]]:
    """Yield each writer's images, labels and name, without duplicate images.

    Images are uint8, ``[n, 784]``. Labels have the shape ``[n]``.
    """
    try:
        data = json.loads(path.read_text())["user_data"]
        for name, samples in data.items():
            x, y = (np.asarray(samples[key], dtype=np.float64) for key in ("x", "y"))
            if x.shape != (len(y), 784) or not len(y) or x.min() < 0 or x.max() > 1:
                raise ValueError(
                    f"user {name} has x of shape {x.shape} for {len(y)} labels, expected 784 values in [0, 1] each"
                )
            if (y != y.round()).any():
                raise ValueError(f"user {name} has labels that are no whole numbers")
            pixels, labels = (x * 255).round().astype(np.uint8), y.astype(np.int64)
            _, first = np.unique(np.column_stack([pixels, labels]), axis=0, return_index=True)
            first.sort()
            yield pixels[first], labels[first], name
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"data: {path} cannot be read as one of LEAF's files ({type(error).__name__}: {error}); expected {LAYOUT}"
        ) from error
