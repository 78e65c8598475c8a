"""Evaluation of the server model on the server's data."""

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric


class ServerEvaluation(nn.Module):
    """Loss and, for class labels, accuracy over an evaluation set, in total and by class.

    A sample whose outputs are not all finite counts as wrong: the argmax of NaN would otherwise look like a guess.

    Attributes:
        metrics: ``loss`` and ``accuracy`` of the last evaluation, as :meth:`finish` returned them.
        diverged: Whether any outputs of the last evaluation were not finite.
        class_samples: Number of samples of each class in the last evaluation; empty without class labels.
        class_accuracy: Share of them that was right, None for a class without samples; empty without class
            labels. A label that is none of the classes, such as the 255 of unlabelled pixels, belongs to none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = MeanMetric(nan_strategy="disable")
        self.accuracy = MeanMetric(nan_strategy="disable")
        self.metrics: dict[str, float] = {}
        self.diverged = False
        self.class_samples: list[int] = []
        self.class_accuracy: list[float | None] = []
        self._finite: Tensor | None = None
        self._counts: Tensor | None = None

    def start(self) -> None:
        """Forget everything; called at the start of an evaluation, in whose gradient mode the sums then live."""
        self.loss.reset()
        self.accuracy.reset()
        self._finite = self._counts = None

    def update(self, outputs: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Add a batch. Nothing waits for the device; numbers are read when the evaluation is finished.

        Args:
            outputs: Class scores ``[b, classes, ...]``, or anything else without accuracy.
            targets: Class labels ``[b, ...]`` (integers), or anything else without accuracy.
            loss: Mean loss of the batch.
        """
        # one value per sample: without its NaN check MeanMetric ignores weights
        self.loss.update(loss.expand(len(targets)))
        finite = outputs.isfinite()
        self._finite = finite.all() if self._finite is None else self._finite & finite.all()
        if not targets.is_floating_point() and targets.shape == outputs.shape[:1] + outputs.shape[2:]:
            right = (outputs.argmax(1) == targets) & finite.all(1)
            self.accuracy.update(right.to(torch.float32))
            counts = _count_by_class(right, targets, outputs.shape[1])
            self._counts = counts if self._counts is None else self._counts + counts

    def finish(self) -> dict[str, float]:
        """The metrics of everything since :meth:`start`, by name: ``loss`` and ``accuracy``."""
        self.metrics = {
            n: m.compute().item()
            for n, m in (("loss", self.loss), ("accuracy", self.accuracy))
            if m.update_called
        }
        self.diverged = self._finite is not None and not bool(self._finite)
        counts = self._counts.tolist() if self._counts is not None else []
        self.class_samples = [wrong + right for wrong, right in counts]
        self.class_accuracy = [right / (wrong + right) if wrong + right else None for wrong, right in counts]
        return self.metrics


def _count_by_class(right: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Number of wrong and of right samples of each class, int64 ``[classes, 2]``."""
    targets = targets.long()  # bytes know no class 256
    known = (targets >= 0) & (targets < classes)
    labels = torch.where(known, targets, classes)
    pairs = (2 * labels + right).flatten()
    # as bincount would, which waits for a GPU
    counts = torch.zeros(2 * (classes + 1), dtype=torch.int64, device=pairs.device)
    counts.scatter_add_(0, pairs, torch.ones_like(pairs))
    return counts.view(classes + 1, 2)[:classes]
