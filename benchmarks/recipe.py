"""Common settings of all contenders: models, batch size, client optimizer, augmentation."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import transforms

from fl_lightning.models import LeNet, ResNet8, ResNet20, ResNet32

BATCH_SIZE = 20
CROP_PADDING = 2
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.02, 0.9, 1e-4
CLIENT_OPTIMIZER = partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
AUGMENTATION = transforms.Compose(
    [
        transforms.RandomCrop(32, padding=CROP_PADDING),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(CIFAR10_MEAN, CIFAR10_STD),
    ]
)
"""Augmentation of a PIL image, for contenders that read images one at a time."""


class Tiny(nn.Module):
    """A model with 268,474 parameters, two BN layers and almost no computation."""

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


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=10)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tiny": Tiny,
    "lenet": LeNet,
    "resnet8": ResNet8,
    "resnet20": ResNet20,
    "resnet32": ResNet32,
    "resnet18": _resnet18,
}
"""Models by name. ``resnet18`` is torchvision's ImageNet model with 11.2 million parameters."""


def make_model(name: str) -> nn.Module:
    """Return a new model of :data:`MODELS`; its initial weights are the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()
