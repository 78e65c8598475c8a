"""The weights of labels in the mean that a loss takes: with them the means of batches give the mean of all data."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.randomness import generator

_Loss = Callable[[Tensor, Tensor], Tensor]


def ignored_label(loss: Any) -> int | None:
    """The label that a loss says it ignores: its ``ignore_index``, that of a partial function, or of a module in it; None for none."""
    if isinstance(loss, partial):
        given: int | None = loss.keywords.get("ignore_index")
        return ignored_label(loss.func) if given is None else given
    parts: list[Any] = [*loss.modules()] if isinstance(loss, nn.Module) else [loss]
    return next((int(part.ignore_index) for part in parts if hasattr(part, "ignore_index")), None)


class LabelWeights:
    """The weights of labels in a loss of the user's own, such as ``CrossEntropyLoss(weight=...)``.

    The loss itself tells them, whatever it is made of: of a mean over samples of weights w, the gradient by the outputs of sample i
    is w_i / sum(w) times that of sample i alone.

    Args:
        loss: The loss; None for that of a task, which weighs all labels alike.
    """

    def __init__(self, loss: _Loss | None) -> None:
        self._loss = loss
        self._hides_ignored = ignored_label(loss) is None
        self._found: dict[int, Tensor | None] = {}

    def forget(self) -> None:
        """Ask the loss again: its weights may have changed since the last evaluation."""
        self._found = {}

    def of(self, outputs: Any, targets: Any, ignored: int) -> tuple[Any, Tensor | None]:
        """Weigh the targets of a batch.

        Args:
            outputs: The model's, such as class scores ``[b, classes, ...]``.
            targets: Such as labels ``[b, ...]``.
            ignored: The label that does not count.

        Returns:
            The targets, with those as ``ignored`` that the loss ignores without an ``ignore_index``; and the weight of each of them,
            None where all that count weigh alike, or where the loss is no mean that has weights of labels.
        """
        if self._loss is None or not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return targets, None
        integers = targets.dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
        if not integers or outputs.dim() < 2 or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
            return targets, None
        classes = outputs.shape[1]
        if classes not in self._found:
            self._found[classes] = _shares(self._loss, outputs, targets)
        shares = self._found[classes]
        if shares is None:
            return targets, None
        labels = targets.long()
        known = (labels >= 0) & (labels < classes) & (labels != ignored)
        weights = shares[labels.where(known, 0)].where(known, 0)
        if self._hides_ignored:
            targets = labels.where(weights > 0, ignored)
        others = shares[torch.arange(classes, device=shares.device) != ignored]
        return targets, None if _alike(others) else weights


@torch.inference_mode(mode=False)
@torch.enable_grad()
def _shares(loss: _Loss, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """The weight of each label in a mean over one sample of each, sum 1; None where the loss is no such mean."""
    classes, places = outputs.shape[1], [1] * (outputs.dim() - 2)
    if classes < 2 or classes > torch.iinfo(targets.dtype).max:
        return None
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    labels = torch.arange(classes, device=targets.device).to(targets.dtype).reshape(classes, *places)
    found = []
    with suppress(Exception):  # of a loss that takes other batches only
        loss = deepcopy(loss)  # it may count its calls
        for draw in range(2):  # a loss that chooses among its samples chooses others
            noise = torch.rand(classes, classes, *places, generator=generator(0, "label weights", draw))
            scores = ((0.5 + noise) / classes).to(outputs.device, dtype).requires_grad_()
            (whole,) = torch.autograd.grad(loss(scores, labels), scores)
            rows = zip(torch.split(scores, 1), torch.split(labels, 1), strict=True)
            alone = torch.cat([torch.autograd.grad(loss(one, label), one)[0] for one, label in rows])
            whole, alone = whole.flatten(1), alone.flatten(1)
            ignored = (whole == 0).all(1)
            found.append(((whole * alone).sum(1) / alone.square().sum(1)).masked_fill(ignored, 0))
        first, second = found
        is_mean = all(abs(float(shares.sum()) - 1) < _tolerance(shares) for shares in found)
        if is_mean and bool((first - second).abs().max() < _tolerance(first) / classes):
            return first * classes
    return None


def _alike(shares: Tensor) -> bool:
    return bool(shares.max() - shares.min() < _tolerance(shares))


def _tolerance(shares: Tensor) -> float:
    return float(torch.finfo(shares.dtype).eps ** 0.5)
