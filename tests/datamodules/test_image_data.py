"""What ``load()`` may give: images and labels of the right kind, with classes that are known."""

import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import ImageData, InMemoryDataModule

IMAGES, LABELS = torch.zeros(4, 3, 5, 5, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IMAGES.double(), LABELS, IMAGES, LABELS), "ImageData.train_images: torch.float64 [4, 3, 5, 5]; load() must give torch.uint8 [N, channels, height, width], with N = 4 images; TensorData takes tensors of any type and shape"),
        ((IMAGES, LABELS, IMAGES[0], LABELS), "ImageData.test_images: torch.uint8 [3, 5, 5]; load() must give torch.uint8 [N, channels, height, width], with N = 3 images; TensorData takes tensors of any type and shape"),
        ((IMAGES, LABELS.float(), IMAGES, LABELS), "ImageData.train_labels: torch.float32 [4]; load() must give torch.int64 [N], with N = 4 images; TensorData takes tensors of any type and shape"),
        ((IMAGES, LABELS, IMAGES, LABELS[1:]), "ImageData.test_labels: torch.int64 [3]; load() must give torch.int64 [N], with N = 4 images; TensorData takes tensors of any type and shape"),
        ((IMAGES, LABELS, IMAGES, LABELS, LABELS[1:]), "ImageData.train_groups: torch.int64 [3]; load() must give torch.int64 [N], with N = 4 images; TensorData takes tensors of any type and shape"),
    ],
)  # fmt: skip
def test_images_of_another_kind_are_refused(arguments, message):
    with pytest.raises(ConfigurationError) as refused:
        ImageData(*arguments)
    assert str(refused.value) == message


class Loaded(InMemoryDataModule):
    """Two classes whose labels and pixels are given."""

    num_classes = 2

    def __init__(self, images, labels, **settings):
        super().__init__(num_clients=1, batch_size=2, **settings)
        self.given = ImageData(images, labels, images, labels)

    def load(self):
        return self.given


@pytest.mark.parametrize("label", [2, 255, -1])
def test_a_label_that_no_class_has_is_refused(label):
    images = torch.arange(4 * 75).remainder(256).to(torch.uint8).view(4, 3, 5, 5)
    with pytest.raises(ConfigurationError) as refused:
        Loaded(images, torch.tensor([0, 1, label, 0])).setup("fit")
    assert str(refused.value) == (
        f"data: train_labels of Loaded are {min(label, 0)} to {max(label, 1)}, but its classes are 0 to 1; "
        "number the classes from 0, and set num_classes"
    )


def test_a_channel_that_is_the_same_everywhere_becomes_0():
    images = torch.arange(4 * 75).remainder(256).to(torch.uint8).view(4, 3, 5, 5)
    images[:, 1] = 9
    data = Loaded(images, LABELS)
    data.setup("fit")
    inputs, _ = data.clients[0].train_batch(0)
    assert bool((inputs[:, 1].abs() < 1e-6).all())
    assert bool((inputs[:, [0, 2]].std((0, 2, 3)) > 0.1).all())


def test_mean_and_std_of_a_class_replace_those_of_the_training_images():
    images = torch.arange(4 * 75).remainder(256).to(torch.uint8).view(4, 3, 5, 5)
    known = Loaded(images, LABELS)
    known.mean, known.std = (0.5,) * 3, (0.25,) * 3
    known.setup("fit")
    ((inputs, _),) = known.test_dataloader()
    torch.testing.assert_close(inputs, (images / 255 - 0.5) / 0.25)
