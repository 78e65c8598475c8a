"""The CIFAR-10 CNN of the Federated BatchNorm (FBN) paper, Table 1."""

from typing import Literal

from torch import Tensor, nn

from fl_lightning.errors import check_at_least
from fl_lightning.models.checks import require_images
from fl_lightning.models.dropout import Dropout, convert_dropout
from fl_lightning.models.norm import make_conv, make_head, make_norm
from fl_lightning.recorded import Recorded


class FBNCNN(Recorded, nn.Module):
    """The FBN paper's CNN: four 3x3 convolutions, two linear layers and a log-softmax.

    Each convolution is followed by a ReLU and then by a norm layer, as in the paper. By default the
    network has 1,310,922 trainable parameters, 4 BN layers with 384 channels in all, and 97.19
    million multiply-adds for a 32x32 image. All weights have torch's default initialisation.

    The outputs are log-probabilities. Cross-entropy and the negative log-likelihood are equal for
    these outputs, because a log-softmax does not change log-probabilities.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        image_size: Height and width of the images in pixels, at least 4.
        norm: Norm layer: ``"bn"``, ``"gn"``, ``"ln"``, ``"in"``, ``"gn_ws"``, ``"fed_ws"``,
            ``"weight_norm"``, ``"scaled_ws"``, ``"fn"`` or ``"none"``, see :func:`fl_lightning.models.norm.make_norm`. The
            convolutions always have biases.
        groups: Number of groups of every GN layer.
        dropout: Drop probability of the two dropout layers, in [0, 1].
        width: Number of channels of the first two convolutions. The next two convolutions and the
            first linear layer have twice as many channels.
        order: ``"relu_bn"``: ReLU before norm, as in the paper. ``"bn_relu"``: norm before ReLU, as
            in ResNets.

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
        dropout: float = 0.25,
        width: int = 64,
        order: Literal["relu_bn", "bn_relu"] = "relu_bn",
    ) -> None:
        super().__init__()
        check_at_least(1, num_classes=num_classes, in_channels=in_channels, width=width)
        check_at_least(4, image_size=image_size)
        self.in_channels = in_channels
        self.image_size = image_size

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            after = [nn.ReLU(), make_norm(norm, outputs, groups)]
            return [
                make_conv(norm, inputs, outputs, 3, padding=1, bias=True),
                *(after if order == "relu_bn" else after[::-1]),
            ]

        self.features = nn.Sequential(
            *block(in_channels, width),
            *block(width, width),
            nn.MaxPool2d(2),
            Dropout(dropout),
            *block(width, 2 * width),
            *block(2 * width, 2 * width),
            nn.MaxPool2d(2),
            Dropout(dropout),
        )
        self.classifier = nn.Sequential(
            nn.Linear(2 * width * (image_size // 4) ** 2, 2 * width),
            nn.ReLU(),
            make_head(norm, 2 * width, num_classes),
            nn.LogSoftmax(dim=-1),
        )
        convert_dropout(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[b, in_channels, image_size, image_size]`` to log-probabilities ``[b, num_classes]``."""
        require_images(images, self.in_channels, self.image_size)
        log_probabilities: Tensor = self.classifier(self.features(images).flatten(1))
        return log_probabilities
