"""Evaluation of one training run with BN statistics from several sources."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn

from fl_lightning import Cohort, ConfigurationError, FederatedModule
from fl_lightning.aggregation import StatisticsAggregator, require_weighted_mean, sent_statistics
from fl_lightning.batch_norm import SwappedBatchNorm, batch_norm_layers, buffer_kinds, require_batch_norm
from fl_lightning.callbacks.feddna import FedDNA
from fl_lightning.client_data import every_batch
from fl_lightning.cohort import SERVER, ClientMemory, is_finite
from fl_lightning.errors import check_choice, check_number
from fl_lightning.methods import (
    BATCH_STATISTICS,
    Mode,
    Observer,
    VariantEvaluation,
    adapted_state,
    balanced_statistics,
    client_statistics,
    evenly_spaced,
    mean_metrics,
    measured_statistics,
    server_statistics,
    split_statistics,
)
from fl_lightning.round import Classification, ServerEvaluation

_IMPORTANCES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "feddna_kl": FedDNA("kl").aggregate,
    "feddna_reverse_kl": FedDNA("reverse_kl").aggregate,
}
_MEASURED: dict[str, Mode | Literal["evaluation"]] = {
    "static_pooled": "pooled",
    "static_per_client": "per_client",
    "static_total_variance": "per_client_total_variance",
    "test_set": "evaluation",
}
_KEPT = "StatisticsSources"  # key in ``cohort.extra`` of the statistics before an attack
_AGGREGATED = ("moment_matching", *_IMPORTANCES)
_BALANCED = ("balanced", "balanced_labels")
_SOURCES = (*_AGGREGATED, *_MEASURED, "silobn", "batch")


class StatisticsSources(Observer, VariantEvaluation):
    """Observer that evaluates a FedAvg run with the BN statistics of other methods.

    BN in training mode never reads running statistics. FedAvg, moment matching, FedDNA, sBN and
    SiloBN therefore have the same parameters in every round, and differ only in evaluation. A
    single run of FedAvg gives the accuracy of each method as ``val/accuracy_<source>``. This
    accuracy equals, up to rounding, the accuracy of a separate run of the method with the same
    seed. ``val/accuracy`` is the accuracy of FedAvg. The sources are:

    - ``moment_matching``, ``feddna_kl``, ``feddna_reverse_kl``: The server's statistics if this
      method had aggregated statistics in every round. ``moment_matching`` uses the module's
      ``statistics_aggregator``. The FedDNA sources require the weighted mean.
    - ``static_pooled``, ``static_per_client``, ``static_total_variance``: Statistics from a pass
      over the clients' training data at each evaluation (sBN).
    - ``silobn``: The statistics that each client would keep. A client that has not taken part yet
      has the mean over the clients of the last round. The metric is the mean accuracy over the
      clients' models.
    - ``batch``: The statistics of the evaluation batch. The samples are in a fixed random order,
      because a batch of sorted data would have one class.
    - ``test_set``: Statistics from a pass over the evaluation data, without labels, at each
      evaluation (AdaBN: Li et al., arXiv 1603.04779).
    - ``balanced``, ``balanced_labels``: Class-balanced statistics of the evaluation data
      (:func:`~fl_lightning.methods.adaptations.balanced_statistics`), with classes that the model
      predicts, or with the true labels. The latter answer what evaluation would be if label skew did
      not touch the statistics. Both need logits of classes, and must be named in ``sources``.

    ``moment_matching``, the FedDNA sources and ``silobn`` are hypothetical: the run does not use
    these statistics. A run of FedAvg is enough to compute such statistics. After E local steps with
    momentum beta, a client's statistics are the sum of two terms. The first term is (1 - beta)^E
    times the server's statistics; the second term does not depend on the server's statistics.

    The hypothetical sources work only with methods that average statistics. The other sources work
    with every method that has BN.

    Byzantine clients attack the run of FedAvg; attacks on other sources are not simulated. With
    ``silobn``, attackers keep their own statistics, as in a run of SiloBN. Before the first round,
    all sources except ``batch`` are the initial statistics.

    Args:
        sources: List of sources. None selects all except the class-balanced ones.
        evaluate_clients: Number of clients that ``silobn`` evaluates, with evenly spaced ids. None
            selects all clients.

    Raises:
        ConfigurationError: A source is unknown, the model has no running statistics, a BN layer has
            ``momentum=None`` or local statistics, or a FedDNA source is combined with a
            ``statistics_aggregator`` other than the weighted mean.

    Attributes:
        server: Hypothetical statistics of the server for each source, ``[2, channels]``: means and
            variances of all BN layers.
        clients: Hypothetical statistics of each client, by client id:
            ``{"statistics": [2, channels]}``.
    """

    saved = ("server", "clients")

    def __init__(self, sources: Sequence[str] | None = None, evaluate_clients: int | None = None) -> None:
        self.sources, self.evaluate_clients = sources, evaluate_clients
        self._chosen = list(_SOURCES if sources is None else sources)
        for source in self._chosen:
            check_choice("StatisticsSources.sources", source, (*_SOURCES, *_BALANCED))
        self._followed = not {*_MEASURED, *_BALANCED, "batch"}.issuperset(self._chosen)
        if evaluate_clients is not None:
            check_number("StatisticsSources.evaluate_clients", evaluate_clients, " (or null)", least=1)
        self.server: dict[str, Tensor] = {}
        self.clients = ClientMemory()

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that the server averages running statistics, if a source needs this."""
        return {"mean": "averaged", "var": "averaged"} if self._followed else {}

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Check the BN layers and the aggregator, and forget an earlier run's statistics."""
        if not pl_module.trainer.current_epoch:
            self.server, self.clients = {}, ClientMemory()
        require_batch_norm(pl_module.model, "StatisticsSources", momentum=self._followed)
        for layer in batch_norm_layers(pl_module.model).values() if self._followed else ():
            if isinstance(layer, SwappedBatchNorm) and not layer.linear:
                raise ConfigurationError(
                    f"callbacks {layer.method} and StatisticsSources cannot be combined, as {layer.method} averages statistics in another "
                    f"way; use only the sources {', '.join((*_MEASURED, 'batch'))}"
                )
        balanced = [source for source in self._chosen if source in _BALANCED]
        classifies = isinstance(pl_module.task, Classification)
        if balanced and not classifies:
            raise ConfigurationError(
                f"StatisticsSources.sources: {balanced[0]} needs one class for each sample, and a model that returns class scores; leave "
                "it out"
            )
        if importances := [source for source in self._chosen if source in _IMPORTANCES]:
            does = f"sums statistics with importances for {', '.join(importances)} (leave them out of its sources)"
            require_weighted_mean(pl_module, "StatisticsSources", does, ["statistics_aggregator"])

    def on_round_start(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Copy the server's statistics and counters at the start of the round."""
        if not self._followed:
            return
        for name in batch_norm_layers(pl_module.model):
            if cohort.treatments[f"{name}.running_mean"] == "local":
                raise ConfigurationError(
                    f"StatisticsSources: BN layer {name!r} is local; leave the layer out of the head, or use only the sources "
                    f"{', '.join((*_MEASURED, 'batch'))}"
                )
        self._start = server_statistics(cohort)
        counters = cohort.names("counter")
        self._counters = {name: cohort.server_buffers[name].clone() for name in counters}
        if "silobn" in self._chosen:
            cohort.extra[_KEPT] = client_statistics(cohort).movedim(1, 0).contiguous()

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Copy the statistics of clients that finish, before an attack replaces what they send."""
        done = [row for row, steps in enumerate(cohort.local_steps) if steps == step + 1]
        if done and "silobn" in self._chosen:
            statistics = client_statistics(cohort)
            for row in done:  # a list of rows as an index would make the CPU wait for a GPU
                cohort.extra[_KEPT][row] = statistics[:, row]

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Update the hypothetical statistics of the server and of the round's clients."""
        if not self._followed:
            return
        start, end = self._start, client_statistics(cohort)
        share = _server_share(pl_module.model, cohort, self._counters).to(end)
        for source in (source for source in self._chosen if source in _AGGREGATED):
            before = self.server.get(source, start).to(start)
            moved = end + share * (before - start).unsqueeze(1)
            if source in _IMPORTANCES:
                self.server[source] = torch.stack(_IMPORTANCES[source](moved[0], moved[1], cohort.weights))
            else:
                self.server[source] = _combined(cohort, moved, pl_module.statistics, between=1.0)
        if "silobn" in self._chosen:
            self.clients.setdefault(SERVER, {"statistics": start})
            local = [self._local_statistics(client).to(start) for client in cohort.client_ids]
            shift = share * (torch.stack(local, 1) - start.unsqueeze(1))
            rows = cohort.extra[_KEPT].movedim(0, 1) + shift
            for index, client in enumerate(cohort.client_ids):
                if is_finite(entry := {"statistics": rows[:, index].clone()}):
                    self.clients[client] = entry
            self.server["silobn"] = _combined(cohort, end + shift, pl_module.statistics, between=0.0)

    def variants(self, trainer: L.Trainer, pl_module: FederatedModule) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the statistics of each source, and of each client for ``silobn``."""
        variants: dict[str, Mapping[str, Tensor]] = {}
        for source in self._chosen:
            if source == "batch":
                variants[source] = BATCH_STATISTICS
            elif source in _BALANCED:
                variants[source] = _balanced(pl_module, source, trainer.testing)
            elif source in _MEASURED:
                variants[source] = measured_statistics(trainer, pl_module, _MEASURED[source])
            elif source == "silobn":
                clients = 0 if pl_module.centralised else pl_module.data.num_clients
                for client in evenly_spaced(self.evaluate_clients, clients):
                    seen = client in self.clients
                    statistics = self._local_statistics(client) if seen else self.server.get(source)
                    variants[f"silobn {client}"] = _by_name(pl_module, statistics)
            else:
                variants[source] = _by_name(pl_module, self.server.get(source))
        return variants

    def variant_metrics(
        self, pl_module: FederatedModule, split: str, evaluations: Mapping[str, ServerEvaluation]
    ) -> Mapping[str, float]:
        """Return loss and accuracy of each source, averaged over the clients for ``silobn``."""
        by_source: dict[str, list[Mapping[str, float]]] = {}
        for name, evaluation in evaluations.items():
            by_source.setdefault(name.split()[0], []).append(evaluation.metrics)
        means: dict[str, float] = {}
        for source, models in by_source.items():
            means |= mean_metrics(models, models[0], f"{{}}_{source}")
        return means

    def _local_statistics(self, client: int) -> Tensor:
        """Return a client's hypothetical statistics, which start from the initial statistics."""
        return (self.clients.get(client) or self.clients[SERVER])["statistics"]


def _combined(cohort: Cohort, moved: Tensor, run: StatisticsAggregator, between: float) -> Tensor:
    """Aggregate the clients' statistics by the run's rule.

    Args:
        cohort: The cohort.
        moved: Means and variances of the clients, ``[2, C, channels]``.
        run: The run's aggregator of statistics.
        between: Factor of the variance between clients: 1 as in :class:`MomentMatching`, or 0 as in
            :class:`SiloBN`.

    Returns:
        The server's means and variances, ``[2, channels]``.
    """
    pieces = split_statistics(cohort.server_buffers, cohort.buffer_kinds, *moved)
    layers = sent_statistics(pieces, cohort.buffer_kinds, cohort.weights, between)
    # use a copy: the run's aggregator counts clamped values
    pairs = StatisticsAggregator(run.rule, run.domain)([*layers.values()])
    return torch.stack([torch.cat(values) for values in zip(*pairs, strict=True)])


def _server_share(model: nn.Module, cohort: Cohort, before: Mapping[str, Tensor]) -> Tensor:
    """Return the weight ``(1 - beta)^steps``, ``[C, channels]``, with each layer's momentum beta.

    This is the weight of the server's old statistics in a client's statistics after the local
    steps.

    Args:
        model: The model.
        cohort: The cohort after its local steps.
        before: The counters of the server's BN layers before the local steps, by buffer name.
    """
    shares = []
    for name, layer in batch_norm_layers(model).items():
        counter = f"{name}.num_batches_tracked"
        share = (1 - (layer.momentum or 0.0)) ** (cohort.buffers[counter] - before[counter]).double()
        shares.append(share.unsqueeze(1).expand(-1, layer.num_features))
    return torch.cat(shares, 1)


def _balanced(pl_module: FederatedModule, source: str, testing: bool) -> dict[str, Tensor]:
    """Return class-balanced statistics of the server's evaluation data, as buffers by name."""
    loader: Any = pl_module.data.test_dataloader() if testing else pl_module.data.val_dataloader()
    labels = (pl_module.on_device(labels) for _, labels in every_batch(loader))
    adapt = partial(balanced_statistics, labels=labels if source == "balanced_labels" else None)
    state = adapted_state(pl_module, adapt, loader, source)
    return {
        name: state[name] for name, kind in buffer_kinds(pl_module.model).items() if kind in ("mean", "var")
    }


def _by_name(pl_module: FederatedModule, statistics: Tensor | None) -> dict[str, Tensor]:
    """Return statistics ``[2, channels]`` as buffers by name; an empty dict for None."""
    if statistics is None:
        return {}
    model = pl_module.model
    return split_statistics(dict(model.named_buffers()), buffer_kinds(model), *statistics)
