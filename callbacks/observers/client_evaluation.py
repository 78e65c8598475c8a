"""Quality of the server's model for each client."""

from collections.abc import Mapping
from math import ceil, isnan
from statistics import fmean, pvariance

import lightning as L

from fl_lightning import FederatedCallback, FederatedModule, Report, Table
from fl_lightning.methods import evaluate_client, formatted


class ClientEvaluation(Report, FederatedCallback):
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

    q-FFL has the same measures (Li et al., "Fair resource allocation in federated learning",
    ICLR 2020, Table 1). After the run, ``clients.csv`` has each client's values of the last
    evaluation, and W&B shows them as a table.

    Attributes:
        values: ``accuracy`` and ``loss`` of each client in the last evaluation, by client id.
            Unknown values are left out.
    """

    paper = "(an observer: measurement only)"
    role = "observer"
    claims = ("weights_of_fedavg", "one_client_is_plain_training")

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Evaluate all clients and log the summary."""
        split = "test" if trainer.testing else pl_module.data.fit_split
        pl_module.evaluation.finish()
        clients = range(pl_module.data.num_clients)
        values = pl_module.ranks.map(lambda client: self._evaluate(pl_module, client, split), clients)
        self.values = dict(zip(clients, values, strict=True))
        for metric, direction in pl_module.task.best.items():
            known = [metrics[metric] for metrics in self.values.values() if metric in metrics]
            if known:
                worst = sorted(known, reverse=direction == "min")[: ceil(len(known) / 10)]
                name = pl_module.metric_name(split, formatted("client_{}", metric))
                pl_module.log(name, fmean(known))
                pl_module.log(f"{name}_worst", fmean(worst))
                pl_module.log(f"{name}_variance", pvariance(known))

    on_test_epoch_end = on_validation_epoch_end  # type: ignore[assignment]  # narrows pl_module

    def _evaluate(self, pl_module: FederatedModule, client: int, split: str) -> dict[str, float]:
        with pl_module.trainer.precision_plugin.val_step_context():
            by_class = pl_module.evaluation.class_quality
            metrics, _ = evaluate_client(pl_module, client, split, pl_module.evaluate_batch, by_class)
        return {name: value for name, value in metrics.items() if not isnan(value)}

    def result_lines(self) -> Mapping[str, str]:
        """Return a line for the result table if some clients or all clients have no value."""
        names = sorted({name for known in self.values.values() for name in known})
        if self.values and not names:
            return {"clients": "not evaluated: they have no evaluation data and no classes"}
        missing = {name: sum(name not in known for known in self.values.values()) for name in names}
        words = [f"{count} of {len(self.values)} have no {name}" for name, count in missing.items() if count]
        return {"clients": f"{', '.join(words)}, and are left out"} if words else {}

    def tables(self) -> Mapping[str, Table]:
        """Return the table ``clients``: each client's values in the last evaluation."""
        metrics = sorted({metric for known in self.values.values() for metric in known})
        rows = [[client, *(known.get(name, "") for name in metrics)] for client, known in self.values.items()]
        return {"clients": Table(["client", *metrics], rows)} if metrics else {}
