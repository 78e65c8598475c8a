"""ResNet-18 (He et al., "Deep Residual Learning", CVPR 2016, Section 4.1 and Table 1)."""

from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.errors import check_at_least
from fl_lightning.models.blocks import ProjectionBlock, make_stages
from fl_lightning.models.checks import require_images
from fl_lightning.models.norm import make_conv, make_head, make_norm
from fl_lightning.models.resnet import initialise
from fl_lightning.recorded import Recorded


class ResNet18(Recorded, nn.Module):
    """ResNet-18: four stages of two basic blocks, a global mean and a linear layer.

    Where the shape changes, shortcuts are projections (option B of the paper). By default the model
    has 11,173,962 trainable parameters, 20 BN layers with 4,800 channels in all, and 555.42 million
    multiply-adds for a 32x32 image. With ``stem="imagenet"`` and 1000 classes, the model has
    11,689,512 trainable parameters, as many as torchvision's ``resnet18``. Convolutions are
    initialised as in He et al., ICCV 2015, eq. 10.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images. The images may have any size.
        norm: Norm layer, see :func:`fl_lightning.models.norm.make_norm`. Convolutions without a
            norm layer have biases.
        groups: Number of groups of every GN layer.
        stem: First layers. ``"cifar"``: a 3x3 convolution of stride 1. ``"imagenet"``: a 7x7
            convolution and a 3x3 max pooling, both of stride 2.
        width: Number of channels of the first stage. The other three stages have two, four and
            eight times as many channels.

    Raises:
        ConfigurationError: A setting is invalid.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: str = "bn",
        groups: int = 2,
        stem: Literal["cifar", "imagenet"] = "cifar",
        width: int = 64,
    ) -> None:
        super().__init__()
        check_at_least(1, num_classes=num_classes, in_channels=in_channels, width=width)
        self.in_channels = in_channels
        kernel, stride = (3, 1) if stem == "cifar" else (7, 2)
        self.conv = make_conv(norm, in_channels, width, kernel, stride, padding=kernel // 2)
        self.norm = make_norm(norm, width, groups)
        self.pool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = make_stages(partial(ProjectionBlock, norm=norm, groups=groups), width, [2, 2, 2, 2])
        self.classifier = make_head(norm, 8 * width, num_classes)
        initialise(self, "he")

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[b, in_channels, height, width]`` to logits ``[b, num_classes]``."""
        require_images(images, self.in_channels)
        features = self.blocks(self.pool(F.relu(self.norm(self.conv(images)))))
        logits: Tensor = self.classifier(features.mean(dim=(-2, -1)))
        return logits
