"""Evaluation of the server model on validation or test data."""

from collections.abc import Callable, Collection, Iterable
from operator import itemgetter
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from fl_lightning.client_data.batches import copied
from fl_lightning.clients.metrics import compute, measure_batch, sums_integers
from fl_lightning.clients.tasks import Classification, Counts, Task
from fl_lightning.errors import doing
from fl_lightning.randomness import derive_seed, seed_everything
from fl_lightning.ranks import Ranks

Entries = dict[str, list[tuple[int, Any]]]
"""Results of batches by the name of a measured quantity, as pairs (batch number, state).

A state may be the sum over several batches.
"""

_COUNTS, _LOSS = "task's counts", "task's loss"
_COMMON = -1  # batch number for batches that every rank evaluates


class ServerEvaluation:
    """Loss and metrics of a task over an evaluation set, in total and by class.

    The metrics do not depend on the number of ranks.

    Attributes:
        metrics: ``loss`` and the task's metrics, such as ``accuracy``, of the last evaluation.
        arrays: Array metrics of the last evaluation, such as a confusion matrix, as nested lists.
        diverged: Whether an output of the last evaluation was not finite.
        class_samples: Number of samples of each class in the last evaluation. Without class labels,
            the list is empty.
        class_quality: Main metric of each class, such as the accuracy; None for a class without
            samples. Without class labels, the list is empty.
        shown: Names of the metrics that progress bars show; None for all.
        kept: States that the next evaluation needs, such as the best value so far, by client.
        kept_outputs: Scores and targets of each batch on the CPU, if this list is set. None (default):
            they are not kept.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.arrays: dict[str, list[Any]] = {}
        self.diverged = False
        self.class_samples: list[int] = []
        self.class_quality: list[float | None] = []
        self.kept: dict[Any, Any] = {}
        self.shown: set[str] | None = None
        self.kept_outputs: list[tuple[Tensor, Tensor]] | None = None
        self._task: Task = Classification()
        self.start()

    def start(self) -> None:
        """Reset all sums for a new evaluation."""
        self._common: Entries = {}
        self._of_rank: Entries = {}
        self._batch = _COMMON
        self._failure: Exception | None = None
        self._ranks: Ranks | None = None  # the ranks that have divided the batches

    def divide(
        self,
        run: Any,
        batch: Any,
        batch_idx: int,
        evaluate: Callable[[Any, "ServerEvaluation"], None],
        turn: int = 0,
    ) -> None:
        """Evaluate a batch on one rank. Later, :meth:`finish` sends the result to all ranks.

        Args:
            run: The federated module.
            batch: The batch.
            batch_idx: The batch's number, from 0.
            evaluate: Function that adds a batch to an evaluation. Before the call, the global
                random generators are seeded by seed, round and batch. The caller of ``divide`` must
                restore the generators.
            turn: Number added to ``batch_idx`` before batches are divided among the ranks.
        """
        place = f"evaluating the server after round {run.trainer.global_step}, batch {batch_idx + 1}"
        ranks = self._ranks = run.ranks
        self._task = run.task
        if (batch_idx + turn) % ranks.size != ranks.rank or self._failure is not None:
            return
        seed = derive_seed(run.seed, "evaluation", run.trainer.global_step, batch_idx)
        self._batch = batch_idx
        try:
            seed_everything(seed)
            with doing(place), run.client.computing(batch):
                evaluate(copied(batch), self)
        except Exception as error:
            if ranks.size == 1:
                raise
            self._failure = error  # the method finish raises this error on all ranks
        finally:
            self._batch = _COMMON

    def update(
        self,
        outputs: Any,
        targets: Tensor,
        loss: Tensor,
        task: Task | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Add a batch to the evaluation, without waiting for the GPU.

        In :meth:`divide`, only one rank calls this method for a batch. In all other places, all
        ranks must call this method.

        Args:
            outputs: The model's outputs, such as class scores ``[b, classes, ...]``.
            targets: The batch's targets, such as integer class labels ``[b, ...]``.
            loss: Mean loss of the batch.
            task: Task that evaluates the outputs. Default: the task of the last batch, or
                classification for the first batch.
            weights: Weight of each target in the mean loss, ``[b, ...]``. Default: 0 for ignored
                targets, 1 for all other targets.
        """
        self._task = task = task or self._task
        scores = task.scores(outputs)
        if self.kept_outputs is not None:
            self.kept_outputs.append((scores.detach().cpu(), targets.cpu()))
        counts = task.count(scores, targets)
        if weights is None:
            # without counts, a sample has the weight 1, whatever the number of its targets is
            one_each = torch.ones(len(targets), dtype=torch.bool, device=targets.device)
            weights = task.counted(scores, targets) if counts else one_each
        # sum in the dtype of the loss, but at least in float32
        samples = weights.reshape(len(weights), -1).to(torch.promote_types(loss.dtype, torch.float32)).sum(1)
        # if all targets of a batch are ignored, its mean loss is NaN
        loss_sum = (loss.where(samples > 0, 0) * samples).sum()
        sums = [loss_sum, samples.sum(), (~scores.isfinite().all()).to(loss_sum)]
        found: dict[str, Any] = {_COUNTS: counts, _LOSS: torch.stack(sums).detach()}
        if task.measured:
            found |= measure_batch(task.measured, *task.measurable(scores, targets))
        for name, state in found.items():
            entries = (self._common if self._batch == _COMMON else self._of_rank).setdefault(name, [])
            if entries and (name == _COUNTS or (name != _LOSS and sums_integers(task.measured[name]))):
                state = _sum([entries.pop()[1], state])
            entries.append((self._batch, state))

    def is_defined(self, name: str) -> bool:
        """Return whether a metric has a value on any data, so that NaN is no lack of data."""
        return False

    def finish(self) -> dict[str, float]:
        """Return the metrics of all batches since :meth:`start`. All ranks must call this method."""
        finish_together([self])
        return self.metrics

    @property
    def entries(self) -> Entries:
        """Results of the batches that this rank has evaluated outside of :meth:`divide`, on the CPU."""
        entries: Entries = move_data_to_device(self._common, "cpu")
        return entries

    def pool(self, parts: Iterable[Entries], task: Task) -> dict[str, float]:
        """Return the metrics of all samples of several evaluations, given their ``entries``."""
        self._task = task
        self._conclude(parts)
        return self.metrics

    def _conclude(self, of_ranks: Iterable[Entries]) -> None:
        whole: Entries = {}
        for part in move_data_to_device([self._common, *of_ranks], "cpu"):
            for name, entries in part.items():
                whole.setdefault(name, []).extend(entries)
        # a stable sort gives all ranks the same order of the batches
        states = {name: [x for _, x in sorted(entries, key=itemgetter(0))] for name, entries in whole.items()}
        counts, losses = _sum(states.pop(_COUNTS, [])), states.pop(_LOSS, [torch.zeros(3)])
        # sort the losses, because the sum must not depend on the order of the ranks
        loss, samples, infinite = torch.stack(losses).double().sort(0).values.sum(0)
        self.diverged = bool(infinite)
        self.metrics = {"loss": (loss / samples).to(losses[0].dtype).item()} if samples > 0 else {}
        self.metrics |= self._task.metrics(counts)
        self.arrays = {}
        for name, of_batches in states.items():
            values = compute(self._task.measured[name], name, of_batches)
            self.metrics |= {key: value for key, value in values.items() if isinstance(value, float)}
            self.arrays |= {key: value for key, value in values.items() if isinstance(value, list)}
        self.class_samples, self.class_quality = self._task.classes(counts)

    def _share(self) -> Entries:
        if self._failure is not None:
            raise self._failure
        shared: Entries = move_data_to_device(self._of_rank, "cpu")
        return shared


def finish_together(evaluations: Collection[ServerEvaluation]) -> None:
    """Finish several evaluations. The ranks exchange the results of all evaluations at once."""
    divided = [evaluation for evaluation in evaluations if evaluation._ranks is not None]
    of_ranks: dict[ServerEvaluation, Iterable[Entries]] = {}
    if divided:
        assert divided[0]._ranks is not None
        parts = divided[0]._ranks.exchange(lambda: [evaluation._share() for evaluation in divided])
        of_ranks = dict(zip(divided, zip(*parts, strict=True), strict=True))
    for evaluation in evaluations:
        evaluation._conclude(of_ranks.get(evaluation, ()))


def _sum(states: Iterable[Counts]) -> Counts:
    total: Counts = {}
    for counts in states:
        total |= {name: total[name] + x if name in total else x for name, x in counts.items()}
    return total
