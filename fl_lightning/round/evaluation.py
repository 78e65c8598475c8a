"""Evaluation of the server model on the server's data."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import doing
from fl_lightning.execution.base import computing
from fl_lightning.randomness import derive_seed, seed_everything
from fl_lightning.ranks import Ranks
from fl_lightning.round.context import RunContext
from fl_lightning.round.tasks import Classification, Task

_Found = tuple[dict[str, Tensor], Tensor]


class ServerEvaluation:
    """Loss and what the task counts over an evaluation set, in total and by class.

    The metrics are the same for any number of ranks, whoever has computed a batch.

    Attributes:
        metrics: ``loss`` of the last evaluation and what the task adds, such as ``accuracy``, as :meth:`finish` returned them.
        diverged: Whether any outputs of the last evaluation were not finite.
        class_samples: Number of samples of each class in the last evaluation; empty without class labels.
        class_quality: How good each class is, None for one that does not occur; empty without class labels.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.diverged = False
        self.class_samples: list[int] = []
        self.class_quality: list[float | None] = []
        self._task: Task = Classification()
        self.start()

    def start(self) -> None:
        """Forget everything; called at the start of an evaluation."""
        self._common, self._own = _Sums(), _Sums()
        self._into = self._common
        self._told: list[_Found] = []
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
        self._into = self._own
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
        self._into.add(counts, torch.stack([whole, samples.sum()]).detach()[None])

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
        counts, losses = total.on_cpu()
        # the sum of sorted numbers does not depend on who has computed which batch
        loss, samples = losses.double().sort(0).values.sum(0)
        self.diverged = bool(counts.pop("not finite", False))
        self.metrics = {"loss": (loss / samples).to(losses.dtype).item()} if samples > 0 else {}
        self.metrics |= self._task.metrics(counts)
        self.class_samples, self.class_quality = self._task.classes(counts)

    def _tell(self) -> "_Found":
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
    """Whole numbers, added up, and the loss and the number of samples of each batch, ``[batches, 2]``."""

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []

    def add(self, counts: dict[str, Tensor], losses: Tensor) -> None:
        self.counts |= {
            name: self.counts[name] + x if name in self.counts else x for name, x in counts.items()
        }
        self.losses.append(losses)

    def on_cpu(self) -> _Found:
        losses = torch.cat(self.losses) if self.losses else torch.zeros(0, 2)
        return {name: x.cpu() for name, x in self.counts.items()}, losses.cpu()
