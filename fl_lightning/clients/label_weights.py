"""Weights and ignored labels of a loss, such as ``CrossEntropyLoss(weight=..., ignore_index=...)``."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss


def ignored_label(loss: Any) -> int | None:
    """Return the ``ignore_index`` of a loss, or None.

    The loss may be a ``functools.partial``, or a module that contains the actual loss.
    """
    label = _settings(loss).get("ignore_index")
    return None if label is None else int(label)


def label_weights(loss: Any) -> Tensor | None:
    """Return the weight of each label in a loss, ``[classes]``; None if the loss does not tell.

    The losses are ``CrossEntropyLoss`` and ``NLLLoss``, or modules that contain one, and
    ``functools.partial`` of ``cross_entropy`` and ``nll_loss``. Each is a mean that these weights weigh.
    """
    settings = _settings(loss)
    weight: Tensor | None = settings.get("weight")
    return weight if settings.get("reduction", "mean") == "mean" else None


def _settings(loss: Any) -> dict[str, Any]:
    if isinstance(loss, partial):
        known = loss.func in (cross_entropy, nll_loss) or isinstance(loss.func, partial)
        given = {key: value for key, value in loss.keywords.items() if known or key == "ignore_index"}
        return _settings(loss.func) | given
    parts = loss.modules() if isinstance(loss, nn.Module) else [loss]
    return next((vars(part) | _buffers(part) for part in parts if hasattr(part, "ignore_index")), {})


def _buffers(part: Any) -> dict[str, Any]:
    return dict(part.named_buffers()) if isinstance(part, nn.Module) else {}


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
