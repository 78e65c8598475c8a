"""Base classes of methods whose clients keep local state, such as FedBN and SiloBN."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import lightning as L
import torch
from torch import Tensor

from fl_lightning.batch_norm.kinds import KINDS, buffer_kinds, parameter_kinds
from fl_lightning.cohort.client_memory import ClientMemory
from fl_lightning.cohort.cohort import SERVER
from fl_lightning.cohort.parts import match_parts
from fl_lightning.cohort.rows import buffer_layout, parameter_layout, split_columns
from fl_lightning.errors import ConfigurationError, check_number
from fl_lightning.methods.own_data import evaluate_client, weighed_accuracy
from fl_lightning.methods.variant_evaluation import VariantEvaluation
from fl_lightning.randomness import derive_seed, seeded
from fl_lightning.round.evaluation import ServerEvaluation

if TYPE_CHECKING:
    from fl_lightning.cohort.cohort import Cohort
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

    Args:
        evaluate_clients: Number of clients whose models are evaluated, with evenly spaced ids.
            Default: all clients. Evaluating a client's model takes as long as evaluating the
            server's model.

    Raises:
        ConfigurationError: ``evaluate_clients`` is below 1, or another method also gives clients
            separate models.

    Example:
        >>> class Sharpened(PersonalEvaluation):
        ...     def client_model(self, pl_module, client):
        ...         return {"8.weight": 2 * pl_module.model[8].weight.detach()}
    """

    def __init__(self, evaluate_clients: int | None = None) -> None:
        if evaluate_clients is not None:
            name = f"{type(self).__name__}.evaluate_clients"
            check_number(name, evaluate_clients, " (or null for all)", least=1)
        self.evaluate_clients = evaluate_clients

    def evaluated_clients(self, pl_module: "FederatedModule") -> list[int]:
        """Return the ids of the clients whose models are evaluated."""
        if pl_module.centralised:
            return []
        clients = pl_module.data.num_clients
        count = min(self.evaluate_clients or clients, clients)
        return [index * clients // count for index in range(count)]

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

    def variants(
        self, trainer: L.Trainer, pl_module: "FederatedModule"
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the result of :meth:`client_model` for each evaluated client, by client id."""

        @torch.inference_mode(False)
        @torch.enable_grad()
        def own(client: int) -> tuple[str, Mapping[str, Tensor]]:
            with seeded(derive_seed(pl_module.seed, "client model", client)):
                tensors = self.client_model(pl_module, client)
            return str(client), {name: tensor.detach().cpu() for name, tensor in tensors.items()}

        return dict(pl_module.ranks.map(own, self.evaluated_clients(pl_module)))

    def variant_metrics(
        self, pl_module: "FederatedModule", split: str, evaluations: Mapping[str, ServerEvaluation]
    ) -> Mapping[str, float]:
        """Return metrics averaged over clients, such as ``own_accuracy``, by name."""
        task = pl_module.task
        histograms = pl_module.data.class_histograms() or [[]] * pl_module.data.num_clients

        def own_metrics(name: str) -> tuple[Mapping[str, float | None], bool]:
            evaluate = partial(self.evaluate, pl_module, self._tensors[name])
            own = evaluate_client(pl_module, int(name), split, evaluate)
            if own is None:
                accuracy = weighed_accuracy(evaluations[name].class_quality, histograms[int(name)])
                return {task.class_metric: accuracy}, False
            return own.metrics, own.diverged

        evaluated = pl_module.ranks.map(own_metrics, evaluations)
        pl_module.record.diverge(pl_module.trainer.global_step, any(diverged for _, diverged in evaluated))
        personal = [evaluation.metrics for evaluation in evaluations.values()]
        own = [metrics for metrics, _ in evaluated]
        means = {}
        for metric in dict.fromkeys([task.quality, *task.measured, task.class_metric]):
            for kind, clients in (("personal", personal), ("own", own)):
                if known := [value for metrics in clients if (value := metrics.get(metric)) is not None]:
                    means[f"{kind}_{metric}"] = sum(known) / len(known)
        return means


class LocalState(PersonalEvaluation):
    """Base class of methods whose clients keep some state without sending it.

    A subclass defines ``kinds``. A client starts a round with the local state from the end of its
    previous round. Before the first round, the local state is the initial state. A client's model
    is the server's model with the client's local state. The server's model has the mean of the
    local state over the clients of the last round.

    Args:
        evaluate_clients: Number of clients whose models are evaluated. Default: all clients.

    Raises:
        ConfigurationError: ``evaluate_clients`` is below 1, or the model has no state of ``kinds``.

    Attributes:
        kinds: Kinds of state and parts of the model that clients keep (see
            ``fl_lightning.round.policy``).
        memory: Local state of each client, keyed by client id: a row ``[columns]`` for each block.
            The key ``SERVER`` has the initial state.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> class LocalAffine(LocalState):
        ...     kinds = ("affine",)
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[method := LocalAffine()])
        >>> method.memory[0]["batch_norm"].shape  # client 0's gamma and beta of both BN layers
        torch.Size([20])
    """

    kinds: tuple[str, ...]
    saved = ("memory",)

    def __init__(self, evaluate_clients: int | None = None) -> None:
        super().__init__(evaluate_clients)
        self.memory = ClientMemory()

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that the state of ``kinds`` is local."""
        return dict.fromkeys(self.kinds, "local")

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Check that the model has parameters or buffers of ``kinds``."""
        model = pl_module.model
        parts = [kind for kind in self.kinds if kind not in KINDS]
        match_parts(model, parts, type(self).__name__)
        present = {*parameter_kinds(model).values(), *buffer_kinds(model).values()}
        if self.kinds and not parts and not present.intersection(self.kinds):
            remedy = (
                "" if set(self.kinds) <= {"weight", "buffer"} else ": it needs Batch Normalization, norm: bn"
            )
            raise ConfigurationError(
                f"{type(self).__name__}: the model {type(model).__name__} has no state of the kinds that clients would keep "
                f"({', '.join(self.kinds)}), but {', '.join(kind for kind in KINDS if kind in present)}{remedy}"
            )

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Restore the local state of the round's clients."""
        cohort.recall(self.memory)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Store the local state of the round's clients."""
        cohort.remember(self.memory)

    def variants(
        self, trainer: L.Trainer, pl_module: "FederatedModule"
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the local state of each evaluated client, keyed by client id.

        Before round 1, the local state of every client is empty.
        """
        layout = {
            **parameter_layout(pl_module.model, pl_module.parameter_groups, pl_module.parts),
            **buffer_layout(pl_module.model, pl_module.parts),
        }
        models: dict[str, dict[str, Tensor]] = {}
        for client in self.evaluated_clients(pl_module):
            state = models[str(client)] = {}
            for block, row in self.memory.get(client, self.memory.get(SERVER, {})).items():
                state |= split_columns(row, layout[block].shapes)
        return models
