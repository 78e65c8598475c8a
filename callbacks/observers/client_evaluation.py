"""Quality of each client's model, and of the server's model for each client."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isnan

import lightning as L
from torch import Tensor

from fl_lightning import FederatedModule, Report, Table
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
from fl_lightning.pictures import client_quality_figure


class ClientEvaluation(Report, Observer):
    """Observer that evaluates the server's model for each client.

    The data module decides how a client is evaluated:

    - If the client has a ``val_dataloader()`` (or ``test_dataloader()``), accuracy and loss are
      measured on this loader's data.
    - If only the client's class histogram is known, the accuracy is estimated on the server's
      evaluation data. Classes are weighted by their frequency in the client's training data. The
      loss is left out.
    - Otherwise the client is left out. A client whose value is NaN is also left out. The result
      table says how many clients are left out.

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
    numbers of training, validation and test samples, and values of the last evaluation. W&B shows
    them as well. For clients with names and own test data, ``test_predictions.csv`` has a line for
    each test sample, with the prediction of the model that its client uses. W&B does not get it.

    Attributes:
        values: ``accuracy`` and ``loss`` of the server's model for each client in the last
            evaluation, by client id. Unknown values are left out.
    """

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self._outputs: dict[int, Sequence[tuple[Tensor, Tensor]]] = {}
        self._personal: PersonalEvaluation | None = None
        self._names: Sequence[str] = ()
        self._main = ""

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
        self._samples = [
            [data.num_examples(x), *(data.own_size(x, part) for part in ("val", "test"))] for x in clients
        ]
        self._main = main_metric(pl_module.task, values)
        for form in ("client_{}", *([] if self._personal else ["own_{}"])):
            for name, value in spread_over_clients(values, pl_module.task.best, form).items():
                pl_module.log(pl_module.client.metric_name(split, name), value)
        for name, value in (pooled_metrics(pl_module, results) if self._personal is None else {}).items():
            pl_module.log(pl_module.client.metric_name(split, name), value)

    on_test_epoch_end = on_validation_epoch_end  # type: ignore[assignment]  # narrows pl_module

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
        """Return a line for the result table if some clients or all clients have no value."""
        names = sorted({name for known in self.values.values() for name in known})
        if self.values and not names:
            return {"clients": "not evaluated: they have no evaluation data and no classes"}
        missing = {name: sum(name not in known for known in self.values.values()) for name in names}
        words = [f"{count} of {len(self.values)} have no {name}" for name, count in missing.items() if count]
        return {"clients": f"{', '.join(words)}, and are left out"} if words else {}

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
        return {"clients": Table(columns, rows)}

    def figures(self, rows: MetricRows) -> Mapping[str, Drawing]:
        """Return the figure ``clients``: each client's values of the main metric."""
        own, main = self._personal.own_values if self._personal else {}, self._main
        models: dict[str, Mapping[int, Mapping[str, float]]]
        models = {"the server's model": self.values, "the client's own model": own}
        known = {
            label: [values.get(client, {}).get(main) for client in self.values]
            for label, values in models.items()
            if any(main in metrics for metrics in values.values())
        }
        draw = partial(client_quality_figure, known, self._names, main)
        return {"clients": draw} if known else {}
