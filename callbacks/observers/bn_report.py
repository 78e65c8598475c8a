"""Report of BN measurements: metrics, a table of all layers and figures."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fl_lightning.methods import Drawing, Report, Rows, Table
from fl_lightning.pictures import LAYERS, drift_figure, has_drift, layers_figure

if TYPE_CHECKING:
    from fl_lightning.round import FederatedModule


MAX_ROUNDS = 100
"""Maximum number of rounds kept for each quantity, evenly spread over the planned run."""


class BatchNormReport(Report):
    """Bookkeeping of a callback that measures BN and passes its numbers to :meth:`log_measure`.

    Attributes:
        history: Numbers of each layer, ``history[quantity][round][layer]``.
        newest: Newest metrics of each measure, and their round.
        channels: Channels of each BN layer with running statistics, first to last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start_anew()

    def start_anew(self) -> None:
        """Reset all measurements for a new run."""
        self.history: dict[str, dict[int, dict[str, float]]] = {}
        self.newest: dict[str, tuple[int, dict[str, float]]] = {}
        self.channels: dict[str, int] = {}

    def log_floats(self, pl_module: "FederatedModule", name: str, values: Tensor) -> None:
        """Log the sum and mean of ``values`` ``[2, channels]``, and keep each layer's means."""
        total = float(values.sum())
        metrics = {f"bn/{name}": total, f"bn/{name}_per_float": total / values.numel()}
        self.log_measure(pl_module, "statistics", metrics)
        self.keep_floats(pl_module, name, values)

    def keep_floats(self, pl_module: "FederatedModule", name: str, values: Tensor) -> None:
        """Keep each layer's mean of ``values`` ``[2, channels]``, as ``<name>_mean`` and ``<name>_var``."""
        for kind, row in zip(("mean", "var"), values, strict=True):
            pieces = row.split(list(self.channels.values()))
            means = {layer: float(piece.mean()) for layer, piece in zip(self.channels, pieces, strict=True)}
            self.keep(pl_module, f"{name}_{kind}", means)

    def keep(self, pl_module: "FederatedModule", quantity: str, values: Mapping[str, float]) -> None:
        """Keep each layer's number in this round, unless the history already has a nearby round."""
        by_round = self.history.setdefault(quantity, {})
        every = max(pl_module.planned_rounds, MAX_ROUNDS) / MAX_ROUNDS
        if not by_round or (max(by_round) - 1) // every < (pl_module.round - 1) // every:
            by_round[pl_module.round] = dict(values)

    def log_measure(self, pl_module: "FederatedModule", measure: str, metrics: Mapping[str, float]) -> None:
        """Log numbers of the whole model, and replace the measure's numbers of earlier rounds."""
        for name, value in metrics.items():
            pl_module.log(name, value)
        if metrics:
            # in training the present round, otherwise the last finished round or 0
            trainer, now = pl_module.trainer, int(pl_module.metrics.get("round", 0))
            if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
                now = pl_module.round
            before, values = self.newest.get(measure, (now, {}))
            self.newest[measure] = now, {**(values if before == now else {}), **metrics}

    def figures(self, rows: Rows) -> Mapping[str, Drawing]:
        """Return the figures ``bn_drift`` (the whole model) and ``bn_layers`` (each layer)."""
        figures: dict[str, Drawing] = {}
        for number, metrics in self.newest.values():
            # an evaluation after the last round is logged after the round's metrics: add it to them
            rows = [{**metrics, **row} if row["round"] == number else row for row in rows]
        if has_drift(rows):
            figures["bn_drift"] = lambda title: drift_figure(rows, title)
        if self.history.keys() & LAYERS.keys():
            figures["bn_layers"] = lambda title: layers_figure(self.history, title)
        return figures

    def tables(self) -> Mapping[str, Table]:
        """Return the table ``bn_layers`` of all kept numbers of all layers."""
        rows = self._rows()
        return {"bn_layers": Table(("round", "layer", "quantity", "value"), rows)} if rows else {}

    def result(self) -> Mapping[str, float]:
        """Return the newest numbers of each measure, and their round as ``bn_<measure>_round``."""
        values: dict[str, float] = {}
        for measure, (round_number, metrics) in self.newest.items():
            values |= {name.replace("/", "_"): value for name, value in metrics.items()}
            values[f"bn_{measure}_round"] = round_number
        return values

    def result_lines(self) -> Mapping[str, str]:
        """Return the newest gradient deviation and gap."""
        return {
            label: f"{self.newest[measure][1][name]:.3g} in round {self.newest[measure][0]:,}"
            for label, measure, name in (
                ("gradient deviation", "gradients", "bn/gradient_deviation"),
                ("train/eval gap", "gap", "bn/train_eval_gap"),
            )
            if measure in self.newest
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the layers' numbers so far and the newest metrics."""
        return {"history": self._rows(), "newest": self.newest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the measurements from a checkpoint."""
        self.history = {}
        for round_number, layer, quantity, value in state_dict["history"]:
            self.history.setdefault(quantity, {}).setdefault(round_number, {})[layer] = value
        self.newest = state_dict["newest"]

    def _rows(self) -> list[tuple[int, str, str, float]]:
        return [
            (round_number, layer, quantity, value)
            for quantity, by_round in self.history.items()
            for round_number, values in by_round.items()
            for layer, value in values.items()
        ]
