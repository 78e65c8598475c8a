"""Measurement of BN statistics in a pass over data, with the server's weights."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fl_lightning.batch_norm.layers import batch_norm_layers, explain_batch_of_one, watching_inputs
from fl_lightning.batch_norm.moments import merge_, moments, total_variance
from fl_lightning.batch_norm.swapping import batch_statistics, evaluating
from fl_lightning.client_data.batches import copied
from fl_lightning.client_data.loaders import every_batch
from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.randomness import derive_seed, seeded

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule

Mode = Literal["pooled", "per_client", "per_client_total_variance", "pooled_total_variance"]
"""Mode of :func:`measured_statistics`: the batches, and the formula for the statistics.

Union batch k is the union of the k-th batches of all clients.

- ``pooled``: Means and variances of the union batches, averaged over all union batches. As in
  HeteroFL, all data must be in one place.
- ``pooled_total_variance``: Mean and variance of all values in the union batches.
- ``per_client``: Means and variances of the clients' batches, averaged over all batches of all
  clients. The variance between clients is left out.
- ``per_client_total_variance``: Mean and variance of all values in the clients' batches, computed
  from the clients' moments by the law of total variance.

In the first BN layer, both modes with a total variance give the variance of all clients' data. In
deeper layers, their results differ, because earlier BN layers normalise with a batch. Normalising
with a client's batch removes differences between clients. Normalising with a union batch keeps
these differences.
"""

Sums = tuple[Tensor, Tensor, Tensor]
"""Three values from which the statistics of a BN layer are computed.

For a total variance, the values are the number of inputs, the mean of the inputs, and the sum of
squared deviations from the mean. For any other mode, the values are the number of batches, the sum
of the batches' means, and the sum of the batches' variances.
"""


@torch.inference_mode(mode=False)  # data modules may cache tensors that training needs
@torch.no_grad()
def measured_statistics(
    trainer: L.Trainer, pl_module: "FederatedModule", mode: Mode | Literal["evaluation"]
) -> dict[str, Tensor]:
    """Measure the inputs of BN layers in one pass over data, with the server's weights.

    The pass does not change the model. BN layers normalise with the batch. Frozen BN layers are not
    measured. All other layers are in eval mode, without dropout. HeteroFL's pass is in training
    mode, but HeteroFL's networks have no dropout.

    A pass over training data uses the batches of each client's first epoch, with the augmentation
    of training. If the loader sets ``drop_last``, an incomplete last batch is left out. The
    statistics depend only on the weights, the data and the data's seed.

    Args:
        trainer: The trainer.
        pl_module: The federated module, attached to the trainer.
        mode: For training data, the batches and the formula, see :data:`Mode`. ``pooled`` and
            ``per_client`` average unbiased variances of batches, as BN with ``momentum=None`` does.
            The other modes give biased variances. ``"evaluation"`` measures the server's current
            evaluation data without labels. As in AdaBN, mean and variance are then computed over
            all values (Li et al., "Revisiting Batch Normalization For Practical Domain Adaptation",
            arXiv 1603.04779).

    Returns:
        Mean and variance of each BN layer's inputs, each ``[channels]``, by buffer name, such as
        ``"bn1.running_mean"``. In Lightning's sanity check before the first round, the result is
        empty.
    """
    if trainer.sanity_checking:
        return {}
    total = mode not in ("pooled", "per_client")
    if mode == "evaluation":
        parts = _evaluation_sums(pl_module, "test" if trainer.testing else "val")
    else:
        if trainer.state.fn != TrainerFn.FITTING:
            pl_module.data.setup("fit")  # trainer.validate and trainer.test set up no clients
        parts = _training_sums(pl_module, mode.startswith("pooled"), total)
    statistics: dict[str, Tensor] = {}
    for layer in dict.fromkeys(layer for part in parts for layer in part):
        seen = zip(*(part[layer] for part in parts if layer in part), strict=True)
        count, mean, spread = map(torch.stack, seen)
        if total:
            mean, spread = total_variance(mean, spread / count.view(-1, 1), count / count.sum())
        else:
            mean, spread = mean.sum(0) / count.sum(), spread.sum(0) / count.sum()
        held = pl_module.model.get_buffer(f"{layer}.running_mean")
        statistics |= {f"{layer}.running_mean": mean.to(held), f"{layer}.running_var": spread.to(held)}
    return statistics


def _training_sums(pl_module: "FederatedModule", pooled: bool, total: bool) -> list[dict[str, Sums]]:
    lengths = [pl_module.data.steps_per_epoch(client) for client in range(pl_module.data.num_clients)]
    if pooled:
        parts = [
            [([client for client, length in enumerate(lengths) if step < length], step)]
            for step in range(max(lengths))
        ]
    else:
        parts = [[([client], step) for step in range(length)] for client, length in enumerate(lengths)]

    def union(clients: list[int], step: int) -> Any:
        return pl_module.data.cohort_batch(clients, [step] * len(clients)).union().batches()[0]

    with _measuring(pl_module, pl_module.client.losses_apart, total) as measure:

        def measured(part: tuple[int, list[tuple[list[int], int]]]) -> dict[str, Sums]:
            return measure(part[0], (union(*clients_and_step) for clients_and_step in part[1]))

        return pl_module.ranks.map(measured, enumerate(parts))


def _evaluation_sums(pl_module: "FederatedModule", split: str) -> list[dict[str, Sums]]:
    ranks = pl_module.ranks

    def forward(batch: Any) -> None:
        with explain_batch_of_one():
            pl_module.client.evaluate_batch(batch, ServerEvaluation())

    with _measuring(pl_module, forward, total=True) as measure:

        def measured() -> list[dict[str, Sums]]:
            loader = getattr(pl_module.data, f"{split}_dataloader")()
            loaders = loader if isinstance(loader, list) else [loader]
            batches = enumerate(chain.from_iterable(map(every_batch, loaders)))
            return [measure(index, [batch]) for index, batch in batches if index % ranks.size == ranks.rank]

        by_rank = ranks.exchange(measured)
    return [by_rank[i % ranks.size][i // ranks.size] for i in range(sum(map(len, by_rank)))]


@contextmanager
def _measuring(
    pl_module: "FederatedModule", forward: Callable[[Any], object], total: bool
) -> Iterator[Callable[[int, Iterable[Any]], dict[str, Sums]]]:
    """Let BN layers measure their inputs until the ``with`` block ends.

    Yield a function that passes batches through the model. The function takes an index, which seeds
    random numbers, and the batches. The function returns the :data:`Sums` of each BN layer, in
    float64 on the CPU.

    Args:
        pl_module: The federated module.
        forward: Function that passes a batch through the model.
        total: Whether to compute the sums for a total variance, see :data:`Sums`.
    """
    model, precision, sums = pl_module.model, pl_module.trainer.precision_plugin, dict[str, Sums]()

    def look(name: str, inputs: Tensor) -> None:
        new = moments(inputs)
        if not total:
            new = 1, new[1], new[2] / (new[0] - 1)
        if name not in sums:
            sums[name] = torch.tensor(float(new[0]), dtype=torch.float64), new[1], new[2]
        elif total:
            merge_(*sums[name], *new)
        else:
            for held, term in zip(sums[name], new, strict=True):
                held.add_(term)  # type: ignore[arg-type]  # a number or a tensor

    def measure(index: int, batches: Iterable[Any]) -> dict[str, Sums]:
        sums.clear()
        # a model may draw random numbers, but must not change the global generators
        with seeded(derive_seed(pl_module.seed, "statistics pass", index)):
            for batch in batches:
                forward(copied(pl_module.on_device(batch)))
        return {n: (count, x.cpu().double(), y.cpu().double()) for n, (count, x, y) in sums.items()}

    tracking = pl_module.tracking_layers
    watched = {name: layer for name, layer in batch_norm_layers(model).items() if layer in tracking}
    with (
        evaluating(model),
        batch_statistics(tracking),
        precision.val_step_context(),
        watching_inputs(watched, look),
    ):
        yield measure
