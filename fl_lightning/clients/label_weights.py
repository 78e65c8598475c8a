"""Weights and ignored labels of a loss, such as ``CrossEntropyLoss(weight=..., ignore_index=...)``."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

_FORWARDS = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def ignored_label(loss: Any) -> int | None:
    """Return the label that a loss ignores; None if the loss has no ``ignore_index``.

    The loss may be a ``functools.partial``, or a module that contains the actual loss.
    """
    if isinstance(loss, partial):
        given: int | None = loss.keywords.get("ignore_index")
        return ignored_label(loss.func) if given is None else given
    return next((int(part.ignore_index) for part in _parts(loss) if hasattr(part, "ignore_index")), None)


def label_weights(loss: Any) -> Tensor | None:
    """Return the weight of each label in a loss, ``[classes]``; None if the loss tells none.

    The losses are ``CrossEntropyLoss`` and ``NLLLoss``, a module that contains one of them and no
    other module, and a ``functools.partial`` of ``cross_entropy`` or ``nll_loss``. Their mean over
    samples is weighted.
    """
    if isinstance(loss, partial):
        settings, known = loss.keywords, loss.func in (cross_entropy, nll_loss)
    else:
        leaves = [part for part in _parts(loss) if not [*getattr(part, "children", list)()]]
        known = len(leaves) == 1 and getattr(type(leaves[0]), "forward", None) in _FORWARDS
        settings = {"weight": leaves[0].weight, "reduction": leaves[0].reduction} if known else {}
    weight: Tensor | None = settings.get("weight")
    return weight if known and settings.get("reduction", "mean") == "mean" else None


def _parts(loss: Any) -> Iterable[Any]:
    return loss.modules() if isinstance(loss, nn.Module) else [loss]


def weights_of(weights: Tensor | None, outputs: Any, targets: Any, ignored: int) -> Tensor | None:
    """Return the weight of each target in the mean loss of a batch.

    Args:
        weights: The weight of each label, ``[classes]``, or None.
        outputs: The model's outputs, such as class scores ``[b, classes, ...]``.
        targets: The batch's targets, such as labels ``[b, ...]``.
        ignored: The label that the task ignores.

    Returns:
        The weights ``[b, ...]``; None if there are none, or if the targets are no labels of the outputs.
    """
    if weights is None or not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if targets.is_floating_point() or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
        return None
    known = (targets >= 0) & (targets < len(weights)) & (targets != ignored)
    return weights.to(targets.device)[targets.long().where(known, 0)].where(known, 0)
