"""scikit-learn's handwritten digits: real images that are installed with the package."""

import torch

from datamodules.images import ImageData, balanced_subset
from datamodules.in_memory import InMemoryDataModule
from datamodules.partitions import Partition
from fl_lightning.randomness import generator


class Digits(InMemoryDataModule):
    """1,797 greyscale images of 8x8 pixels (values 0 to 16) in 10 classes, without any download.

    A fifth of them, every class in proportion and the same for every seed, is the test set: 1,438 training
    and 359 test images.

    Args:
        num_clients: Number of clients.
        batch_size: Samples in a client's batch.
        partition: How the training data are spread over the clients; None is ``IID()``.
        val_fraction: Share of the training data, in [0, 1), for the server's validation set.
        eval_batch_size: Samples in a batch of the server's evaluation.
        crop_padding: Black border in pixels for random crops, 0 for no crops.
        horizontal_flip: Whether training images are flipped with probability 1/2.
        seed: Seed of everything random about the data, the test split excepted.
        max_examples: Use only that many training images, every class in proportion; None for all.
    """

    num_classes = 10
    class_names = tuple("0123456789")
    in_channels = 1
    image_size = 8
    scale = 16.0

    def __init__(
        self,
        num_clients: int = 10,
        batch_size: int = 20,
        partition: Partition | None = None,
        val_fraction: float = 0.0,
        eval_batch_size: int = 500,
        crop_padding: int = 0,
        horizontal_flip: bool = False,
        seed: int = 0,
        max_examples: int | None = None,
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

    def load(self) -> ImageData:
        """Read the images from scikit-learn and split off the test set."""
        from sklearn.datasets import load_digits  # takes seconds to import

        digits = load_digits()
        images = torch.from_numpy(digits.images).to(torch.uint8)[:, None]
        labels = torch.from_numpy(digits.target).to(torch.int64)
        is_test = torch.zeros(len(labels), dtype=torch.bool)
        is_test[balanced_subset(labels, round(0.2 * len(labels)), generator(0, "digits test split"))] = True
        return ImageData(images[~is_test], labels[~is_test], images[is_test], labels[is_test])
