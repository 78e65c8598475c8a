"""A pass over the clients' training data, or over evaluation data, that measures BN statistics under the server's weights."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from fl_lightning.batch_norm.layers import batch_norm_layers, explain_batch_of_one
from fl_lightning.batch_norm.moments import merge_, moments, total_variance
from fl_lightning.batch_norm.swapping import batch_statistics, evaluating
from fl_lightning.execution.base import client_loss
from fl_lightning.randomness import derive_seed, seeded
from fl_lightning.round.evaluation import ServerEvaluation

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

Sums = tuple[Tensor, Tensor, Tensor]
"""Of the values as a whole: count, mean and sum of squared deviations. Else of batches: number, sum of means, of unbiased variances."""


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
    whole = mode.endswith("total_variance")

    def union(clients: list[int], step: int) -> Any:
        return pl_module.data.cohort_batch(clients, [step] * len(clients)).union().batches()[0]

    with _measuring(pl_module, partial(client_loss, pl_module), whole) as measure:

        def measured(part: tuple[int, list[tuple[list[int], int]]]) -> dict[str, Sums]:
            # clients that have no batch left at a step are absent
            return measure(part[0], (union(*clients_and_step) for clients_and_step in part[1]))

        return _joined(pl_module, pl_module.ranks.map(measured, enumerate(parts)), whole)


@torch.no_grad()
def collect_evaluation(pl_module: "FederatedModule", split: str) -> Statistics:
    """Measure what the BN layers see in one pass over the server's evaluation data, whose labels are not used.

    The weights are the server's and BN layers normalise with the batch, as in :func:`collect`; the moments are those of all
    values together. Li et al., "Revisiting Batch Normalization For Practical Domain Adaptation", arXiv 1603.04779 (AdaBN),
    evaluate with them.

    Args:
        pl_module: The federated module, attached to a trainer whose federated data are set up.
        split: ``"val"`` or ``"test"``: whose data.

    Returns:
        Mean and biased variance of each BN layer's inputs.
    """
    ranks = pl_module.ranks

    def forward(batch: Any) -> None:
        with explain_batch_of_one():
            pl_module.evaluate_batch(batch, ServerEvaluation())

    with _measuring(pl_module, forward, whole=True) as measure:

        def measured() -> list[dict[str, Sums]]:
            batches = enumerate(getattr(pl_module.data, f"{split}_dataloader")())
            return [measure(index, [batch]) for index, batch in batches if index % ranks.size == ranks.rank]

        found = ranks.exchange(measured)
    in_order = [found[i % ranks.size][i // ranks.size] for i in range(sum(map(len, found)))]
    return _joined(pl_module, in_order, whole=True)


def measured_statistics(
    trainer: L.Trainer, pl_module: "FederatedModule", mode: Mode | Literal["evaluation"]
) -> dict[str, Tensor]:
    """Running statistics that an evaluation may use in place of the server's: those of a pass, by the buffer's name.

    Of a pass over the clients' data, or with ``"evaluation"`` of :func:`collect_evaluation` over the data of the evaluation
    under way. Nothing before the first round, where the server has learnt none either.
    """
    if trainer.sanity_checking:
        return {}
    if mode == "evaluation":
        split = "test" if trainer.testing else "val"
        statistics = collect_evaluation(pl_module, split)
    else:
        if trainer.state.fn != TrainerFn.FITTING:
            pl_module.data.setup("fit")  # validate and test have set up no clients
        statistics = collect(pl_module, mode)
    means = {f"{layer}.running_mean": mean for layer, (mean, _) in statistics.items()}
    return means | {f"{layer}.running_var": variance for layer, (_, variance) in statistics.items()}


@contextmanager
def _measuring(
    pl_module: "FederatedModule", forward: Callable[[Any], object], whole: bool
) -> Iterator[Callable[[int, Iterable[Any]], dict[str, Sums]]]:
    """What gives the sums over the forward passes of some batches by BN layer, on the CPU, where all ranks have them in float64."""
    model, precision, found = pl_module.model, pl_module.trainer.precision_plugin, dict[str, Sums]()

    def look(layer: nn.Module, inputs: tuple[Tensor, ...], _outputs: Any, name: str) -> None:
        new = moments(inputs[0].transpose(0, 1).flatten(1).to(layer.get_buffer("running_mean")))
        if not whole:
            new = 1, new[1], new[2] / (new[0] - 1)
        if name not in found:
            found[name] = torch.tensor(float(new[0]), dtype=torch.float64), new[1], new[2]
        elif whole:
            merge_(*found[name], *new)
        else:
            for total, one in zip(found[name], new, strict=True):
                total.add_(one)  # type: ignore[arg-type]  # a number or a tensor

    def measure(index: int, batches: Iterable[Any]) -> dict[str, Sums]:
        found.clear()
        # what a model draws for itself here, others shall not miss
        with seeded(derive_seed(pl_module.seed, "statistics pass", index)):
            for batch in batches:
                forward(pl_module.on_device(batch))
        return {name: _on_cpu(*own) for name, own in found.items()}

    with (
        evaluating(model),
        batch_statistics(pl_module.tracking_layers),
        precision.val_step_context(),
        ExitStack() as hooks,
    ):
        for name, layer in batch_norm_layers(model).items():
            if layer in pl_module.tracking_layers:
                hooks.enter_context(layer.register_forward_hook(partial(look, name=name)))
        yield measure


def _joined(pl_module: "FederatedModule", parts: list[dict[str, Sums]], whole: bool) -> Statistics:
    """Mean and variance of each BN layer from the sums of the parts."""
    statistics = {}
    for layer in dict.fromkeys(layer for part in parts for layer in part):
        seen = zip(*(part[layer] for part in parts if layer in part), strict=True)
        count, mean, spread = map(torch.stack, seen)
        if whole:
            mean, spread = total_variance(mean, spread / count.view(-1, 1), count / count.sum())
        else:
            mean, spread = mean.sum(0) / count.sum(), spread.sum(0) / count.sum()
        held = pl_module.model.get_buffer(f"{layer}.running_mean")
        statistics[layer] = mean.to(held), spread.to(held)
    return statistics


def _on_cpu(count: Tensor, mean: Tensor, spread: Tensor) -> Sums:
    return count, mean.cpu().double(), spread.cpu().double()
