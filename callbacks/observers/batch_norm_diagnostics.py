"""Effects of Batch Normalization on a federated run, measured during training."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fl_lightning import Cohort, ConfigurationError, FederatedModule
from fl_lightning.batch_norm import batch_norm_layers, buffer_kinds, has_statistics
from fl_lightning.callbacks.observers.gradient_deviation import FirstStep, first_step
from fl_lightning.callbacks.observers.measurements import (
    local_deviation,
    mean_variance,
    relative_deviation,
    rounding_error,
    statistics_bias,
)
from fl_lightning.errors import check_at_least, check_choice
from fl_lightning.methods import (
    BATCH_STATISTICS,
    Drawing,
    MetricRows,
    Observer,
    Report,
    Table,
    VariantEvaluation,
    evenly_spaced,
    joined_statistics,
    measured_statistics,
)
from fl_lightning.pictures import LAYERS, drift_figure, has_drift, layers_figure

MAX_ROUNDS = 100
"""Maximum number of stored rounds per quantity, spread evenly over the run."""

WINDOW_CLIENTS = 10
"""Largest number of clients in ``bn/window_variance``."""
_MEASURES = ("statistics", "gradients", "gap", "bias")


class BatchNormDiagnostics(Report, Observer, VariantEvaluation):
    """Observer of BN: how far statistics and gradients differ between clients, by layer.

    Round 1 and every ``every_n_rounds``-th round are measured. In a measured round, the observer
    computes the first local step a second time, without dropout. BN layers normalise as in
    training. Training is bit for bit the same under two conditions. First, models and data draw
    random numbers only from the global generators of torch, numpy and Python. Second, their results
    do not depend on the number of calls.

    Two measures are taken in each measured round. In the formulas, S are the server's running means
    and variances at the start of the round. S_m are the mean and unbiased variance of each BN
    layer's inputs in the first local step of client m, even if the layer normalises with other
    statistics. p_m is the aggregation weight of client m.

    - ``"statistics"``:

      - ``bn/global_change``: The L1 norm of S' - S. S' are the server's statistics after the round.
      - ``bn/local_deviation``: ``sum_m p_m |S_m - S|_1`` (Figure 3a of the FixBN paper). An unused
        layer counts as 0.
      - ``bn/global_change_per_float``, ``bn/local_deviation_per_float``: ``bn/global_change`` and
        ``bn/local_deviation`` divided by the number of floats in S.
      - ``bn/window_variance``: The unbiased variance of each float in S_m over the measured rounds
        of client m, averaged over all floats and clients (Figure 3b).

    - ``"gradients"``:

      - ``bn/gradient_deviation``: ``|sum_m w_m g_m - g| / |g|`` in L2 norms. g_m is the first
        gradient of client m, with a weight w_m proportional to the batch size. g is the gradient of
        a single client with the union of all batches and the same method.
      - ``bn/gradient_deviation_affine``, ``bn/gradient_deviation_weights``: The same deviation for
        only gamma and beta, and for all other parameters. Both are logged only if the model has
        gamma and beta.

      All gradients are gradients of the loss, before FedProx, SCAFFOLD or clipping change them.
      Frozen and local parameters are excluded. For GN, FBN, FedTAN and frozen FixBN, the deviation
      is only a rounding error. With mixed precision, this is the rounding error of bfloat16.

    Two measures are taken in every evaluation inside ``fit``. In the formulas, m and v are the
    server's running mean and variance. m* and v* are the mean and biased variance of each BN
    layer's inputs, measured in one pass over the training data with the server's weights. In this
    pass, batch k is the union of all clients' k-th batches, and BN normalises with the batch. For
    the first BN layer, m* and v* are the mean and variance over all training data.

    - ``"gap"``:

      - ``val/accuracy_batch_statistics``: The accuracy with the statistics of the evaluation batch.
        The samples are in a fixed random order.
      - ``bn/train_eval_gap``: The accuracy with the server's statistics minus
        ``val/accuracy_batch_statistics``.

    - ``"bias"``:

      - ``bn/mean_bias``, ``bn/var_bias``: The relative errors ``|m - m*| / |sqrt(v*)|`` and ``|v -
        v*| / |v*|``, averaged over the layers.
      - ``val/accuracy_recalibrated``: The accuracy with the statistics m* and v*.
      - ``bn/recalibration_gap``: The accuracy with the server's statistics minus
        ``val/accuracy_recalibrated``.

    Files: ``bn_drift.png`` shows these measures over the rounds. ``bn_layers.png`` and
    ``bn_layers.csv`` show each layer in about 100 rounds. In these two files, the gradient
    deviation of a layer combines weight and bias, because the gradient of a bias before BN is only
    a rounding error. ``result.json`` has the newest numbers of each measure, with their round. An
    evaluation after the last round counts as part of the last round. If the model has no running
    statistics, only gradients are measured.

    Cost on a CPU with E = 1: a measured round took 3.2 times (LeNet) to 3.7 times (ResNet-8) as
    long as an unmeasured round. With only ``"statistics"``, the factor was 2.5. With the default
    interval, a run takes 1.2 to 1.3 times as long as without this observer. A measured round needs
    memory for a second cohort and for the union batch. ``"bias"`` needs memory for a forward pass
    on one batch of each client.

    Args:
        every_n_rounds: Interval of the measured rounds, at least 1.
        window: Number of each client's newest measured rounds in ``bn/window_variance``, at least
            2. The metric measures up to 10 clients, with evenly spaced ids. The observer and its
            checkpoints store up to ``10 * window`` copies of the statistics.
        measure: List of measures: ``statistics``, ``gradients``, ``gap``, ``bias``. None (default)
            selects all except ``bias``, which is costly.

    Attributes:
        history: Measured numbers, as rows of round, layer, quantity and value.
        newest: Newest metrics of each measure: ``newest[measure] = (round, metrics)``.
        channels: Number of channels of each BN layer with running statistics, by layer name.

    Raises:
        ConfigurationError: A setting is out of range or unknown.
    """

    examples = ({}, {"every_n_rounds": 1, "window": 2})
    saved = ("newest", "history", "windows")

    def __init__(
        self,
        every_n_rounds: int = 10,
        window: int = 20,
        measure: Sequence[str] | None = None,
    ) -> None:
        check_at_least(1, **{"BatchNormDiagnostics.every_n_rounds": every_n_rounds})
        check_at_least(2, **{"BatchNormDiagnostics.window": window})
        if isinstance(measure, str):
            raise ConfigurationError(f"BatchNormDiagnostics.measure: {measure!r} must be a list: [{measure}]")
        self._chosen = _MEASURES[:-1] if measure is None else tuple(measure)
        for name in self._chosen:
            check_choice("BatchNormDiagnostics.measure", name, _MEASURES)
        self.every_n_rounds, self.window, self.measure = every_n_rounds, window, measure
        self.start_anew()

    def start_anew(self) -> None:
        """Reset all measurements for a new run."""
        self.history: list[tuple[int, str, str, float]] = []
        self.newest: dict[str, tuple[int, dict[str, float]]] = {}
        self.channels: dict[str, int] = {}
        self.windows: dict[int, Tensor] = {}
        self._before: Tensor | None = None
        self._true: dict[str, Tensor] = {}

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Register the BN layers, and reset all measurements unless the run is resumed."""
        if not pl_module.trainer.current_epoch:
            self.start_anew()
        layers = batch_norm_layers(pl_module.model) if has_statistics(pl_module.model) else {}
        self.channels = {name: layer.num_features for name, layer in layers.items()}

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Measure the first local step in each measured round."""
        due = cohort.round == 1 or cohort.round % self.every_n_rounds == 0
        if not due or {"statistics", "gradients"}.isdisjoint(self._chosen):
            return
        gradients = "gradients" in self._chosen
        first = first_step(pl_module, cohort, union=gradients)
        if "statistics" in self._chosen and self.channels:
            self._before = joined_statistics(cohort.server_buffers, cohort.buffer_kinds)
            self._measure_statistics(pl_module, cohort, torch.stack([first.means, first.variances]))
        if gradients:
            self._measure_gradients(pl_module, cohort, first)

    def on_train_batch_end(  # type: ignore[override]  # narrows pl_module
        self, trainer: L.Trainer, pl_module: FederatedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the change of the server's statistics in this round, after all other callbacks."""
        if self._before is not None:
            model = pl_module.model
            after = joined_statistics(dict(model.named_buffers()), buffer_kinds(model))
            self._log_floats(pl_module, "global_change", (after - self._before).abs().double())
            self._before = None

    def _measure_statistics(self, pl_module: FederatedModule, cohort: Cohort, clients: Tensor) -> None:
        assert self._before is not None
        self._log_floats(pl_module, "local_deviation", local_deviation(clients, self._before, cohort.weights))
        watched = evenly_spaced(WINDOW_CLIENTS, pl_module.data.num_clients)
        for row, client in enumerate(cohort.client_ids):
            if client in watched:
                newest = clients[:, row].flatten().cpu()[None]
                window = torch.cat([self.windows.get(client, newest[:0]), newest])
                self.windows[client] = window[-self.window :].clone()
        variance = mean_variance(self.windows.values())
        if variance is not None:
            self._log_measure(pl_module, "statistics", {"bn/window_variance": float(variance.mean())})
            self._keep_floats(pl_module, "window_variance", variance.view(2, -1))

    def _measure_gradients(self, pl_module: FederatedModule, cohort: Cohort, first: FirstStep) -> None:
        mean, union, kinds = first.mean_gradient, first.union_gradient, cohort.parameter_kinds
        parts = {"": list(mean)}
        if "affine" in kinds.values():
            parts["_affine"] = [name for name in mean if kinds[name] == "affine"]
            parts["_weights"] = [name for name in mean if kinds[name] == "weight"]
        smallest = rounding_error(union)
        layers: dict[str, list[str]] = {}
        for name in mean:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        of_parts, of_layers = (
            {of: relative_deviation(mean, union, names, smallest) for of, names in groups.items() if names}
            for groups in (parts, layers)
        )
        metrics = {f"bn/gradient_deviation{part}": value for part, value in of_parts.items()}
        self._log_measure(pl_module, "gradients", metrics)
        self._keep(pl_module, "gradient_deviation", of_layers)

    def variants(self, trainer: L.Trainer, pl_module: FederatedModule) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the measured variants: ``batch_statistics``, ``recalibrated`` or both.

        ``batch_statistics`` uses the evaluation batch. ``recalibrated`` uses statistics from a pass
        over the training data.
        """
        variants: dict[str, Mapping[str, Tensor]] = {}
        self._true = {}
        if has_statistics(pl_module.model):
            if "gap" in self._chosen:
                variants["batch_statistics"] = BATCH_STATISTICS
            if "bias" in self._chosen and trainer.state.fn == TrainerFn.FITTING:
                self._true = measured_statistics(trainer, pl_module, "pooled_total_variance")
                variants |= {"recalibrated": self._true} if self._true else {}
        return variants

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Log the gaps and the bias of an evaluation."""
        variants = self._evaluations
        super().on_validation_epoch_end(trainer, pl_module)
        quality = pl_module.evaluation.finish().get(pl_module.task.quality)
        metrics = {
            "batch_statistics": ("gap", "train_eval_gap"),
            "recalibrated": ("bias", "recalibration_gap"),
        }
        for name, (measure, metric) in metrics.items():
            if name in variants and quality is not None:
                gap = quality - variants[name].metrics[pl_module.task.quality]
                self._log_measure(pl_module, measure, {f"bn/{metric}": gap})
        if self._true:
            held = dict(pl_module.model.named_buffers())
            every = batch_norm_layers(pl_module.model)
            layers = [layer for layer in every if f"{layer}.running_mean" in self._true]
            biases = statistics_bias(held, self._true, layers)
            for quantity, values in zip(("mean_bias", "var_bias"), biases, strict=True):
                self._log_measure(pl_module, "bias", {f"bn/{quantity}": sum(values) / len(values)})
                self._keep(pl_module, quantity, dict(zip(layers, values, strict=True)))

    def _log_floats(self, pl_module: FederatedModule, name: str, values: Tensor) -> None:
        """Log the sum and the mean of ``values``, and store the means of each layer.

        Args:
            pl_module: The federated module.
            name: Name of the metric without the prefix ``bn/``.
            values: Numbers ``[2, channels]``: row 0 for the running means and row 1 for the running
                variances of all layers.
        """
        total = float(values.sum())
        metrics = {f"bn/{name}": total, f"bn/{name}_per_float": total / values.numel()}
        self._log_measure(pl_module, "statistics", metrics)
        self._keep_floats(pl_module, name, values)

    def _keep_floats(self, pl_module: FederatedModule, name: str, values: Tensor) -> None:
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
            self._keep(pl_module, f"{name}_{kind}", means)

    def _keep(self, pl_module: FederatedModule, quantity: str, values: Mapping[str, float]) -> None:
        """Store one number per layer, unless a nearby round is already stored."""
        last = next((number for number, _, kept, _ in reversed(self.history) if kept == quantity), None)
        every = max(pl_module.planned_rounds, MAX_ROUNDS) / MAX_ROUNDS
        if last is None or (last - 1) // every < (pl_module.round - 1) // every:
            self.history += [(pl_module.round, layer, quantity, value) for layer, value in values.items()]

    def _log_measure(self, pl_module: FederatedModule, measure: str, metrics: Mapping[str, float]) -> None:
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

    def _by_quantity(self) -> dict[str, dict[int, dict[str, float]]]:
        """Return the numbers of ``history`` by quantity, round and layer."""
        measured: dict[str, dict[int, dict[str, float]]] = {}
        for number, layer, quantity, value in self.history:
            measured.setdefault(quantity, {}).setdefault(number, {})[layer] = value
        return measured

    def figures(self, rows: MetricRows) -> Mapping[str, Drawing]:
        """Return the figures ``bn_drift`` (entire model) and ``bn_layers`` (each layer)."""
        figures: dict[str, Drawing] = {}
        for number, metrics in self.newest.values():
            # a round's row may lack the metrics of an evaluation after the last round
            rows = [{**metrics, **row} if row["round"] == number else row for row in rows]
        if has_drift(rows):
            figures["bn_drift"] = lambda title: drift_figure(rows, title)
        measured = self._by_quantity()
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
