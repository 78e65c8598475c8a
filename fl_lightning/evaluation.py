"""Evaluation of the server model on the server's data."""

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric


class ServerEvaluation(nn.Module):
    """Loss and, for class labels, accuracy over an evaluation set.

    A sample whose outputs are not all finite counts as wrong: the argmax of NaN would otherwise look like a guess.

    Attributes:
        diverged: Whether any outputs of the last evaluation were not finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = MeanMetric(nan_strategy="disable")
        self.accuracy = MeanMetric(nan_strategy="disable")
        self.diverged = False
        self._broken = False

    def start(self) -> None:
        """Forget everything; called at the start of an evaluation, in whose gradient mode the sums then live."""
        self.loss.reset()
        self.accuracy.reset()
        self._broken = False

    def update(self, outputs: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Add a batch.

        Args:
            outputs: Class scores ``[b, classes, ...]``, or anything else without accuracy.
            targets: Class labels ``[b, ...]`` (integers), or anything else without accuracy.
            loss: Mean loss of the batch.
        """
        # one value per sample: without its NaN check MeanMetric ignores weights
        self.loss.update(loss.expand(len(targets)))
        finite = outputs.isfinite()
        self._broken |= not bool(finite.all())
        if not targets.is_floating_point() and targets.shape == outputs.shape[:1] + outputs.shape[2:]:
            right = (outputs.argmax(1) == targets) & finite.all(1)
            self.accuracy.update(right.to(torch.float32))

    def finish(self) -> dict[str, float]:
        """The metrics of everything since :meth:`start`, by name: ``loss`` and ``accuracy``."""
        metrics = {
            n: m.compute().item()
            for n, m in (("loss", self.loss), ("accuracy", self.accuracy))
            if m.update_called
        }
        self.diverged = self._broken
        return metrics
