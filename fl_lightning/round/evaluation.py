"""Evaluation of the server model on the server's data."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import doing
from fl_lightning.executors.base import computation
from fl_lightning.randomness import derive_seed, seed_everything
from fl_lightning.ranks import Ranks

_Found = tuple[dict[str, Tensor], Tensor]


class ServerEvaluation:
    """Loss and, for class labels, accuracy over an evaluation set, in total and by class.

    A sample whose outputs are not all finite counts as wrong: the argmax of NaN would otherwise look like a guess.
    The metrics are the same for any number of ranks, whoever has computed a batch.

    Attributes:
        metrics: ``loss`` and ``accuracy`` of the last evaluation, as :meth:`finish` returned them.
        diverged: Whether any outputs of the last evaluation were not finite.
        class_samples: Number of samples of each class in the last evaluation; empty without class labels.
        class_accuracy: Share of them that was right, None for a class without samples; empty without class
            labels. A label that is none of the classes, such as the 255 of unlabelled pixels, belongs to none.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.diverged = False
        self.class_samples: list[int] = []
        self.class_accuracy: list[float | None] = []
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
        module: Any,
        batch: Any,
        batch_idx: int,
        evaluate: Callable[[Any, "ServerEvaluation"], None],
        turn: int = 0,
    ) -> None:
        """Let one of the ranks evaluate a batch; the others learn in :meth:`finish` what it has found, or its error.

        Args:
            module: The federated module whose model is evaluated.
            batch: The batch.
            batch_idx: Its number, from 0.
            evaluate: Adds a batch to an evaluation. What it draws is a function of seed, round and batch; the caller isolates
                the global generators, once for all evaluations of the batch.
            turn: Added to ``batch_idx``, it says whose turn it is: that of the rank which is the sum modulo their number.
        """

        def place() -> str:
            return f"evaluating the server after round {module.trainer.global_step}, batch {batch_idx + 1}"

        ranks = self._ranks = module.ranks
        if (batch_idx + turn) % ranks.size != ranks.rank or self._failure is not None:
            return
        seed = derive_seed(module.seed, "evaluation", module.trainer.global_step, batch_idx)
        self._into = self._own
        try:
            seed_everything(seed)
            with doing(place), doing(lambda: computation(module, batch)):
                evaluate(batch, self)
        except Exception as error:
            if ranks.size == 1:
                raise
            self._failure = error  # the others wait in finish
        finally:
            self._into = self._common

    def update(self, outputs: Tensor, targets: Tensor, loss: Tensor, ignored: int = -100) -> None:
        """Add a batch. Nothing waits for the device; numbers are read when the evaluation is finished.

        Outside of :meth:`divide` every rank adds every batch.

        Args:
            outputs: Class scores ``[b, classes, ...]``, or anything else without accuracy.
            targets: Class labels ``[b, ...]`` (integers), or anything else without accuracy.
            loss: Mean loss of the batch, which weighs as many samples as it has targets that count.
            ignored: The label that the loss leaves out, and accuracy too; torch's own is -100.
        """
        finite = outputs.isfinite()
        counted = torch.ones_like(targets, dtype=torch.bool)
        counts = {"not finite": (~finite.all()).long()}
        if not targets.is_floating_point() and targets.shape == outputs.shape[:1] + outputs.shape[2:]:
            targets = targets.long()  # bytes know neither class 256 nor -100
            counted = targets != ignored
            right = (outputs.argmax(1) == targets) & finite.all(1) & counted
            counts |= {"right": right.sum(), "counted": counted.sum()}
            counts["by class"] = _count_by_class(right, targets.where(counted, -1), outputs.shape[1])
        # of the loss's own precision, but not of that of half floats
        samples = counted.reshape(len(counted), -1).to(torch.promote_types(loss.dtype, torch.float32)).mean(1)
        # a batch without a target that counts has no mean loss
        whole = (loss.where(samples > 0, 0) * samples).sum()
        self._into.add(counts, torch.stack([whole, samples.sum()]).detach()[None])

    def finish(self) -> dict[str, float]:
        """The metrics of everything since :meth:`start`, by name: ``loss`` and ``accuracy``.

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
        found = {"loss": (loss, samples, losses.dtype)}
        if "counted" in counts:
            found["accuracy"] = (counts["right"].double(), counts["counted"], torch.float32)
        self.metrics = {
            name: (part / whole).to(dtype).item() for name, (part, whole, dtype) in found.items() if whole > 0
        }
        self.diverged = "not finite" in counts and bool(counts["not finite"])
        by_class = counts["by class"].tolist() if "by class" in counts else []
        self.class_samples = [wrong + right for wrong, right in by_class]
        self.class_accuracy = [
            right / (wrong + right) if wrong + right else None for wrong, right in by_class
        ]

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


def _count_by_class(right: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Number of wrong and of right samples of each class, int64 ``[classes, 2]``."""
    known = (targets >= 0) & (targets < classes)
    labels = torch.where(known, targets, classes)
    pairs = (2 * labels + right).flatten()
    # as bincount would, which waits for a GPU
    counts = torch.zeros(2 * (classes + 1), dtype=torch.int64, device=pairs.device)
    counts.scatter_add_(0, pairs, torch.ones_like(pairs))
    return counts.view(classes + 1, 2)[:classes]
