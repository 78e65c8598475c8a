"""Numbers of each layer over the rounds: what heat maps and tables are made of."""

from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.batch_norm.swapping import SwappedBatchNorm
from fl_lightning.run_directory.report import Table

MAX_ROUNDS = 100
"""At most so many rounds of a planned run are kept for each quantity, spread evenly over it."""


class LayerHistory:
    """Numbers by round, layer and quantity, thinned to :data:`MAX_ROUNDS` rounds.

    Attributes:
        rows: (round, layer, quantity, value), plain, for a ``state_dict``.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, str, float]] = []

    def add(self, quantity: str, round_number: int, planned_rounds: int, values: Mapping[str, float]) -> None:
        """Keep the values of a round, by layer, unless those of a round near to it are kept already."""
        newest = next((row[0] for row in reversed(self.rows) if row[2] == quantity), None)
        if newest is None or _place(newest, planned_rounds) < _place(round_number, planned_rounds):
            self.rows += [(round_number, layer, quantity, value) for layer, value in values.items()]

    def values(self, quantity: str) -> dict[int, dict[str, float]]:
        """The values of a quantity by round and layer."""
        found: dict[int, dict[str, float]] = {}
        for round_number, layer, name, value in self.rows:
            if name == quantity:
                found.setdefault(round_number, {})[layer] = value
        return found

    def table(self, layers: Iterable[str]) -> Table:
        """All values, one a row.

        Args:
            layers: The layers from the first to the last.
        """
        numbers = {layer: number for number, layer in enumerate(layers, 1)}
        rows = [(r, numbers[layer], layer, quantity, value) for r, layer, quantity, value in self.rows]
        return Table(("round", "number of layer", "layer", "quantity", "value"), rows)


def _place(round_number: int, planned_rounds: int) -> int:
    return (round_number - 1) * MAX_ROUNDS // max(planned_rounds, MAX_ROUNDS)


def layer_labels(model: nn.Module) -> dict[str, str]:
    """What to call the layers that have parameters or BN statistics of their own, by qualified name, first to last.

    Returns:
        Labels such as ``"stage1.0.norm1 (BatchNorm2d)"``.
    """
    labels = {}
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) or any(p.requires_grad for p in layer.parameters(recurse=False)):
            kind = layer.original if isinstance(layer, SwappedBatchNorm) else type(layer)
            labels[name] = f"{name} ({kind.__name__})" if name else kind.__name__
    return labels
