"""LeNet of the FixBN paper (Section 3.2) and of Hsieh et al., ICML 2020.

The network is Caffe's cifar10-quick, with added norm layers.
"""

from torch import Tensor, nn

from fl_lightning.errors import check_at_least
from fl_lightning.models.checks import require_images
from fl_lightning.models.norm import make_conv, make_head, make_norm
from fl_lightning.recorded import Recorded


class LeNet(Recorded, nn.Module):
    """LeNet: three 5x5 convolutions and one linear layer.

    After each convolution, a 3x3 pooling of stride 2 halves the height and width. The first
    convolution is followed by max pooling, and then by its norm layer and ReLU. The other two
    convolutions are followed by norm layer, ReLU and average pooling. A 32x32 image takes 12.30
    million multiply-adds. All weights have torch's default initialisation.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        image_size: Height and width of the images in pixels, at least 8.
        norm: Norm layer: ``"bn"``, ``"gn"``, ``"ln"``, ``"in"``, ``"gn_ws"``, ``"fed_ws"``,
            ``"weight_norm"``, ``"scaled_ws"``, ``"fn"`` or ``"none"``, see :func:`fl_lightning.models.norm.make_norm`.
            Convolutions without a norm layer have biases.
        groups: Number of groups of every GN layer.

    Raises:
        ConfigurationError: A setting is invalid.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        norm: str = "bn",
        groups: int = 2,
    ) -> None:
        super().__init__()
        check_at_least(1, num_classes=num_classes, in_channels=in_channels)
        check_at_least(8, image_size=image_size)
        self.in_channels = in_channels
        self.image_size = image_size
        # ceil_mode: Caffe rounds the size 15.5 up to 16, and the last window exceeds the border
        self.features = nn.Sequential(
            make_conv(norm, in_channels, 32, 5, padding=2),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            make_norm(norm, 32, groups),
            nn.ReLU(),
            make_conv(norm, 32, 32, 5, padding=2),
            make_norm(norm, 32, groups),
            nn.ReLU(),
            nn.AvgPool2d(3, stride=2, ceil_mode=True),
            make_conv(norm, 32, 64, 5, padding=2),
            make_norm(norm, 64, groups),
            nn.ReLU(),
            nn.AvgPool2d(3, stride=2, ceil_mode=True),
        )
        self.classifier = make_head(norm, 64 * (image_size // 8) ** 2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[b, in_channels, image_size, image_size]`` to logits ``[b, num_classes]``."""
        require_images(images, self.in_channels, self.image_size)
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits
