"""What is reported of measurements of Batch Normalization: metrics, a table of all layers, histograms and figures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fl_lightning.batch_norm import batch_norm_layers
from fl_lightning.drift_pictures import MAPS, drift_figure, has_drift, layers_figure
from fl_lightning.first_step import has_statistics
from fl_lightning.layer_history import LayerHistory, layer_labels
from fl_lightning.reports import Drawing, Report, Table

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule


class BatchNormReport(Report):
    """The bookkeeping of a callback that measures BN: it says :meth:`report`, and the run shows it.

    Attributes:
        history: The numbers of each layer.
        newest: The newest value of each metric, and its round.
        frozen_round: The first round with frozen statistics, None as long as there is none.
        channels: Channels of each BN layer, first to last; empty for a model without BN's running statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history = LayerHistory()
        self.newest: dict[str, tuple[int, float]] = {}
        self.frozen_round: int | None = None
        self.channels: dict[str, int] = {}
        self._labels: dict[str, str] = {}
        self._distributions: dict[str, list[float]] = {}

    def look_at(self, model: nn.Module) -> None:
        """Take up the layers of a model."""
        self._labels = layer_labels(model)
        layers = batch_norm_layers(model) if has_statistics(model) else {}
        self.channels = {name: layer.num_features for name, layer in layers.items()}

    def report_floats(self, pl_module: "FederatedModule", name: str, values: Tensor) -> None:
        """Report the L1 norm of ``[2, channels]`` in total and per float, and keep it for each layer."""
        total = float(values.sum())
        self.report(pl_module, {f"bn/{name}": total, f"bn/{name}_per_float": total / values.numel()})
        self.keep_floats(pl_module, name, values)

    def keep_floats(self, pl_module: "FederatedModule", name: str, values: Tensor) -> None:
        """Keep ``[2, channels]``, a number for each mean and variance, as ``<name>_mean`` and ``_var`` per float of a layer."""
        for kind, row in zip(("mean", "var"), values, strict=True):
            pieces = row.split(list(self.channels.values()))
            means = {layer: float(piece.mean()) for layer, piece in zip(self.channels, pieces, strict=True)}
            self.keep(pl_module, f"{name}_{kind}", means)
            self._distributions[f"bn_{name}_{kind}"] = row[row.isfinite()].tolist()

    def keep(self, pl_module: "FederatedModule", quantity: str, values: Mapping[str, float]) -> None:
        """Keep a number of each layer."""
        self.history.add(quantity, pl_module.round, pl_module.planned_rounds, values)

    def report(self, pl_module: "FederatedModule", metrics: Mapping[str, float]) -> None:
        """Log numbers of the whole model."""
        for name, value in metrics.items():
            pl_module.log(name, value)
            self.newest[name] = (pl_module.round, value)

    def figures(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Drawing]:
        """``bn_drift``, numbers of the whole model over the rounds, and ``bn_layers``, of each layer."""
        found: dict[str, Drawing] = {}
        if has_drift(rows):
            found["bn_drift"] = lambda title: drift_figure(rows, self.frozen_round, title)
        maps = {quantity: self.history.values(quantity) for quantity in MAPS}
        if any(maps.values()):
            found["bn_layers"] = lambda title: layers_figure(maps, self._labels, title)
        return found

    def tables(self) -> Mapping[str, Table]:
        """``bn_layers``: every number of every layer."""
        return {"bn_layers": self.history.table(self._labels)} if self.history.rows else {}

    def histograms(self) -> Mapping[str, Sequence[float]]:
        """The statistics' deviations of the newest measured round, one value per channel."""
        return self._distributions

    def result(self) -> Mapping[str, float]:
        """The newest value of everything measured."""
        return {name.replace("/", "_"): value for name, (_, value) in self.newest.items()}

    def result_lines(self) -> Mapping[str, str]:
        """The newest gradient deviation and gap."""
        shown = {"gradient deviation": "bn/gradient_deviation", "train/eval gap": "bn/train_eval_gap"}
        return {
            label: "{1:.3g} in round {0:,}".format(*self.newest[name])
            for label, name in shown.items()
            if name in self.newest
        }

    def state_dict(self) -> dict[str, Any]:
        """The layers' numbers so far, and the newest of the whole."""
        return {
            "history": self.history.rows,
            "newest": self.newest,
            "frozen_round": self.frozen_round,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what a checkpoint had measured."""
        self.history.rows = state_dict["history"]
        self.newest, self.frozen_round = state_dict["newest"], state_dict["frozen_round"]
