"""Base class of methods that give each client a separate model, whose accuracies are logged."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import lightning as L
import torch
from torch import Tensor

from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.errors import ConfigurationError, check_number
from fl_lightning.methods.own_data import (
    ClientResult,
    evaluate_client,
    evenly_spaced,
    mean_metrics,
    pooled_metrics,
    spread_over_clients,
)
from fl_lightning.methods.variant_evaluation import VariantEvaluation
from fl_lightning.randomness import derive_seed, seeded

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule


class PersonalEvaluation(VariantEvaluation):
    """Base class of methods that give each client a separate model.

    A subclass defines :meth:`client_model`. Gradients are enabled in this method. Its random numbers
    depend only on the run's seed and the client. Evaluations of
    the server's model also evaluate the clients' models, except in a centralised run. Two metrics
    are logged under ``val/`` or ``test/``:

    - ``personal_accuracy``: Mean accuracy of the clients' models on the server's evaluation data.
    - ``own_accuracy``: Mean accuracy of the clients' models on the clients' own evaluation data.
      These data come from the client's ``val_dataloader()`` or ``test_dataloader()``. A client
      without such a loader uses the server's evaluation data, with classes weighted as in the
      client's class histogram. Without a class histogram, the metric is left out.
      With the observer ``ClientEvaluation``, ``own_accuracy_worst`` is the mean over the worst tenth
      of the clients, ``own_accuracy_variance`` the variance over the clients, and
      ``pooled_accuracy`` the accuracy over all clients' samples together.

    Args:
        evaluate_clients: Number of clients whose models are evaluated, with evenly spaced ids.
            Default: all clients. Evaluating a client's model takes as long as evaluating the
            server's model.

    Attributes:
        own_results: Evaluation of each evaluated client's model on the client's own data in the
            last evaluation, by client id.

    Raises:
        ConfigurationError: ``evaluate_clients`` is below 1, or another method also gives clients
            separate models.

    Example:
        >>> class Sharpened(PersonalEvaluation):
        ...     def client_model(self, pl_module, client):
        ...         return {"8.weight": 2 * pl_module.model[8].weight.detach()}
    """

    measures_spread = False
    """Whether metrics of the worst clients are logged. ``ClientEvaluation`` sets this to True."""

    def __init__(self, evaluate_clients: int | None = None) -> None:
        if evaluate_clients is not None:
            name = f"{type(self).__name__}.evaluate_clients"
            check_number(name, evaluate_clients, " (or null for all)", least=1)
        self.evaluate_clients = evaluate_clients
        self.own_results: dict[int, ClientResult] = {}

    @property
    def own_values(self) -> dict[int, Mapping[str, float]]:
        """Metrics of each evaluated client's model on the client's own data, by client id."""
        return {client: result.metrics for client, result in self.own_results.items()}

    def evaluated_clients(self, pl_module: "FederatedModule") -> list[int]:
        """Return the ids of the clients whose models are evaluated."""
        if pl_module.centralised:
            return []
        return evenly_spaced(self.evaluate_clients, pl_module.data.num_clients)

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Check that no other method gives clients separate models."""
        for other in pl_module.federated_callbacks:
            if other is not self and isinstance(other, PersonalEvaluation):
                raise ConfigurationError(
                    f"callbacks {type(self).__name__} and {type(other).__name__} cannot be combined: both give clients models; use one of them"
                )

    def client_model(self, pl_module: "FederatedModule", client: int) -> Mapping[str, Tensor]:
        """Return, by name, the tensors of a client's model that differ from the server's model."""
        raise NotImplementedError(f"{type(self).__name__} must define client_model(pl_module, client)")

    @torch.inference_mode(False)
    @torch.enable_grad()
    def state_of_client(self, pl_module: "FederatedModule", client: int) -> Mapping[str, Tensor]:
        """Return the result of :meth:`client_model` on the CPU, with seeded random numbers."""
        with seeded(derive_seed(pl_module.seed, "client model", client)):
            tensors = self.client_model(pl_module, client)
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    def variants(
        self, trainer: L.Trainer, pl_module: "FederatedModule"
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the result of :meth:`client_model` for each evaluated client, by client id."""

        def own(client: int) -> tuple[str, Mapping[str, Tensor]]:
            return str(client), self.state_of_client(pl_module, client)

        return dict(pl_module.ranks.map(own, self.evaluated_clients(pl_module)))

    def variant_metrics(
        self, pl_module: "FederatedModule", split: str, evaluations: Mapping[str, ServerEvaluation]
    ) -> Mapping[str, float]:
        """Return metrics averaged over clients, such as ``own_accuracy``, by name."""
        keep = self.measures_spread and pl_module.trainer.testing

        def own_metrics(name: str) -> ClientResult:
            tensors, quality = self._tensors[name], evaluations[name].class_quality
            evaluate = partial(self.evaluate, pl_module, tensors)
            return evaluate_client(pl_module, int(name), split, evaluate, quality, tensors, keep)

        evaluated, task = pl_module.ranks.map(own_metrics, evaluations), pl_module.task
        pl_module.record.diverge(pl_module.trainer.global_step, any(x.diverged for x in evaluated))
        personal = [evaluation.metrics for evaluation in evaluations.values()]
        known = dict.fromkeys([task.quality, *task.measured, task.class_metric])
        names = None if pl_module.client.logs_itself else known
        clients = [result.metrics for result in evaluated]
        kept = (result._replace(entries={}) for result in evaluated)
        self.own_results = dict(zip(map(int, evaluations), kept, strict=True))
        own = mean_metrics(clients, names, "own_{}")
        if self.measures_spread:
            own = (
                spread_over_clients(clients, task.best, "own_{}") | own | pooled_metrics(pl_module, evaluated)
            )
        return mean_metrics(personal, names, "personal_{}") | own
