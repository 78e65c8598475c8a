"""Weights of labels in a user's loss, such as ``CrossEntropyLoss(weight=...)``."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.clients.tasks import Classification, Segmentation, Task
from fl_lightning.randomness import generator

_Loss = Callable[[Tensor, Tensor], Tensor]


def ignored_label(loss: Any) -> int | None:
    """Return the ``ignore_index`` of a loss, or None.

    The loss may be a ``functools.partial``, or a module that contains the actual loss.
    """
    if isinstance(loss, partial):
        given: int | None = loss.keywords.get("ignore_index")
        return ignored_label(loss.func) if given is None else given
    parts: list[Any] = [*loss.modules()] if isinstance(loss, nn.Module) else [loss]
    return next((int(part.ignore_index) for part in parts if hasattr(part, "ignore_index")), None)


class LabelWeights:
    """Weight of each label in a user's loss, such as ``CrossEntropyLoss(weight=...)``.

    The weights are measured by gradients, because a loss may be any function. In a weighted mean,
    the gradient for sample i is w_i / sum(w) times the gradient of the loss of sample i alone.

    Args:
        loss: The user's loss. None for the task's loss, whose ignored label is ``task.ignored``.
        task: The task. The losses of this package's tasks have equal weights.
    """

    def __init__(self, loss: _Loss | None, task: Task) -> None:
        equal = type(task).loss in (Classification.loss, Segmentation.loss)
        self._loss = loss or (None if equal else task.loss)
        self._hides_ignored = loss is not None and ignored_label(loss) is None
        self._shares: dict[int, Tensor | None] = {}

    def forget(self) -> None:
        """Discard the measured label weights, because a loss may change its weights."""
        self._shares = {}

    def of(self, outputs: Any, targets: Any, ignored: int) -> tuple[Any, Tensor | None]:
        """Return the targets of a batch, and the weight of each target.

        Args:
            outputs: The model's outputs, such as class scores ``[b, classes, ...]``.
            targets: The batch's targets, such as labels ``[b, ...]``.
            ignored: The label that the task ignores.

        Returns:
            The targets and the weights. If the loss has no ``ignore_index``, labels with weight 0
            are replaced by ``ignored``. The weights are None if all weights are equal, or if the
            loss is not a weighted mean.
        """
        if self._loss is None or not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return targets, None
        integers = targets.dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
        if not integers or outputs.dim() < 2 or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
            return targets, None
        classes = outputs.shape[1]
        if classes not in self._shares:
            self._shares[classes] = _measure_shares(self._loss, outputs, targets)
        shares = self._shares[classes]
        if shares is None:
            return targets, None
        labels = targets.long()
        known = (labels >= 0) & (labels < classes) & (labels != ignored)
        weights = shares[labels.where(known, 0)].where(known, 0)
        if self._hides_ignored:
            targets = labels.where(weights > 0, ignored)
        others = shares[torch.arange(classes, device=shares.device) != ignored]
        return targets, None if others.max() - others.min() < _tolerance(others) else weights


@torch.inference_mode(mode=False)
@torch.enable_grad()
def _measure_shares(loss: _Loss, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return the weight of each label in the loss; None if the loss is not a weighted mean.

    The mean of the weights is 1.
    """
    classes, places = outputs.shape[1], [1] * (outputs.dim() - 2)
    if classes < 2 or classes > torch.iinfo(targets.dtype).max:
        return None
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    labels = torch.arange(classes, device=targets.device).to(targets.dtype).reshape(classes, *places)
    draws = []
    with suppress(Exception):  # the user's loss may not accept these batches
        loss = deepcopy(loss)  # a copy, because a call may change the loss
        for draw in range(2):  # a loss that uses only some of the samples gives two different results
            noise = torch.rand(classes, classes, *places, generator=generator(0, "label weights", draw))
            scores = ((0.5 + noise) / classes).to(outputs.device, dtype).requires_grad_()
            (joint,) = torch.autograd.grad(loss(scores, labels), scores)
            rows = zip(torch.split(scores, 1), torch.split(labels, 1), strict=True)
            alone = torch.cat([torch.autograd.grad(loss(row, label), row)[0] for row, label in rows])
            joint, alone = joint.flatten(1), alone.flatten(1)
            ignored = (joint == 0).all(1)
            draws.append(((joint * alone).sum(1) / alone.square().sum(1)).masked_fill(ignored, 0))
        first, second = draws
        is_mean = all(abs(float(shares.sum()) - 1) < _tolerance(shares) for shares in draws)
        if is_mean and bool((first - second).abs().max() < _tolerance(first) / classes):
            return first * classes
    return None


def _tolerance(shares: Tensor) -> float:
    return float(torch.finfo(shares.dtype).eps ** 0.5)
