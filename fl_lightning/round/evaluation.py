"""Evaluation of the server model on the server's data."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import doing
from fl_lightning.execution.base import computing
from fl_lightning.randomness import derive_seed, seed_everything
from fl_lightning.ranks import Ranks
from fl_lightning.round.context import RunContext
from fl_lightning.round.metrics import State, append, compute, measure, on_cpu
from fl_lightning.round.tasks import Classification, Task

_Totals = tuple[dict[str, Tensor], Tensor, dict[str, list[tuple[int, State]]]]


class ServerEvaluation:
    """Loss and metrics of a task over an evaluation set, in total and by class.

    The metrics do not depend on the number of ranks.

    Attributes:
        metrics: ``loss`` and the task's metrics, such as ``accuracy``, of the last evaluation.
        arrays: Array metrics of the last evaluation, such as a confusion matrix, as nested lists.
        diverged: Whether an output of the last evaluation was not finite.
        class_samples: Number of samples of each class in the last evaluation; empty without class
            labels.
        class_quality: Quality of each class, such as its accuracy, or None for a class without
            samples; empty without class labels.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.arrays: dict[str, list[Any]] = {}
        self.diverged = False
        self.class_samples: list[int] = []
        self.class_quality: list[float | None] = []
        self._task: Task = Classification()
        self.start()

    def start(self) -> None:
        """Reset all sums for a new evaluation."""
        self._common, self._of_rank = _Sums(), _Sums()
        self._into = self._common
        self._of_all_ranks: list[_Totals] = []
        self._batch = 0
        self._is_new = True
        self._failure: Exception | None = None
        self._ranks: Ranks | None = None

    def divide(
        self,
        run: RunContext,
        batch: Any,
        batch_idx: int,
        evaluate: Callable[[Any, "ServerEvaluation"], None],
        turn: int = 0,
    ) -> None:
        """Evaluate a batch on one rank; :meth:`finish` shares the result or error with all ranks.

        Args:
            run: The run of the evaluated model.
            batch: The batch.
            batch_idx: The batch's number, from 0.
            evaluate: Function that adds a batch to an evaluation. Before the call, the global
                generators are seeded by (seed, round, batch); the caller must restore them.
            turn: Offset in the choice of the rank: rank ``(batch_idx + turn) % ranks`` evaluates
                the batch.
        """

        def place() -> str:
            return f"evaluating the server after round {run.trainer.global_step}, batch {batch_idx + 1}"

        ranks = self._ranks = run.ranks
        self._task = run.task
        if (batch_idx + turn) % ranks.size != ranks.rank or self._failure is not None:
            return
        seed = derive_seed(run.seed, "evaluation", run.trainer.global_step, batch_idx)
        self._into, self._batch = self._of_rank, batch_idx
        try:
            seed_everything(seed)
            with doing(place), computing(run, batch):
                evaluate(batch, self)
        except Exception as error:
            if ranks.size == 1:
                raise
            self._failure = error  # finish raises it on all ranks
        finally:
            self._into = self._common

    def update(
        self,
        outputs: Any,
        targets: Tensor,
        loss: Tensor,
        task: Task | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Add a batch to the evaluation, without waiting for the GPU.

        Within :meth:`divide`, one rank calls this method for the batch; otherwise all ranks do.

        Args:
            outputs: The model's outputs, such as class scores ``[b, classes, ...]``.
            targets: The batch's targets, such as integer class labels ``[b, ...]``.
            loss: Mean loss of the batch.
            task: Task that evaluates the outputs. Default: the task of the last batch, or
                classification for the first batch.
            weights: Weight of each target in the mean loss, ``[b, ...]``. Default: 0 for ignored
                targets, 1 for all others.
        """
        self._is_new = True
        self._task = task = task or self._task
        scores = task.scores(outputs)
        counts = {"not finite": (~scores.isfinite().all()).long(), **task.count(scores, targets)}
        if weights is None:
            weights = (
                task.counted(scores, targets)
                if len(counts) > 1
                else torch.ones_like(targets, dtype=torch.bool)
            )
        # accumulate in the loss's dtype, at least float32
        samples = weights.reshape(len(weights), -1).to(torch.promote_types(loss.dtype, torch.float32)).mean(1)
        # if all targets of a batch are ignored, its mean loss is NaN
        loss_sum = (loss.where(samples > 0, 0) * samples).sum()
        self._into.add(counts, torch.stack([loss_sum, samples.sum()]).detach()[None])
        if task.measured:
            states = measure(task.measured, *task.measurable(scores, targets))
            alone = self._into is self._common or self._ranks is None or self._ranks.size == 1
            append(self._into.states, task.measured, self._batch, states, merge=alone)

    def finish(self) -> dict[str, float]:
        """Return the metrics since :meth:`start`; all ranks must call this method.

        A second call without new batches returns the same metrics.
        """
        finish_together([self])
        return self.metrics

    def _conclude(self) -> None:
        self._is_new = False
        total = _Sums()
        for part in (self._common.on_cpu(), *self._of_all_ranks):
            total.add(*part)
        counts, losses, states = total.on_cpu()
        # sort the losses: the sum must not depend on how batches were divided between ranks
        loss, samples = losses.double().sort(0).values.sum(0)
        self.diverged = bool(counts.pop("not finite", False))
        self.metrics = {"loss": (loss / samples).to(losses.dtype).item()} if samples > 0 else {}
        self.metrics |= self._task.metrics(counts)
        self.arrays = {}
        for name, entries in states.items():
            for key, value in compute(self._task.measured[name], name, entries).items():
                if isinstance(value, float):
                    self.metrics[key] = value
                else:
                    self.arrays[key] = value
        self.class_samples, self.class_quality = self._task.classes(counts)

    def _share(self) -> _Totals:
        if self._failure is not None:
            raise self._failure
        return self._of_rank.on_cpu()


def finish_together(evaluations: Collection[ServerEvaluation]) -> None:
    """Finish several evaluations with a single exchange between the ranks."""
    divided = [evaluation for evaluation in evaluations if evaluation._ranks is not None]
    if divided:
        assert divided[0]._ranks is not None
        parts = divided[0]._ranks.exchange(lambda: [evaluation._share() for evaluation in divided])
        for evaluation, totals in zip(divided, zip(*parts, strict=True), strict=True):
            evaluation._of_all_ranks += totals
            evaluation._of_rank, evaluation._ranks, evaluation._is_new = _Sums(), None, True
    for evaluation in evaluations:
        if evaluation._is_new:
            evaluation._conclude()


class _Sums:
    """Sums of counts over batches, pairs (loss, weight) of each batch, and states of metrics."""

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []
        self.states: dict[str, list[tuple[int, State]]] = {}

    def add(
        self,
        counts: dict[str, Tensor],
        losses: Tensor,
        states: Mapping[str, list[tuple[int, State]]] = MappingProxyType({}),
    ) -> None:
        self.counts |= {
            name: self.counts[name] + x if name in self.counts else x for name, x in counts.items()
        }
        self.losses.append(losses)
        for name, entries in states.items():
            self.states.setdefault(name, []).extend(entries)

    def on_cpu(self) -> _Totals:
        losses = torch.cat(self.losses) if self.losses else torch.zeros(0, 2)
        states = {
            name: [(batch, on_cpu(state)) for batch, state in entries]
            for name, entries in self.states.items()
        }
        return {name: x.cpu() for name, x in self.counts.items()}, losses.cpu(), states
