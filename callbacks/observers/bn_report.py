"""Report of BN measurements: metrics, a table and figures."""

from collections.abc import Mapping

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fl_lightning import FederatedModule
from fl_lightning.methods import Drawing, Observer, Report, Rows, Table
from fl_lightning.pictures import LAYERS, drift_figure, has_drift, layers_figure

MAX_ROUNDS = 100
"""Maximum number of stored rounds per quantity, spread evenly over the run."""


class BatchNormReport(Report, Observer):
    """Base class of callbacks that log, store and report measurements of BN.

    A subclass passes its numbers to :meth:`log_measure` and :meth:`log_floats`.

    Attributes:
        history: Measured numbers, as rows of round, layer, quantity and value.
        newest: Newest metrics of each measure: ``newest[measure] = (round, metrics)``.
        channels: Number of channels of each BN layer with running statistics, by layer name.
    """

    saved: tuple[str, ...] = ("newest", "history")

    def start_anew(self) -> None:
        """Reset all measurements for a new run."""
        self.history: list[tuple[int, str, str, float]] = []
        self.newest: dict[str, tuple[int, dict[str, float]]] = {}
        self.channels: dict[str, int] = {}

    def log_floats(self, pl_module: FederatedModule, name: str, values: Tensor) -> None:
        """Log the sum and the mean of ``values``, and store the means of each layer.

        Args:
            pl_module: The federated module.
            name: Name of the metric without the prefix ``bn/``.
            values: Numbers ``[2, channels]``: row 0 for the running means and row 1 for the running
                variances of all layers.
        """
        total = float(values.sum())
        metrics = {f"bn/{name}": total, f"bn/{name}_per_float": total / values.numel()}
        self.log_measure(pl_module, "statistics", metrics)
        self.keep_floats(pl_module, name, values)

    def keep_floats(self, pl_module: FederatedModule, name: str, values: Tensor) -> None:
        """Average ``values`` over each layer, and store the averages.

        The quantities are named ``<name>_mean`` and ``<name>_var``.

        Args:
            pl_module: The federated module.
            name: Name of the measured quantity.
            values: Numbers ``[2, channels]``: row 0 for the running means and row 1 for the running
                variances of all layers.
        """
        for kind, row in zip(("mean", "var"), values, strict=True):
            pieces = row.split(list(self.channels.values()))
            means = {layer: float(piece.mean()) for layer, piece in zip(self.channels, pieces, strict=True)}
            self.keep(pl_module, f"{name}_{kind}", means)

    def keep(self, pl_module: FederatedModule, quantity: str, values: Mapping[str, float]) -> None:
        """Store one number per layer, unless a nearby round is already stored."""
        last = next((number for number, _, kept, _ in reversed(self.history) if kept == quantity), None)
        every = max(pl_module.planned_rounds, MAX_ROUNDS) / MAX_ROUNDS
        if last is None or (last - 1) // every < (pl_module.round - 1) // every:
            self.history += [(pl_module.round, layer, quantity, value) for layer, value in values.items()]

    def log_measure(self, pl_module: FederatedModule, measure: str, metrics: Mapping[str, float]) -> None:
        """Log metrics of the model, and store them in ``newest[measure]``."""
        for name, value in metrics.items():
            pl_module.log(name, value)
        if metrics:
            # ``now``: the current round in training, else the last finished round (or 0)
            trainer, now = pl_module.trainer, int(pl_module.metrics.get("round", 0))
            if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
                now = pl_module.round
            before, values = self.newest.get(measure, (now, {}))
            self.newest[measure] = now, {**(values if before == now else {}), **metrics}

    def by_quantity(self) -> dict[str, dict[int, dict[str, float]]]:
        """Return the numbers of ``history`` by quantity, round and layer."""
        measured: dict[str, dict[int, dict[str, float]]] = {}
        for number, layer, quantity, value in self.history:
            measured.setdefault(quantity, {}).setdefault(number, {})[layer] = value
        return measured

    def figures(self, rows: Rows) -> Mapping[str, Drawing]:
        """Return the figures ``bn_drift`` (entire model) and ``bn_layers`` (each layer)."""
        figures: dict[str, Drawing] = {}
        for number, metrics in self.newest.values():
            # a round's row may lack the metrics of an evaluation after the last round
            rows = [{**metrics, **row} if row["round"] == number else row for row in rows]
        if has_drift(rows):
            figures["bn_drift"] = lambda title: drift_figure(rows, title)
        measured = self.by_quantity()
        if measured.keys() & LAYERS.keys():
            figures["bn_layers"] = lambda title: layers_figure(measured, title)
        return figures

    def tables(self) -> Mapping[str, Table]:
        """Return the table ``bn_layers`` with all stored numbers of all layers."""
        columns = ("round", "layer", "quantity", "value")
        return {"bn_layers": Table(columns, self.history)} if self.history else {}

    def result(self) -> Mapping[str, float]:
        """Return each measure's newest metrics, with the round as ``bn_<measure>_round``."""
        values: dict[str, float] = {}
        for measure, (round_number, metrics) in self.newest.items():
            values |= {name.replace("/", "_"): value for name, value in metrics.items()}
            values[f"bn_{measure}_round"] = round_number
        return values

    def result_lines(self) -> Mapping[str, str]:
        """Return the newest gradient deviation and train-eval gap as text, with their rounds."""
        return {
            label: f"{self.newest[measure][1][name]:.3g} in round {self.newest[measure][0]:,}"
            for label, measure, name in (
                ("gradient deviation", "gradients", "bn/gradient_deviation"),
                ("train/eval gap", "gap", "bn/train_eval_gap"),
            )
            if measure in self.newest
        }
