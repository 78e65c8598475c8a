"""Evaluation on clients' own data, and adaptation of the server's model to unlabelled data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from math import ceil, isnan, nan
from statistics import fmean, pvariance
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fl_lightning.batch_norm.layers import batch_norm_layers, explain_batch_of_one, watching_inputs
from fl_lightning.batch_norm.moments import merge_, moments
from fl_lightning.batch_norm.swapping import batch_statistics
from fl_lightning.client_data.batches import copied
from fl_lightning.client_data.loaders import every_batch
from fl_lightning.clients.evaluation import Entries, ServerEvaluation
from fl_lightning.errors import doing
from fl_lightning.randomness import derive_seed, seeded

if TYPE_CHECKING:
    from fl_lightning.clients.tasks import Task
    from fl_lightning.round.module import FederatedModule

Adaptation = Callable[[nn.Module, Iterable[Any]], object]
"""Function that adapts a model in place to the inputs of evaluation data.

The arguments are the model and the batches. The model is a copy of the server's model in eval mode.
The batches have no labels, and can be iterated only once. Gradients are enabled.
"""


def adapted_state(
    pl_module: "FederatedModule", adapt: Adaptation, loader: Iterable[Any], name: str, client: int = -1
) -> dict[str, Tensor]:
    """Return the parameters and buffers of an adapted copy of the server's model.

    The adaptation does not change the server's model or the random numbers of training.

    Args:
        pl_module: The federated module.
        adapt: The adaptation.
        loader: Batches of evaluation data. Only the first entry of each batch, the inputs, is used.
        name: Name of the adaptation. Its random numbers depend on the seed, the name, the round and
            the client.
        client: Id of the client that owns the data, or -1 for the server.
    """

    def inputs() -> Iterator[Any]:
        several = client < 0 and isinstance(loader, list)  # several loaders, not a list of batches
        for batch in chain.from_iterable(map(every_batch, loader if several else [loader])):
            batch = pl_module.on_device(batch)
            batch = batch[0] if isinstance(batch, list | tuple) else batch
            # copy: autograd rejects tensors that a loader has cached in inference mode
            yield copied(batch)

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        seeded(derive_seed(pl_module.seed, f"adaptation {name}", pl_module.trainer.global_step, client)),
        pl_module.trainer.precision_plugin.val_step_context(),
        doing(lambda: f"{name} of {'the server' if client < 0 else pl_module.named(client)}"),
        explain_batch_of_one(),
    ):
        model = deepcopy(pl_module.model).eval()
        adapt(model, inputs())
        return {n: x.detach() for n, x in (*model.named_parameters(), *model.named_buffers())}


@torch.no_grad()
def adapt_statistics(model: nn.Module, batches: Iterable[Any]) -> None:
    """Set each BN layer's running statistics to the mean and biased variance of its inputs.

    During this pass, BN layers normalise with the batch. The result for every BN layer after the
    first therefore depends on the composition of the batches.

    Args:
        model: The model, changed in place.
        batches: Batches of model inputs.
    """
    layers, seen = batch_norm_layers(model), dict[str, Tensor]()

    def look(name: str, inputs: Tensor) -> None:
        count, mean, spread = seen.setdefault(name, inputs.new_zeros(3, len(inputs)))
        merge_(count, mean, spread, *moments(inputs))

    with batch_statistics([*layers.values()]), watching_inputs(layers, look):
        for inputs in batches:
            model(inputs)
    for name, (count, mean, spread) in seen.items():
        layers[name].get_buffer("running_mean").copy_(mean)
        layers[name].get_buffer("running_var").copy_(spread / count)


class ClientResult(NamedTuple):
    """Evaluation of a model on a client's own data.

    Attributes:
        metrics: The known metrics by name. A metric that the client's data do not define, such as
            the AUROC of one class, is left out.
        diverged: Whether an output was not finite.
        entries: Results of the batches, from which :func:`pooled_metrics` computes.
        outputs: Scores and targets of each batch; empty unless they are kept.
        samples: Number of samples, counted in the first tensor of each batch; None if a batch has
            no tensor.
    """

    metrics: Mapping[str, float]
    diverged: bool = False
    entries: Entries = {}  # noqa: RUF012  # never changed
    outputs: Sequence[tuple[Tensor, Tensor]] = ()
    samples: int | None = 0


def evaluate_client(
    pl_module: "FederatedModule",
    client: int,
    split: str,
    evaluate: Callable[[Any, ServerEvaluation], None],
    class_quality: Sequence[float | None] = (),
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
    keep: bool = False,
) -> ClientResult:
    """Evaluate a model on a client's own data, on this rank only.

    Args:
        pl_module: The federated module.
        client: Id of the client.
        split: The evaluation data, ``"val"`` or ``"test"``.
        evaluate: Function that adds a batch to an evaluation. The random numbers of the function
            and of the loader depend only on the run's seed and the client.
        class_quality: The model's accuracy for each class on the server's evaluation data. If no
            client has own data, the accuracy is estimated by :func:`weighed_accuracy`.
        tensors: The model's tensors by name that differ from the server's.
        keep: Whether the result has the outputs.
    """
    evaluation = pl_module.client.new_evaluation()
    evaluation.kept_outputs = [] if keep else None
    with seeded(derive_seed(pl_module.seed, "own evaluation", client)), pl_module.client.apart(tensors):
        loader = pl_module.data.own_dataloader(client, split)
        sizes: list[int | None] = []
        for batch in every_batch(() if loader is None else loader):
            tensors_of_batch = (x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim())
            sizes.append(next(map(len, tensors_of_batch), None))
            evaluate(copied(pl_module.on_device(batch)), evaluation)
        known = evaluation.finish() if sizes else {}
    if loader is not None:
        if not evaluation.diverged:
            known = {name: x for name, x in known.items() if not isnan(x) or evaluation.is_defined(name)}
        samples = None if None in sizes else sum(size or 0 for size in sizes)
        kept = evaluation.kept_outputs or ()
        return ClientResult(known, evaluation.diverged, evaluation.entries, kept, samples)
    histograms = pl_module.data.class_histograms()
    accuracy = weighed_accuracy(class_quality, histograms[client] if histograms else ())
    return ClientResult({} if accuracy is None else {pl_module.task.class_metric: accuracy})


def pooled_metrics(pl_module: "FederatedModule", results: Iterable[ClientResult]) -> dict[str, float]:
    """Return the metrics over the samples of all clients together, such as ``pooled_accuracy``.

    An AUROC is computed from all outputs, and is no mean of AUROCs. The dict is empty if no client
    has own data, or if a LightningModule computes its own metrics.
    """
    parts = [result.entries for result in results if result.entries]
    metrics = pl_module.client.new_evaluation().pool(parts, pl_module.task) if parts else {}
    diverged = any(result.diverged for result in results)
    return {f"pooled_{name}": value for name, value in metrics.items() if diverged or not isnan(value)}


def mean_metrics(
    clients: Sequence[Mapping[str, float]], names: Iterable[str] | None, form: str
) -> dict[str, float]:
    """Return the mean of each metric over the clients that have the metric.

    Args:
        clients: Metrics of each client, by name.
        names: Names of the metrics; None for all metrics.
        form: Format of the names in the result, such as ``"own_{}"``.
    """
    names = [name for metrics in clients for name in metrics] if names is None else names
    known = {name: [metrics[name] for metrics in clients if name in metrics] for name in names}
    return {formatted(form, name): sum(values) / len(values) for name, values in known.items() if values}


def spread_over_clients(
    clients: Sequence[Mapping[str, float]], best: Mapping[str, str], form: str
) -> dict[str, float]:
    """Return each metric's mean over the clients, over the worst tenth, and its variance.

    Args:
        clients: Metrics of each client, by name. A client without a metric is left out.
        best: For each metric, whether the best value is the largest (``"max"``) or smallest.
        form: Format of the names in the result. ``"own_{}"`` gives ``own_accuracy``,
            ``own_accuracy_worst`` and ``own_accuracy_variance``.
    """
    found: dict[str, float] = {}
    for metric, direction in best.items():
        known = [metrics[metric] for metrics in clients if metric in metrics]
        if any(map(isnan, known)):
            known = [nan]
        if known:
            worst = sorted(known, reverse=direction == "min")[: ceil(len(known) / 10)]
            name = formatted(form, metric)
            found |= {name: fmean(known), f"{name}_worst": fmean(worst), f"{name}_variance": pvariance(known)}
    return found


def main_metric(task: "Task", clients: Iterable[Mapping[str, float]]) -> str:
    """Return the task's main metric, or the first metric that a client has; empty if there is none.

    A LightningModule chooses the names of its metrics.

    Args:
        task: The task.
        clients: Metrics of each client, by name.
    """
    known = {name for metrics in clients for name in metrics}
    return next((name for name in (task.quality, *task.best) if name in known), "")


def formatted(form: str, name: str) -> str:
    """Return a metric's name in a format: ``"own_{}"`` and ``"val/acc"`` give ``"val/own_acc"``."""
    place, slash, last = name.rpartition("/")
    return place + slash + form.format(last)


def evenly_spaced(count: int | None, total: int) -> list[int]:
    """Return ``count`` evenly spaced numbers from 0 to ``total - 1``. None means all."""
    count = min(count or total, total)
    return [index * total // count for index in range(count)]


def weighed_accuracy(class_accuracy: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the accuracy on data with given frequencies of the classes.

    Args:
        class_accuracy: Accuracy of each class. Classes with the accuracy None are left out.
        weights: Frequency of each class, in any unit.

    Returns:
        The accuracy, or None if every class is left out or has weight 0.
    """
    known = [(a, w) for a, w in zip(class_accuracy, weights, strict=False) if a is not None]
    total = sum(weight for _, weight in known)
    return sum(accuracy * weight for accuracy, weight in known) / total if total else None
