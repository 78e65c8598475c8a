"""What is timed: three federations of CIFAR-10's size, two models, one recipe of local training."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.images import ImageData
from datamodules.in_memory import InMemoryDataModule
from fl_lightning.models import ResNet20

BATCH_SIZE = 20
CROP_PADDING = 2
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CLIENT_OPTIMIZER = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-4)


@dataclass(frozen=True)
class Workload:
    """A federation and its local work.

    Attributes:
        num_clients: Clients of the federation; the images are spread over them evenly.
        cohort_size: Clients that take part in a round.
        local_steps: Local steps E of each of them, with batches of 20 images.
        rounds: Rounds in one measurement unless the command line says otherwise.
    """

    num_clients: int
    cohort_size: int
    local_steps: int
    rounds: int

    @property
    def client_steps(self) -> int:
        """Local steps of all clients together in a round."""
        return self.cohort_size * self.local_steps


WORKLOADS = {
    "W1": Workload(num_clients=10, cohort_size=10, local_steps=20, rounds=1),
    "W2": Workload(num_clients=100, cohort_size=10, local_steps=20, rounds=1),
    "W3": Workload(num_clients=5, cohort_size=5, local_steps=1, rounds=100),
}


class Tiny(nn.Module):
    """268,474 parameters and two BN layers with almost no compute: what is left of a step is the framework's own time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.hidden = nn.Linear(256, 1000, bias=False)
        self.norm2 = nn.BatchNorm1d(1000)
        self.classifier = nn.Linear(1000, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[b, 3, 32, 32]`` to logits ``[b, 10]``."""
        features = F.relu(self.norm1(self.conv(F.avg_pool2d(images, 8))))
        logits: Tensor = self.classifier(F.relu(self.norm2(self.hidden(features.flatten(1)))))
        return logits


MODELS: dict[str, type[nn.Module]] = {"tiny": Tiny, "resnet20": ResNet20}


def make_model(name: str) -> nn.Module:
    """A model of :data:`MODELS`, the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


class SyntheticImages(InMemoryDataModule):
    """Random 32x32 colour images in ten classes: pixels do not change how long a step takes.

    Args:
        num_images: Training images of all clients together; CIFAR-10 has 50,000.
        num_clients: Number of clients, of equal size.
        augment: Whether images are cropped at random (padding 2) and flipped.
    """

    mean = CIFAR10_MEAN
    std = CIFAR10_STD
    num_classes = 10
    in_channels = 3
    image_size = 32
    pixels: Tensor

    def __init__(self, num_images: int, num_clients: int, augment: bool = True) -> None:
        super().__init__(
            num_clients=num_clients,
            batch_size=BATCH_SIZE,
            crop_padding=CROP_PADDING if augment else 0,
            horizontal_flip=augment,
        )
        self.num_images = num_images

    def client_samples(self, client_id: int) -> Tensor:
        """A client's samples: positions among the training images, int64, shape ``[n]``."""
        return self._shares[client_id].indices

    def step_draws(self, client_id: int, step: int) -> Tensor:
        """The random choices of a client's local step, int64, shape ``[20, 4]``."""
        return self._shares[client_id].step_draws(step)

    def load(self) -> ImageData:
        """Draw the pixels."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.num_images, 3, 32, 32)
        self.pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        labels = torch.randint(10, (self.num_images,), generator=generator)
        return ImageData(self.pixels, labels, self.pixels[:1], labels[:1])
