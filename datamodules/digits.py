"""scikit-learn's handwritten digits: real images without a download."""

import torch

from fl_lightning.datamodules.images import ImageData, balanced_subset
from fl_lightning.datamodules.in_memory import InMemoryDataModule
from fl_lightning.randomness import generator


class Digits(InMemoryDataModule):
    """Handwritten digits of scikit-learn: 1,797 greyscale images of 8x8 pixels in 10 classes.

    Pixels have values 0 to 16. There are 1,438 training and 359 test images. The split is
    stratified and the same for every seed. The data need no download. For the settings, see
    :class:`~fl_lightning.datamodules.in_memory.InMemoryDataModule`.
    """

    num_classes = 10
    class_names = tuple("0123456789")
    in_channels = 1
    image_size = 8
    scale = 16.0

    def load(self) -> ImageData:
        """Read the images from scikit-learn and split off the test set."""
        from sklearn.datasets import load_digits  # this import takes seconds

        digits = load_digits()
        images = torch.from_numpy(digits.images).to(torch.uint8)[:, None]
        labels = torch.from_numpy(digits.target).to(torch.int64)
        is_test = torch.zeros(len(labels), dtype=torch.bool)
        is_test[balanced_subset(labels, round(0.2 * len(labels)), generator(0, "digits test split"))] = True
        return ImageData(images[~is_test], labels[~is_test], images[is_test], labels[is_test])
