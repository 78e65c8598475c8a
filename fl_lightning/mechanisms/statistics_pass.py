"""A pass over the clients' training data that measures BN statistics under the server's weights."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.batch_norm.moments import merge_, total_variance
from fl_lightning.batch_norm.swapping import batch_statistics, evaluating
from fl_lightning.executors.base import client_loss

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule

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

Batch = tuple[list[int], int]
"""The union of what some clients draw at a local step: clients that have no batch left are absent."""

Observer = Callable[[str, Tensor], None]
"""Called with a BN layer's qualified name and the values ``[channels, K]`` that it has normalised."""


@torch.inference_mode(mode=False)  # what data modules keep of it must serve training as well
@torch.no_grad()
def collect(pl_module: "FederatedModule", mode: Mode) -> Statistics:
    """Measure what the BN layers see in one pass of all clients, in the cohort or not, over their training data.

    The weights are the server's; nothing of the model changes. BN layers normalise with the batch, as in training; those that
    the user has put in eval mode are not measured. All other layers evaluate, so dropout is off, as it is where the statistics are used (HeteroFL passes in training mode,
    but its networks have no dropout), and the statistics are a function of the weights, the data and their seed alone. The
    batches are those of each client's first epoch, augmented as in training; with ``drop_last`` a remainder is left out.

    Args:
        pl_module: The federated module, attached to a trainer whose federated data are set up.
        mode: What is averaged, see :data:`Mode`. ``pooled`` and ``per_client`` average the unbiased variances of batches,
            as PyTorch's BN with ``momentum=None`` does; the two total variances are biased ones, of all values.

    Returns:
        Mean and variance of each BN layer's inputs.
    """
    lengths = [pl_module.data.steps_per_epoch(client) for client in range(pl_module.data.num_clients)]
    if mode.startswith("pooled"):
        parts = [
            [([client for client, length in enumerate(lengths) if step < length], step)]
            for step in range(max(lengths))
        ]
    else:
        parts = [[([client], step) for step in range(length)] for client, length in enumerate(lengths)]
    if mode == "per_client_total_variance":
        return _total(pl_module, parts)
    batches = list(chain.from_iterable(parts))
    return _total(pl_module, [batches]) if mode == "pooled_total_variance" else _average(pl_module, batches)


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


def _average(pl_module: "FederatedModule", batches: Iterable[Batch]) -> Statistics:
    """Cumulative averages of batch means and unbiased batch variances."""
    statistics: Statistics = {}
    counts: dict[str, int] = {}

    def add(layer: str, values: Tensor) -> None:
        mean, variance = values.mean(1), values.var(1)
        old = statistics.get(layer, (mean, variance))
        count = counts[layer] = counts.get(layer, 0) + 1
        statistics[layer] = old[0] + (mean - old[0]) / count, old[1] + (variance - old[1]) / count

    _observe(pl_module, batches, add)
    return statistics


def _total(pl_module: "FederatedModule", parts: Iterable[Iterable[Batch]]) -> Statistics:
    """Mean and variance of all values, from count, mean and sum of squared deviations of each part of the batches."""
    moments = []
    for batches in parts:
        found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

        def add(layer: str, values: Tensor, found: dict[str, tuple[Tensor, Tensor, Tensor]] = found) -> None:
            zero = torch.zeros_like(values[:, 0])
            merge_(*found.setdefault(layer, (zero[0].long(), zero, zero.clone())), values)

        _observe(pl_module, batches, add)
        moments.append(found)
    statistics = {}
    for layer in moments[0]:
        count, mean, m2 = (
            torch.stack(pieces) for pieces in zip(*(seen[layer] for seen in moments), strict=True)
        )
        statistics[layer] = total_variance(mean, m2 / count.view(-1, 1), count.double() / count.sum())
    return statistics


def _observe(pl_module: "FederatedModule", batches: Iterable[Batch], observer: Observer) -> None:
    model, precision = pl_module.model, pl_module.trainer.precision_plugin
    with (
        isolate_rng(),  # what a model draws for itself here, others shall not miss
        evaluating(model),
        batch_statistics(pl_module.tracking_layers),
        precision.val_step_context(),
        ExitStack() as hooks,
    ):
        for name, layer in batch_norm_layers(model).items():
            if layer not in pl_module.tracking_layers:
                continue

            def look(layer: nn.Module, inputs: tuple[Tensor, ...], _outputs: Any, name: str = name) -> None:
                observer(name, inputs[0].transpose(0, 1).flatten(1).to(layer.get_buffer("running_mean")))

            hooks.enter_context(layer.register_forward_hook(look))
        for clients, step in batches:
            union = pl_module.data.cohort_batch(clients, [step] * len(clients)).union()
            client_loss(pl_module, pl_module.on_device(union.batches()[0]))
