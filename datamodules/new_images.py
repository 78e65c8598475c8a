"""New images for a trained model, read from a folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.client_data.raw_inputs import NewSamples
from fl_lightning.datamodules.class_folders import ClassImages, image_names, subfolders
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
    targets, files = None, [path / name for name in image_names(path)]
    if labelled:
        if unknown := sorted({*subfolders(path)}.difference(classes)):
            raise ConfigurationError(
                f"{path}: the folder {unknown[0]} is no class of the run; its classes are {', '.join(classes)}"
            )
        images = ClassImages(path, classes)
        files, targets = [file for file, _ in images.samples()], images.labels
    if not files:
        layout = "a folder for each class" if labelled else "images"
        raise ConfigurationError(f"{path} holds no images to read; give a folder with {layout}")
    places = [str(file.relative_to(path)) for file in files]
    return NewSamples("file", places, lambda part: torch.stack([read(x) for x in files[part]]), targets)
