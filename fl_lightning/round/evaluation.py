"""Evaluation of the server model on the server's data."""

import torch
from torch import Tensor


class ServerEvaluation:
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
        self.metrics: dict[str, float] = {}
        self.diverged = False
        self.class_samples: list[int] = []
        self.class_accuracy: list[float | None] = []
        self._sums: dict[str, Tensor] = {}

    def start(self) -> None:
        """Forget everything; called at the start of an evaluation."""
        self._sums = {}

    def update(self, outputs: Tensor, targets: Tensor, loss: Tensor, ignored: int = -100) -> None:
        """Add a batch. Nothing waits for the device; numbers are read when the evaluation is finished.

        Args:
            outputs: Class scores ``[b, classes, ...]``, or anything else without accuracy.
            targets: Class labels ``[b, ...]`` (integers), or anything else without accuracy.
            loss: Mean loss of the batch, which weighs as many samples as it has targets that count.
            ignored: The label that the loss leaves out, and accuracy too; torch's own is -100.
        """
        finite = outputs.isfinite()
        counted = torch.ones_like(targets, dtype=torch.bool)
        found = {"not finite": ~finite.all()}
        if not targets.is_floating_point() and targets.shape == outputs.shape[:1] + outputs.shape[2:]:
            targets = targets.long()  # bytes know neither class 256 nor -100
            counted = targets != ignored
            right = (outputs.argmax(1) == targets) & finite.all(1) & counted
            found |= {"right": right.sum(), "counted": counted.sum()}
            found["by class"] = _count_by_class(right, targets.where(counted, -1), outputs.shape[1])
        # of the loss's own precision, but not of that of half floats
        samples = counted.reshape(len(counted), -1).to(torch.promote_types(loss.dtype, torch.float32)).mean(1)
        # a batch without a target that counts has no mean loss
        found |= {"loss": (loss.where(samples > 0, 0) * samples).sum(), "samples": samples.sum()}
        self._sums = {name: self._sums[name] + x if name in self._sums else x for name, x in found.items()}

    def finish(self) -> dict[str, float]:
        """The metrics of everything since :meth:`start`, by name: ``loss`` and ``accuracy``."""
        parts = {"loss": ("loss", "samples"), "accuracy": ("right", "counted")}
        sums = {
            name: total if total.is_floating_point() else total.float() for name, total in self._sums.items()
        }
        self.metrics = {
            name: (sums[part] / sums[whole]).item()
            for name, (part, whole) in parts.items()
            if whole in sums and sums[whole] > 0
        }
        self.diverged = "not finite" in sums and bool(sums["not finite"])
        counts = self._sums["by class"].tolist() if "by class" in sums else []
        self.class_samples = [wrong + right for wrong, right in counts]
        self.class_accuracy = [right / (wrong + right) if wrong + right else None for wrong, right in counts]
        return self.metrics


def _count_by_class(right: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Number of wrong and of right samples of each class, int64 ``[classes, 2]``."""
    known = (targets >= 0) & (targets < classes)
    labels = torch.where(known, targets, classes)
    pairs = (2 * labels + right).flatten()
    # as bincount would, which waits for a GPU
    counts = torch.zeros(2 * (classes + 1), dtype=torch.int64, device=pairs.device)
    counts.scatter_add_(0, pairs, torch.ones_like(pairs))
    return counts.view(classes + 1, 2)[:classes]
