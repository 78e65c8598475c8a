"""New images for a trained model, read from a folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.client_data.new_samples import NewSamples
from fl_lightning.datamodules.class_folders import find_images, subfolders
from fl_lightning.errors import ConfigurationError


def new_images(
    path: Path, classes: Sequence[str], labelled: bool, read: Callable[[Path], Tensor]
) -> NewSamples:
    """Return the images of a folder and its subfolders.

    Args:
        path: The folder.
        classes: Names of the classes.
        labelled: Whether the folder holds a folder for each class.
        read: Function that returns the raw image ``[C, H, W]`` of a file.

    Raises:
        ConfigurationError: There is no image, or a folder is no class.
    """
    if labelled and (unknown := sorted({*subfolders(path)}.difference(classes))):
        raise ConfigurationError(
            f"{path}: the folder {unknown[0]} is no class of the run; its classes are {', '.join(classes)}"
        )
    images = find_images(path, classes if labelled else [""])
    if not len(images):
        layout = "a folder for each class" if labelled else "images"
        raise ConfigurationError(f"{path} holds no images to read; give a folder with {layout}")
    files = [file for file, _ in images.samples()]
    places = [str(file.relative_to(path)) for file in files]
    targets = images.labels if labelled else None
    return NewSamples("file", places, lambda part: torch.stack([read(x) for x in files[part]]), targets)
