"""Evaluation of variants of the server's model."""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from fl_lightning.batch_norm.layers import explain_batch_of_one
from fl_lightning.batch_norm.swapping import batch_statistics
from fl_lightning.clients.evaluation import ServerEvaluation, finish_together
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.methods.callback import FederatedCallback
from fl_lightning.methods.own_data import (
    Adaptation,
    ClientResult,
    adapted_state,
    evaluate_client,
    formatted,
    mean_metrics,
)
from fl_lightning.randomness import isolated, permutation

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule

BATCH_STATISTICS: Mapping[str, Tensor] = MappingProxyType({})
"""Variant whose BN layers normalise with the batch instead of running statistics.

The samples are in a fixed random order (:func:`mixed_batches`).
"""


class VariantEvaluation(FederatedCallback):
    """Base class of methods and observers that evaluate variants of the server's model.

    A variant is the server's model with some state replaced. Every evaluation of the server's model
    also evaluates each variant, on the same samples. This includes the evaluation before training,
    and evaluations in ``fit``, ``validate`` and ``test``. The variant is in eval mode, and
    non-finite outputs count as wrong. The metrics of a variant named ``calibrated`` are
    ``val/accuracy_calibrated`` and ``val/loss_calibrated``. Variants do not affect training.

    A variant may also be an :data:`~fl_lightning.methods.own_data.Adaptation`: a function that
    adapts a copy of the server's model to the inputs of the evaluation data. The copy is then
    evaluated. An adaptation named ``calibrated`` also logs ``val/own_accuracy_calibrated``. For
    this metric, a copy for each client is adapted to the client's own evaluation data, and
    evaluated on the same data. The metric is the mean accuracy over the clients.

    A subclass defines :meth:`variants`, and may override :meth:`variant_metrics`.

    Example:
        >>> class Unscaled(VariantEvaluation):
        ...     def variants(self, trainer, pl_module):
        ...         gammas = {"1.weight": torch.ones(4), "4.weight": torch.ones(6)}
        ...         return {"unscaled": gammas}  # logs val/accuracy_unscaled
    """

    def variants(
        self, trainer: L.Trainer, pl_module: "FederatedModule"
    ) -> Mapping[str, Mapping[str, Tensor] | Adaptation]:
        """Return the variants to evaluate, at the start of each evaluation.

        Returns:
            The variants by name. A variant is :data:`BATCH_STATISTICS`, an adaptation, or a dict of
            tensors. Each tensor replaces the server's parameter or buffer with the same name and
            shape.
        """
        raise NotImplementedError(f"{type(self).__name__} must define variants(trainer, pl_module)")

    def variant_metrics(
        self, pl_module: "FederatedModule", split: str, evaluations: Mapping[str, ServerEvaluation]
    ) -> Mapping[str, float]:
        """Return the metrics of an evaluation.

        Args:
            pl_module: The federated module.
            split: Name of the evaluation data: ``"val"`` or ``"test"``.
            evaluations: The finished evaluation of each variant.

        Returns:
            Metrics by name, without the prefix ``val/`` or ``test/``. The default is the loss and
            accuracy of each variant.
        """
        return {
            formatted(f"{{}}_{name}", metric): value
            for name, evaluation in evaluations.items()
            for metric, value in evaluation.metrics.items()
        }

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]  # a run's module has this type
        """Start an evaluation of every variant."""
        model = pl_module.model
        server = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._slots = StateSlots(model)
        loader = f"{'test' if trainer.testing else pl_module.data.fit_split}_dataloader"
        self._adaptations: dict[str, Adaptation] = {}
        self._tensors: dict[str, Mapping[str, Tensor]] = {}
        for name, variant in self.variants(trainer, pl_module).items():
            if callable(variant):
                self._adaptations[name] = variant
                variant = adapted_state(pl_module, variant, getattr(pl_module.data, loader)(), name)
            elif variant is not BATCH_STATISTICS:  # tensors from a checkpoint are on the CPU
                variant = {key: value.to(server[key]) for key, value in variant.items()}
            self._tensors[name] = variant
            pl_module.refuse_merged(type(self).__name__, variant)
        self._batches = 0
        self._evaluations = {name: pl_module.client.new_evaluation() for name in self._tensors}

    def on_validation_batch_end(  # type: ignore[override]  # a run's module has this type
        self,
        trainer: L.Trainer,
        pl_module: "FederatedModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        *_: Any,
    ) -> None:
        """Evaluate every variant on a batch, except for variants with batch statistics."""
        self._batches = batch_idx + 1
        if not pl_module.client.logs_itself:
            self._divide(pl_module, batch, batch_idx, with_batch_statistics=False)

    def _divide(
        self, pl_module: "FederatedModule", batch: Any, batch_idx: int, *, with_batch_statistics: bool
    ) -> None:
        with isolated():
            # the number of a variant in this loop decides which rank evaluates it
            for turn, (name, tensors) in enumerate(self._tensors.items()):
                if (tensors is BATCH_STATISTICS) == with_batch_statistics:
                    evaluate = partial(self.evaluate, pl_module, tensors)
                    self._evaluations[name].divide(pl_module, batch, batch_idx, evaluate, turn)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]  # a run's module has this type
        """Evaluate the variants with batch statistics, and log the metrics of all variants."""
        split = "test" if trainer.testing else pl_module.data.fit_split
        if pl_module.client.logs_itself:
            self._evaluate_by_module(pl_module, split)
        elif any(tensors is BATCH_STATISTICS for tensors in self._tensors.values()):
            with isolated():
                pl_module.seed_evaluation_data()
                batches = mixed_batches(getattr(pl_module.data, f"{split}_dataloader")(), self._batches)
                for index, batch in enumerate(batches):
                    moved = pl_module.on_device(batch)
                    self._divide(pl_module, moved, index, with_batch_statistics=True)
        finish_together(self._evaluations.values())
        pl_module.record.diverge(trainer.global_step, any(x.diverged for x in self._evaluations.values()))
        metrics = dict(self.variant_metrics(pl_module, split, self._evaluations))
        for name, adapt in self._adaptations.items():
            metrics |= self._adapted_to_clients(pl_module, split, name, adapt)
        for name, value in metrics.items():
            pl_module.log(pl_module.client.metric_name(split, name), value)
        del self._adaptations, self._tensors, self._evaluations, self._slots

    def _evaluate_by_module(self, pl_module: "FederatedModule", split: str) -> None:
        """Evaluate one variant after the other, as a LightningModule may collect values over all batches."""
        pl_module.evaluation.finish()

        def metrics_of(name: str) -> dict[str, float]:
            evaluation: Any = pl_module.client.new_evaluation()
            tensors = self._tensors[name]
            loader = getattr(pl_module.data, f"{split}_dataloader")()
            if tensors is BATCH_STATISTICS and not isinstance(loader, list):
                loader = mixed_batches(loader, self._batches)
            pl_module.seed_evaluation_data()
            with pl_module.client.apart(tensors):
                metrics: dict[str, float] = evaluation.all_batches(
                    loader, partial(self.evaluate, pl_module, tensors)
                )
            return metrics

        with isolated():
            found = pl_module.ranks.map(metrics_of, self._tensors)
        for evaluation, metrics in zip(self._evaluations.values(), found, strict=True):
            evaluation.metrics = metrics

    def _adapted_to_clients(
        self, pl_module: "FederatedModule", split: str, name: str, adapt: Adaptation
    ) -> dict[str, float]:
        """Return the metrics of an adaptation, averaged over the clients.

        For each client, a copy of the server's model is adapted to the client's own data, and
        evaluated on the same data.
        """

        def own(client: int) -> ClientResult:
            loader = pl_module.data.own_dataloader(client, split)
            if loader is None or loader == []:
                return ClientResult({})
            tensors = adapted_state(pl_module, adapt, loader, name, client)
            evaluate = partial(self.evaluate, pl_module, tensors)
            result = evaluate_client(pl_module, client, split, evaluate, tensors=tensors)
            return result._replace(entries={})  # ranks need not exchange what is not pooled

        evaluated = pl_module.ranks.map(own, range(pl_module.data.num_clients))
        pl_module.record.diverge(pl_module.trainer.global_step, any(x.diverged for x in evaluated))
        task = pl_module.task
        names = None if pl_module.client.logs_itself else (task.quality, *task.measured)
        return mean_metrics([result.metrics for result in evaluated], names, f"own_{{}}_{name}")

    on_test_epoch_start = on_validation_epoch_start  # type: ignore[assignment]  # a run's module has this type
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]  # as above
    on_test_epoch_end = on_validation_epoch_end  # type: ignore[assignment]  # as above

    def evaluate(
        self,
        pl_module: "FederatedModule",
        tensors: Mapping[str, Tensor],
        batch: Any,
        evaluation: ServerEvaluation,
    ) -> None:
        """Evaluate a variant on a batch, and add the outputs to the variant's evaluation."""
        layers = pl_module.client.evaluated(pl_module.tracking_layers) if tensors is BATCH_STATISTICS else []
        with (
            pl_module.trainer.precision_plugin.val_step_context(),
            pl_module.client.holding(self._slots, tensors),
            batch_statistics(layers),
            explain_batch_of_one(),
        ):
            pl_module.client.evaluate_batch(batch, evaluation)


def mixed_batches(loader: Any, count: int) -> Iterable[Any]:
    """Return the samples of a loader's first batches in a fixed random order.

    Without it, a batch of data that are sorted by class would have only one class. The sizes of the
    batches do not change. Loaders without indices, with another sampler, and of another class than
    ``DataLoader`` keep their order.

    Args:
        loader: ``DataLoader``, or another iterable over batches.
        count: Number of batches.
    """
    if type(loader) is DataLoader:
        sampler = loader.batch_sampler
        if type(sampler) is BatchSampler and type(sampler.sampler) is SequentialSampler:
            given = [torch.tensor(indices) for indices in islice(sampler, count)]
            mixed = [indices.tolist() for indices in _mixed(given)]
            return DataLoader(
                loader.dataset,
                batch_sampler=mixed,
                collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
            )
        if sampler is None and all(isinstance(indices, Tensor) for indices in loader.sampler):
            given = [*islice(loader.sampler, count)]
            return DataLoader(loader.dataset, sampler=_mixed(given), batch_size=None)
    return islice(loader, count)


def _mixed(batches: list[Tensor]) -> list[Tensor]:
    indices = torch.cat(batches)
    order = permutation(len(indices), 0, "order of the evaluation")
    return [*torch.split(indices[order], [len(batch) for batch in batches])]
