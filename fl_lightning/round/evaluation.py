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

_Sum = tuple[dict[str, Tensor], Tensor, dict[str, list[tuple[int, State]]]]


class ServerEvaluation:
    """Loss and what the task counts over an evaluation set, in total and by class.

    The metrics are the same for any number of ranks, whoever has computed a batch.

    Attributes:
        metrics: ``loss`` of the last evaluation and what the task adds, such as ``accuracy``, as :meth:`finish` returned them.
        arrays: Metrics of the last evaluation that are no numbers, such as a confusion matrix, as lists.
        diverged: Whether any outputs of the last evaluation were not finite.
        class_samples: Number of samples of each class in the last evaluation; empty without class labels.
        class_quality: How good each class is, None for one that does not occur; empty without class labels.
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
        """Forget everything; called at the start of an evaluation."""
        self._common, self._own = _Sums(), _Sums()
        self._into = self._common
        self._told: list[_Sum] = []
        self._batch = 0
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
        """Let one of the ranks evaluate a batch; the others learn in :meth:`finish` what it has found, or its error.

        Args:
            run: The run whose model is evaluated.
            batch: The batch.
            batch_idx: Its number, from 0.
            evaluate: Adds a batch to an evaluation. What it draws is a function of seed, round and batch; the caller isolates
                the global generators, once for all evaluations of the batch.
            turn: Added to ``batch_idx``, it says whose turn it is: that of the rank which is the sum modulo their number.
        """

        def place() -> str:
            return f"evaluating the server after round {run.trainer.global_step}, batch {batch_idx + 1}"

        ranks = self._ranks = run.ranks
        self._task = run.task
        if (batch_idx + turn) % ranks.size != ranks.rank or self._failure is not None:
            return
        seed = derive_seed(run.seed, "evaluation", run.trainer.global_step, batch_idx)
        self._into, self._batch = self._own, batch_idx
        try:
            seed_everything(seed)
            with doing(place), computing(run, batch):
                evaluate(batch, self)
        except Exception as error:
            if ranks.size == 1:
                raise
            self._failure = error  # the others wait in finish
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
        """Add a batch. Nothing waits for the device; numbers are read when the evaluation is finished.

        Outside of :meth:`divide` every rank adds every batch.

        Args:
            outputs: The model's, such as class scores ``[b, classes, ...]``.
            targets: Such as class labels ``[b, ...]`` (integers).
            loss: Mean loss of the batch.
            task: What of them is counted. Default: classification.
            weights: What each target weighs in the mean loss, ``[b, ...]``. Default: those that count weigh 1.
        """
        self._task = task = task or self._task
        scores = task.scores(outputs)
        counts = {"not finite": (~scores.isfinite().all()).long(), **task.count(scores, targets)}
        if weights is None:
            weights = (
                task.counted(scores, targets)
                if len(counts) > 1
                else torch.ones_like(targets, dtype=torch.bool)
            )
        # of the loss's own precision, but not of that of half floats
        samples = weights.reshape(len(weights), -1).to(torch.promote_types(loss.dtype, torch.float32)).mean(1)
        # a batch without a target that counts has no mean loss
        whole = (loss.where(samples > 0, 0) * samples).sum()
        states = measure(task.measured, *task.measurable(scores, targets)) if task.measured else {}
        self._into.add(counts, torch.stack([whole, samples.sum()]).detach()[None])
        alone = self._into is self._common or self._ranks is None or self._ranks.size == 1
        append(self._into.states, task.measured, self._batch, states, alone)

    def finish(self) -> dict[str, float]:
        """The metrics of everything since :meth:`start`, by name, such as ``loss`` and ``accuracy``.

        All ranks call it together; again, it costs nothing.
        """
        finish_together([self])
        return self.metrics

    def _conclude(self) -> None:
        total = _Sums()
        for part in (self._common.on_cpu(), *self._told):
            total.add(*part)
        counts, losses, states = total.on_cpu()
        # the sum of sorted numbers does not depend on who has computed which batch
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

    def _tell(self) -> _Sum:
        if self._failure is not None:
            raise self._failure
        return self._own.on_cpu()


def finish_together(evaluations: Collection[ServerEvaluation]) -> None:
    """Finish evaluations with one exchange between the ranks for all of them."""
    divided = [evaluation for evaluation in evaluations if evaluation._ranks is not None]
    if divided:
        assert divided[0]._ranks is not None
        parts = divided[0]._ranks.exchange(lambda: [evaluation._tell() for evaluation in divided])
        for evaluation, told in zip(divided, zip(*parts, strict=True), strict=True):
            evaluation._told += told
            evaluation._own, evaluation._ranks = _Sums(), None
    for evaluation in evaluations:
        evaluation._conclude()


class _Sums:
    """Whole numbers, added up; loss and number of samples of each batch, ``[batches, 2]``; the states of metrics."""

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

    def on_cpu(self) -> _Sum:
        losses = torch.cat(self.losses) if self.losses else torch.zeros(0, 2)
        states = {
            name: [(batch, on_cpu(state)) for batch, state in entries]
            for name, entries in self.states.items()
        }
        return {name: x.cpu() for name, x in self.counts.items()}, losses.cpu(), states
