"""A pass over the clients' training data that measures BN statistics under the server's weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.batch_norm.modes import batch_statistics
from fl_lightning.batch_norm.moments import merge_, total_variance
from fl_lightning.executors.base import client_loss

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule
from fl_lightning.batch_norm.modes import evaluating

Mode = Literal["pooled", "per_client", "per_client_total_variance", "pooled_total_variance"]
"""What :func:`collect` averages.

``pooled``: batch k is the union of all clients' k-th batches; the mean over the batches (HeteroFL's own, which needs the
data in one place). ``pooled_total_variance``: the same batches, and the moments of all their values together.
``per_client``: the mean over all batches of all clients, one after the other, which misses the variance between the
clients. ``per_client_total_variance``: the moments of each client's values, and those of their union by the law of total
variance.

In the first BN layer both total variances are exactly that of all clients' data. What deeper layers see depends on the
batches that those before have normalised with: each client's by itself takes differences between the clients away,
which the union batches keep, so a deeper layer's moments are those of training on the union, and not a client's.
"""

Statistics = dict[str, tuple[Tensor, Tensor]]
"""Mean and variance ``[channels]`` by the qualified name of the BN layer."""

Observer = Callable[[str, Tensor], None]
"""Called with a BN layer's qualified name and the values ``[channels, K]`` that it has normalised."""


@torch.inference_mode(mode=False)  # what data modules keep of it must serve training as well
@torch.no_grad()
def collect(pl_module: "FederatedModule", mode: Mode) -> Statistics:
    """Measure what the BN layers see in one pass of all clients, in the cohort or not, over their training data.

    The weights are the server's; nothing of the model changes. BN layers normalise with the batch, as in training. All
    other layers evaluate, so dropout is off, as it is where the statistics are used (HeteroFL passes in training mode,
    but its networks have no dropout), and the statistics are a function of the weights, the data and their seed alone. The
    batches are those of each client's first epoch, augmented as in training; with ``drop_last`` a remainder is left out.

    Args:
        pl_module: The federated module, attached to a trainer whose federated data are set up.
        mode: What is averaged, see :data:`Mode`. ``pooled`` and ``per_client`` average the unbiased variances of batches,
            as PyTorch's BN with ``momentum=None`` does; the two total variances are biased ones, of all values.

    Returns:
        Mean and variance of each BN layer's inputs.
    """
    if mode == "per_client_total_variance":
        return _union(pl_module)
    batches = _one_by_one(pl_module) if mode == "per_client" else _pooled(pl_module)
    if mode == "pooled_total_variance":
        merged = _Moments()
        _observe(pl_module, batches, merged.add)
        return {layer: (mean, m2 / count) for layer, (count, mean, m2) in merged.of.items()}
    average = _Average()
    _observe(pl_module, batches, average.add)
    return average.statistics


def measured_statistics(trainer: L.Trainer, pl_module: "FederatedModule", mode: Mode) -> dict[str, Tensor]:
    """Running statistics that an evaluation may use in place of the server's: those of a pass, by the buffer's name.

    Nothing before the first round, where the server has learnt none either.
    """
    if trainer.sanity_checking:
        return {}
    if trainer.state.fn != TrainerFn.FITTING:
        pl_module.data.setup("fit")  # validate and test have set up no clients
    statistics = collect(pl_module, mode)
    means = {f"{layer}.running_mean": mean for layer, (mean, _) in statistics.items()}
    return means | {f"{layer}.running_var": variance for layer, (_, variance) in statistics.items()}


class _Average:
    """Cumulative averages of batch means and unbiased batch variances."""

    def __init__(self) -> None:
        self.statistics: Statistics = {}
        self._counts: dict[str, int] = {}

    def add(self, layer: str, values: Tensor) -> None:
        """Add a batch."""
        mean, variance = values.mean(1), values.var(1)
        old = self.statistics.get(layer, (mean, variance))
        count = self._counts[layer] = self._counts.get(layer, 0) + 1
        self.statistics[layer] = old[0] + (mean - old[0]) / count, old[1] + (variance - old[1]) / count


class _Moments:
    """Count, mean and sum of squared deviations of all values of each layer."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def add(self, layer: str, values: Tensor) -> None:
        """Add a batch."""
        zero = torch.zeros_like(values[:, 0])
        merge_(*self.of.setdefault(layer, (zero[0].long(), zero, zero.clone())), values)


def _union(pl_module: "FederatedModule") -> Statistics:
    """Mean and variance over the union of the clients' values, from count, mean and squared deviations of each."""
    clients = []
    for client in range(pl_module.data.num_clients):
        moments = _Moments()
        _observe(pl_module, _one_by_one(pl_module, client), moments.add)
        clients.append(moments.of)
    statistics = {}
    for layer in clients[0]:
        count, mean, m2 = (
            torch.stack(parts) for parts in zip(*(seen[layer] for seen in clients), strict=True)
        )
        statistics[layer] = total_variance(mean, m2 / count.view(-1, 1), count.double() / count.sum())
    return statistics


def _observe(pl_module: "FederatedModule", batches: Iterator[Any], observer: Observer) -> None:
    model, precision = pl_module.model, pl_module.trainer.precision_plugin
    with (
        isolate_rng(),  # what a model draws for itself here, others shall not miss
        evaluating(model),
        batch_statistics(model),
        _hooked(model, observer),
        precision.val_step_context(),
    ):
        for batch in batches:
            client_loss(pl_module, batch)


@contextmanager
def _hooked(model: nn.Module, observer: Observer) -> Iterator[None]:
    handles = [
        layer.register_forward_hook(
            lambda layer, args, _outputs, name=name: observer(
                name, args[0].transpose(0, 1).flatten(1).to(layer.running_mean)
            )
        )
        for name, layer in batch_norm_layers(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _one_by_one(pl_module: "FederatedModule", *clients: int) -> Iterator[Any]:
    """The batches of one epoch of the given clients, or of all, one client after the other."""
    data = pl_module.data
    for client in clients or range(data.num_clients):
        for step in range(data.steps_per_epoch(client)):
            yield _batch(pl_module, [client], step)


def _pooled(pl_module: "FederatedModule") -> Iterator[Any]:
    """The union of all clients' k-th batches for k = 0, 1, ...; clients with fewer batches are absent from the last."""
    data = pl_module.data
    lengths = [data.steps_per_epoch(client) for client in range(data.num_clients)]
    for step in range(max(lengths)):
        yield _batch(pl_module, [client for client, length in enumerate(lengths) if step < length], step)


def _batch(pl_module: "FederatedModule", clients: list[int], step: int) -> Any:
    return pl_module.on_device(
        pl_module.data.cohort_batch(clients, [step] * len(clients)).union().batches()[0]
    )
