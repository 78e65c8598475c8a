"""Multilayer perceptron for tables."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from fl_lightning.errors import check_at_least
from fl_lightning.models.norm import make_norm
from fl_lightning.recorded import Recorded


class TabularMLP(Recorded, nn.Module):
    """Multilayer perceptron: hidden layers with norm layer and ReLU, and a linear output layer.

    Args:
        num_classes: Number of outputs. Default: 1, for regression.
        in_features: Number of features of a sample of any shape.
        hidden: Width of each hidden layer.
        norm: ``"bn"`` (BatchNorm1d), ``"gn"``, ``"ln"`` or ``"none"``.
        groups: Number of groups of every GN layer.

    Raises:
        ConfigurationError: A setting is invalid.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        in_features: int = 30,
        hidden: Sequence[int] = (64, 64),
        norm: Literal["bn", "gn", "ln", "none"] = "bn",
        groups: int = 2,
    ) -> None:
        super().__init__()
        check_at_least(1, num_classes=num_classes or 1, in_features=in_features, groups=groups)
        layers: list[nn.Module] = [nn.Flatten()]
        width = in_features
        for size in hidden:
            check_at_least(1, hidden=size)
            normed = nn.BatchNorm1d(size) if norm == "bn" else make_norm(norm, size, groups)
            layers += [nn.Linear(width, size, bias=norm == "none"), normed, nn.ReLU()]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, num_classes or 1))

    def forward(self, features: Tensor) -> Tensor:
        """Map features ``[b, ...]`` to outputs ``[b, num_classes]``."""
        outputs: Tensor = self.layers(features)
        return outputs
