"""Clients that keep part of the state to themselves: the mechanism of FedBN, SiloBN and their like."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L
from torch import Tensor

from fl_lightning.batch_norm.kinds import KINDS, buffer_kinds, parameter_kinds
from fl_lightning.cohort.client_memory import ClientMemory
from fl_lightning.cohort.cohort import SERVER
from fl_lightning.cohort.rows import buffer_layout, parameter_layout, split_columns
from fl_lightning.errors import ConfigurationError, check_choice
from fl_lightning.methods.variant_evaluation import VariantEvaluation
from fl_lightning.randomness import derive_seed, seeded
from fl_lightning.round.evaluation import ServerEvaluation

if TYPE_CHECKING:
    from fl_lightning.cohort.cohort import Cohort
    from fl_lightning.round.module import FederatedModule


class LocalState(VariantEvaluation):
    """A method whose clients keep the state of some kinds: it is neither averaged nor sent.

    A subclass names the ``kinds``. A client starts a round with what it ended its last one with, its first round with the
    initial state. There is then one model per client, the server's with what the client keeps, and all of them are
    evaluated with the server's own model, whose copy of local state is the mean over the round's clients:

    - ``val/personal_accuracy`` (or ``test/``): the mean over the clients' models on the server's evaluation data.
    - ``val/own_accuracy``: the mean over the clients of each one's model on data like its own. That is the client's own
      ``val_dataloader()`` (or ``test_dataloader()``) where it has one; else, where the data module knows each client's
      class histogram, the server's evaluation data with every class weighed as in the client's training data. Left out
      where there is neither.

    A client that never took part has the initial state. In a centralised run there are no clients to evaluate.

    Args:
        evaluate_clients: How many clients' models are evaluated, evenly spaced by id; each costs as much as the server's
            own evaluation. Default: all.

    Raises:
        ConfigurationError: ``evaluate_clients`` is below 1, there is no such kind, or the model has no state of these kinds.

    Attributes:
        kinds: The kinds of state that clients keep (see ``fl_lightning.round.policy``).
        memory: What each client keeps, by its id: a row ``[columns]`` for each block; ``SERVER`` is the initial state.
    """

    kinds: ClassVar[tuple[str, ...]]

    def __init__(self, evaluate_clients: int | None = None) -> None:
        if evaluate_clients is not None and evaluate_clients < 1:
            raise ConfigurationError(
                f"{type(self).__name__}.evaluate_clients: {evaluate_clients} must be at least 1 (or null for all)"
            )
        self.evaluate_clients = evaluate_clients
        self.memory = ClientMemory()

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """These kinds are local."""
        return dict.fromkeys(self.kinds, "local")

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Check that there is something to keep."""
        model = pl_module.model
        for kind in self.kinds:
            check_choice(f"{type(self).__name__}.kinds", kind, KINDS)
        present = {*parameter_kinds(model).values(), *buffer_kinds(model).values()}
        if not present.intersection(self.kinds):
            remedy = (
                "" if set(self.kinds) <= {"weight", "buffer"} else ": it needs Batch Normalization, norm: bn"
            )
            raise ConfigurationError(
                f"{type(self).__name__}: the model {type(model).__name__} has no state of the kinds that clients would keep "
                f"({', '.join(self.kinds)}), but {', '.join(kind for kind in KINDS if kind in present)}{remedy}"
            )

    def on_round_start(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Each client takes up what it kept."""
        cohort.recall(self.memory)

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Each client keeps its own."""
        cohort.remember(self.memory)

    def state_dict(self) -> dict[str, Any]:
        """What each client keeps."""
        return {"memory": self.memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what the clients of a checkpoint kept."""
        self.memory = ClientMemory(state_dict["memory"])

    def evaluated_clients(self, pl_module: "FederatedModule") -> list[int]:
        """The clients whose models are evaluated."""
        if pl_module.centralised:
            return []
        clients = pl_module.data.num_clients
        count = min(self.evaluate_clients or clients, clients)
        return [index * clients // count for index in range(count)]

    def variants(
        self, trainer: L.Trainer, pl_module: "FederatedModule"
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Each client's model by its id: what the client keeps, which is nothing before the first round."""
        layout = {
            **parameter_layout(pl_module.model, pl_module.parameter_groups),
            **buffer_layout(pl_module.model),
        }
        found: dict[str, dict[str, Tensor]] = {}
        for client in self.evaluated_clients(pl_module):
            state = found[str(client)] = {}
            for block, row in self.memory.get(client, self.memory.get(SERVER, {})).items():
                state |= split_columns(row, layout[block].shapes)
        return found

    def variant_metrics(
        self, pl_module: "FederatedModule", split: str, evaluations: Mapping[str, ServerEvaluation]
    ) -> Mapping[str, float]:
        """Return ``personal_accuracy`` and ``own_accuracy``, or the quality of another task, and further metrics likewise."""
        quality = pl_module.task.quality
        histograms = pl_module.data.class_histograms() or [[]] * pl_module.data.num_clients

        def own_metrics(name: str) -> tuple[Mapping[str, float | None], bool]:
            evaluate = partial(self.evaluate, pl_module, self._tensors[name])
            own = evaluate_client(pl_module, int(name), split, evaluate)
            if own is None:
                accuracy = weighed_accuracy(evaluations[name].class_quality, histograms[int(name)])
                return {quality: accuracy}, False
            return own.metrics, own.diverged

        evaluated = pl_module.ranks.map(own_metrics, evaluations)
        pl_module.record.diverge(pl_module.trainer.global_step, any(diverged for _, diverged in evaluated))
        personal = [evaluation.metrics for evaluation in evaluations.values()]
        own = [metrics for metrics, _ in evaluated]
        means = {}
        for metric in dict.fromkeys([quality, *pl_module.task.measured]):
            for kind, clients in (("personal", personal), ("own", own)):
                if known := [value for metrics in clients if (value := metrics.get(metric)) is not None]:
                    means[f"{kind}_{metric}"] = sum(known) / len(known)
        return means


def evaluate_client(
    pl_module: "FederatedModule",
    client: int,
    split: str,
    evaluate: Callable[[Any, ServerEvaluation], None],
) -> ServerEvaluation | None:
    """Evaluate a client's own data, on the rank that calls it.

    Args:
        pl_module: The federated module.
        client: The client.
        split: ``"val"`` or ``"test"``.
        evaluate: Adds a batch to an evaluation. What it, data set and loader draw is a function of seed and client.

    Returns:
        The finished evaluation, None where the client has no data for it.
    """
    own = ServerEvaluation()
    with seeded(derive_seed(pl_module.seed, "own evaluation", client)):
        loader = pl_module.data.own_dataloader(client, split)
        if loader is None:
            return None
        for batch in loader:
            evaluate(pl_module.on_device(batch), own)
    own.finish()
    return own


def weighed_accuracy(class_accuracy: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Accuracy on data whose classes occur in given proportions.

    Args:
        class_accuracy: Accuracy on each class, None for a class without samples, which is left out.
        weights: How often each class occurs, in any unit.

    Returns:
        The accuracy; None where no class with samples has a weight.
    """
    known = [(a, w) for a, w in zip(class_accuracy, weights, strict=False) if a is not None]
    total = sum(weight for _, weight in known)
    return sum(accuracy * weight for accuracy, weight in known) / total if total else None
