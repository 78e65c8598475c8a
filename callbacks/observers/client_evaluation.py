"""Quality of each client's model, and of the server's model for each client."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isnan
from typing import Literal

import lightning as L
import torch
from torch import Tensor

from fl_lightning import Classification, FederatedDataModule, FederatedModule, Report, Table, Task
from fl_lightning.methods import (
    ClientResult,
    Drawing,
    MetricRows,
    Observer,
    PersonalEvaluation,
    evaluate_client,
    main_metric,
    pooled_metrics,
    spread_over_clients,
)
from fl_lightning.pictures import calibration_figure, client_quality_figure

_BINS = 10  # of the calibration curve
_NAMED = 5  # largest number of clients without a metric that the result table names


class ClientEvaluation(Report, Observer):
    """Observer that evaluates, for each client, the server's model and the model that the client uses.

    The data module decides how a client is evaluated:

    - If the client has a ``val_dataloader()`` (or ``test_dataloader()``), accuracy and loss are
      measured on this loader's data.
    - If only the client's class histogram is known, the accuracy is estimated on the server's
      evaluation data. Classes are weighted by their frequency in the client's training data. The
      loss is left out.
    - Otherwise the client is left out. A client whose value is NaN is also left out. The result
      table says how many clients are left out, and names five of them.

    Each evaluation logs these metrics under ``val/`` or ``test/``:

    - ``client_accuracy``: Unweighted mean over the clients.
    - ``client_accuracy_worst``: Mean over the clients with the lowest accuracy: a tenth of all
      clients, at least one client.
    - ``client_accuracy_variance``: Variance over the clients, for accuracies in [0, 1].
    - ``client_loss``, ``client_loss_worst``, ``client_loss_variance``: The same three numbers for
      the loss. The worst clients have the highest losses.
    - ``own_accuracy``, ``own_accuracy_worst`` and so on: The same numbers for the model that each
      client uses. Under a method with a model for each client, such as FedBN, the method measures
      these models. Under all other methods, each client uses the server's model.
    - ``pooled_accuracy``, ``pooled_loss``: Accuracy and loss over the own samples of all clients
      together, each with the model that its client uses. Each sample has the same weight. An AUROC
      over different models also measures differences in level between clients.

    q-FFL has the same measures (Li et al., "Fair resource allocation in federated learning",
    ICLR 2020, Table 1). After the run, ``clients.csv`` and ``clients.png`` have each client's name,
    numbers of training, validation and test samples, and values of the last evaluation. An unknown
    number is empty: the samples of your own data modules are counted when they are evaluated. W&B
    shows the table and the picture as well. For clients with names and own test data,
    ``test_predictions.csv`` has a line for each test sample, with the prediction of the model that its
    client uses. W&B does not get it.

    After the final test of a classification, ``calibration.csv`` and ``calibration.png`` have the
    calibration curve of all clients' own test samples together, each with the model that its client
    uses. The curve has 10 bins of equal width, without empty bins:

    - With two classes, it shows the share of the samples of class 1 against the predicted
      probability of class 1.
    - With more classes, it shows the share of correct predictions against the probability of the
      predicted class.

    There is no curve if all samples have the same class, or if an output is not finite. The metric
    ``calibration`` has 15 bins. ``test/pooled_calibration`` has the samples and models of the curve.

    Attributes:
        values: ``accuracy`` and ``loss`` of the server's model for each client in the last
            evaluation, by client id. Unknown values are left out.
    """

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self._counted: dict[str, list[int | Literal[""]]] = {}  # by split, in the evaluations so far
        self._outputs: dict[int, Sequence[tuple[Tensor, Tensor]]] = {}
        self._personal: PersonalEvaluation | None = None
        self._names: Sequence[str] = ()
        self._has_names = False
        self._measured: Sequence[str] = ()  # metrics of the server's evaluation
        self._main = ""
        self._task: Task | None = None
        self._classes: Sequence[str] = ()

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Let a method with a model for each client log the worst clients and the variance."""
        methods = pl_module.federated_callbacks
        self._personal = next((x for x in methods if isinstance(x, PersonalEvaluation)), None)
        if self._personal:
            self._personal.measures_spread = True

    on_test_epoch_start = on_validation_epoch_start  # type: ignore[assignment]  # narrows pl_module

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Evaluate all clients and log the summary."""
        split = "test" if trainer.testing else pl_module.data.fit_split
        pl_module.evaluation.finish()
        clients = range(pl_module.data.num_clients)
        keep = trainer.testing and self._personal is None
        results = pl_module.ranks.map(lambda client: self._evaluate(pl_module, client, split, keep), clients)
        self._outputs = {client: result.outputs for client, result in enumerate(results)}
        values = [{k: x for k, x in r.metrics.items() if not (r.diverged and isnan(x))} for r in results]
        self.values = dict(zip(clients, values, strict=True))
        self._names = pl_module.data.client_names[: len(clients)] or [str(client) for client in clients]
        data = pl_module.data
        self._has_names = bool(data.client_names)
        self._measured = [name for name, x in pl_module.evaluation.metrics.items() if not isnan(x)]
        self._counted[split] = ["" if result.samples is None else result.samples for result in results]
        self._samples = [
            [data.num_examples(x), *(self._own_size(data, x, part) for part in ("val", "test"))]
            for x in clients
        ]
        self._main = main_metric(pl_module.task, values)
        self._task, self._classes = pl_module.task, data.class_names or ()
        for form in ("client_{}", *([] if self._personal else ["own_{}"])):
            for name, value in spread_over_clients(values, pl_module.task.best, form).items():
                pl_module.log(pl_module.client.metric_name(split, name), value)
        for name, value in (pooled_metrics(pl_module, results) if self._personal is None else {}).items():
            pl_module.log(pl_module.client.metric_name(split, name), value)

    on_test_epoch_end = on_validation_epoch_end  # type: ignore[assignment]  # narrows pl_module

    def _own_size(self, data: FederatedDataModule, client: int, split: str) -> int | Literal[""]:
        known = data.own_size(client, split)
        return self._counted[split][client] if known == "" and split in self._counted else known

    def _evaluate(self, pl_module: FederatedModule, client: int, split: str, keep: bool) -> ClientResult:
        with pl_module.trainer.precision_plugin.val_step_context():
            by_class = pl_module.evaluation.class_quality
            evaluate = pl_module.client.evaluate_batch
            return evaluate_client(pl_module, client, split, evaluate, by_class, keep=keep)

    def predictions(self) -> Mapping[int, Sequence[tuple[Tensor, Tensor]]]:
        """Return the outputs and targets of each client's own test samples, by client id."""
        known = self._outputs
        if self._personal is not None:
            known = {client: result.outputs for client, result in self._personal.own_results.items()}
        return {client: outputs for client, outputs in known.items() if outputs}

    def result_lines(self) -> Mapping[str, str]:
        """Return a line for the result table if clients lack a metric that others or the server have."""
        names = sorted({name for known in self.values.values() for name in known})
        if self.values and not names:
            return {"clients": "not evaluated: they have no evaluation data and no classes"}
        # keyed by clients, because the same clients often lack several metrics
        lacking: dict[tuple[int, ...], list[str]] = {}
        for name in sorted({*names, *self._measured}):
            clients = tuple(client for client, known in self.values.items() if name not in known)
            lacking.setdefault(clients, []).append(name)
        lacking.pop((), None)
        no_client = lacking.pop(tuple(self.values), [])
        words = [
            f"{len(clients)} of {len(self.values)} have no {' or '.join(metrics)}{self._named(clients)}"
            for clients, metrics in lacking.items()
        ]
        lines = [f"{', '.join(words)}, and are left out"] if words else []
        lines += [f"no client has {' or '.join(no_client)}"] if no_client else []
        return {"clients": "; ".join(lines)} if lines else {}

    def _named(self, clients: Sequence[int]) -> str:
        names = [self._names[client] for client in clients[:_NAMED]] if self._has_names else []
        more = ["..."] if len(clients) > _NAMED else []
        return f" ({', '.join([*names, *more])})" if names else ""

    def tables(self) -> Mapping[str, Table]:
        """Return the table ``clients``: each client's values in the last evaluation.

        Columns such as ``own_accuracy`` are of the model that the client uses.
        """
        metrics = sorted({metric for known in self.values.values() for metric in known})
        if not metrics:
            return {}
        own = self._personal.own_values if self._personal else self.values
        of_own = sorted({metric for known in own.values() for metric in known})
        counts = ["train_samples", "val_samples", "test_samples"]
        columns = ["client", "name", *counts, *metrics, *(f"own_{metric}" for metric in of_own)]
        rows: list[list[float | str]] = []
        for client, known in self.values.items():
            values = [known.get(name, "") for name in metrics]
            own_values = [own.get(client, {}).get(name, "") for name in of_own]
            rows.append([client, self._names[client], *self._samples[client], *values, *own_values])
        of_bin = ["low", "high", "samples", "mean_predicted", "observed_share"]
        bins, _ = self._calibration()
        return {"clients": Table(columns, rows), **({"calibration": Table(of_bin, bins)} if bins else {})}

    def figures(self, rows: MetricRows) -> Mapping[str, Drawing]:
        """Return the figures ``clients``, values of the main metric, and ``calibration``."""
        own, main = self._personal.own_values if self._personal else {}, self._main
        models: dict[str, Mapping[int, Mapping[str, float]]]
        models = {"the server's model": self.values, "the client's own model": own}
        known = {
            label: [values.get(client, {}).get(main) for client in self.values]
            for label, values in models.items()
            if any(main in metrics for metrics in values.values())
        }
        draw = partial(client_quality_figure, known, self._names, main)
        figures: dict[str, Drawing] = {"clients": draw} if known else {}
        bins, positive = self._calibration()
        return {**figures, **({"calibration": partial(calibration_figure, bins, positive)} if bins else {})}

    def _calibration(self) -> tuple[list[list[float]], str]:
        """Return the bins, and the name of class 1; an empty name if there are more than two classes."""
        batches = [batch for outputs in self.predictions().values() for batch in outputs]
        labelled = all(scores.ndim == 2 and targets.ndim == 1 for scores, targets in batches)
        if not batches or not labelled or not isinstance(self._task, Classification):
            return [], ""
        scores, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        counted = self._task.counted(scores, targets)
        positive = [*self._classes, "class 0", "class 1"][1] if scores.shape[1] == 2 else ""
        return _calibration_bins(scores[counted], targets[counted]), positive


def _calibration_bins(scores: Tensor, targets: Tensor) -> list[list[float]]:
    """Return the edges, the number of samples, and the predicted and observed shares of each bin."""
    # float32, as in test_predictions.csv: a probability at an edge is in the same bin
    shares = scores.float().softmax(1)
    predicted, right = shares.amax(1), scores.argmax(1) == targets
    if scores.shape[1] == 2:
        predicted, right = shares[:, 1], targets == 1
    if len({*targets.tolist()}) < 2 or not shares.isfinite().all():
        return []
    places = torch.bucketize(predicted.contiguous(), torch.arange(1, _BINS) / _BINS)
    rows: list[list[float]] = []
    for place in sorted({*places.tolist()}):
        inside = places == place
        means = [float(values[inside].double().mean()) for values in (predicted, right)]
        rows.append([place / _BINS, (place + 1) / _BINS, int(inside.sum()), *means])
    return rows
