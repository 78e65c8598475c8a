"""How well the server's model serves each single client."""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean, pvariance
from typing import TYPE_CHECKING

import lightning as L

from fl_lightning import FederatedCallback, Report, Table
from fl_lightning.methods import evaluate_client, weighed_accuracy

if TYPE_CHECKING:
    from fl_lightning import FederatedModule


class ClientEvaluation(Report, FederatedCallback):
    """Evaluate the server's model for each client: mean, worst tenth and variance, with any method; it only looks.

    A client is served with the server's accuracy on data like its own. That is its own ``val_dataloader()`` (or
    ``test_dataloader()``) where it has one; else, where the data module knows each client's class histogram, the server's
    evaluation data with every class weighed as in the client's training data. A client with neither is left out. Losses
    are known of own data only.

    Each evaluation logs ``val/client_accuracy`` (or ``test/``; the mean over the clients, each counts alike),
    ``val/client_accuracy_worst`` (the mean over the tenth of the clients, at least one, that the model serves worst),
    ``val/client_accuracy_variance`` (over the clients, of accuracies in [0, 1]) and, of own data, ``val/client_loss`` likewise, whose
    ``_worst`` are the highest. These are the measures of q-FFL (Li et al., Fair resource allocation in federated learning, ICLR 2020,
    Table 1). At the end ``clients.csv`` has the last evaluation's values by client, and W&B their histogram.

    Attributes:
        values: ``accuracy`` and ``loss`` of each client in the last evaluation, by its id; a value that is not known is left out.
    """

    paper = "(an observer: measurement only)"
    role = "observer"
    claims = ("weights_of_fedavg", "one_client_is_plain_training")

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]  # rounds have one
        """Log what the clients have of the model."""
        split = "test" if trainer.testing else pl_module.data.fit_split
        pl_module.evaluation.finish()
        clients = range(pl_module.data.num_clients)
        values = pl_module.ranks.map(lambda client: self._evaluate(pl_module, client, split), clients)
        self.values = dict(zip(clients, values, strict=True))
        for metric, direction in pl_module.task.best.items():
            sign = 1 if direction == "max" else -1
            found = sorted(
                (own[metric] for own in self.values.values() if metric in own), key=lambda x: sign * x
            )
            if found:
                name = f"{split}/client_{metric}"
                pl_module.log(name, fmean(found))
                pl_module.log(f"{name}_worst", fmean(found[: ceil(len(found) / 10)]))
                pl_module.log(f"{name}_variance", pvariance(found))

    on_test_epoch_end = on_validation_epoch_end  # type: ignore[assignment]  # rounds have one

    def _evaluate(self, pl_module: "FederatedModule", client: int, split: str) -> dict[str, float]:
        with pl_module.trainer.precision_plugin.val_step_context():
            own = evaluate_client(pl_module, client, split, pl_module.evaluate_batch)
        if own is not None:
            return own.metrics
        histograms = pl_module.data.class_histograms() or [[]] * pl_module.data.num_clients
        accuracy = weighed_accuracy(pl_module.evaluation.class_quality, histograms[client])
        return {} if accuracy is None else {pl_module.task.quality: accuracy}

    def tables(self) -> Mapping[str, Table]:
        """The last evaluation's values by client."""
        metrics = sorted({metric for own in self.values.values() for metric in own})
        rows = [[client, *(own.get(metric, "") for metric in metrics)] for client, own in self.values.items()]
        return {"clients": Table(["client", *metrics], rows)} if metrics else {}

    def histograms(self) -> Mapping[str, Sequence[float]]:
        """The clients' accuracies in the last evaluation."""
        metrics = sorted({metric for own in self.values.values() for metric in own} - {"loss"})
        return {
            f"client_{name}": [own[name] for own in self.values.values() if name in own] for name in metrics
        }
