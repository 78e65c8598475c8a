"""Network of the toy example in the FBN paper."""

from torch import Tensor, nn

from fl_lightning.errors import check_at_least
from fl_lightning.recorded import Recorded


class BNProbe(Recorded, nn.Module):
    """Linear classifier after a BN layer without gamma and beta.

    The model tests whether the classes are linearly separable after BN has normalised the points.
    The BN statistics depend only on the inputs, not on the weights. The paper is Guerraoui et al.,
    arXiv 2405.14670, Section 3.

    Args:
        num_classes: Number of classes.
        in_features: Number of coordinates of a point.

    Raises:
        ConfigurationError: A setting is too small.
    """

    def __init__(self, num_classes: int = 10, in_features: int = 2) -> None:
        super().__init__()
        check_at_least(1, num_classes=num_classes, in_features=in_features)
        self.norm = nn.BatchNorm1d(in_features, affine=False)
        self.classifier = nn.Linear(in_features, num_classes)

    def forward(self, points: Tensor) -> Tensor:
        """Map points ``[b, in_features]`` to logits ``[b, num_classes]``."""
        logits: Tensor = self.classifier(self.norm(points))
        return logits
