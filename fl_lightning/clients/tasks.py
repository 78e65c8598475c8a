"""Learning tasks: the loss of a model's outputs, and the metrics of an evaluation."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate, one_hot
from torchmetrics import Metric

from fl_lightning.errors import ConfigurationError
from fl_lightning.recorded import Recorded

Counts = dict[str, Tensor]
"""Counts of a batch: integer tensors by name, which are summed over batches and ranks."""


class Task(Recorded, ABC):
    """Learning task: a loss and metrics.

    A user-defined task must define :meth:`loss`. The setting ``model.metrics`` can add metrics.

    Attributes:
        quality: Name of the main metric, such as ``"accuracy"``. Names in ``model.metrics`` are
            allowed. If small values of a metric of :meth:`metrics` are good, also override
            :attr:`best`.
        by_class: Name of the main metric for a single class, such as ``"iou"``.
        shown: Labels of the task's metrics in figures, by name. The metrics must lie in [0, 1],
            with 1 as the best value.
        ignored: The target that loss and metrics ignore.
        measured: Metrics of ``model.metrics`` by name. The module sets this attribute.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> class Smoothed(Task):
        ...     def loss(self, outputs, targets):
        ...         return cross_entropy(outputs, targets, label_smoothing=0.1)
        >>> state = train(small_cnn(), blobs(), rounds=2, task=Smoothed())
    """

    quality: ClassVar[str] = "loss"
    by_class: ClassVar[str] = "quality"
    shown: ClassVar[Mapping[str, str]] = MappingProxyType({})
    ignored: int = -100
    measured: Mapping[str, Metric] = MappingProxyType({})

    @property
    def best(self) -> dict[str, str]:
        """Direction of each metric by name: ``"max"`` if large values are best, else ``"min"``.

        By default, large values of ``quality`` and ``shown`` are best, and small values of the loss.
        Metrics of ``model.metrics`` have the direction of their ``higher_is_better``.
        """
        known = {**dict.fromkeys([self.quality, *self.shown], "max"), "loss": "min"}
        declared = {name: metric.higher_is_better for name, metric in self.measured.items()}
        return known | {name: "max" if x else "min" for name, x in declared.items() if x is not None}

    def learn(self, names: Mapping[str, bool | None]) -> None:
        """Take note of metrics that a LightningModule logs. By default, nothing happens.

        Args:
            names: Whether large values are best, by name; None if unknown.
        """

    @property
    def class_metric(self) -> str:
        """Name of the metric that :meth:`classes` returns for each class.

        It is the main metric, or ``by_class`` if ``model.metrics`` measures the main metric.
        """
        return self.by_class if self.quality in self.measured else self.quality

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the mean loss of a batch as a scalar tensor."""

    def scores(self, outputs: Any) -> Any:
        """Return the model output that is evaluated: the first output if there are several."""
        if isinstance(outputs, Mapping):
            outputs = [*outputs.values()]
        return outputs[0] if isinstance(outputs, Sequence) else outputs

    def counted(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return a bool mask with the shape of ``targets``, True for targets that count.

        Targets equal to the attribute ``ignored`` do not count.
        """
        return targets.long() != self.ignored  # int64, because uint8 cannot represent -100

    def measurable(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predictions and targets for ``model.metrics``.

        By default, the arguments are returned unchanged. Metrics get floating-point values as
        float64.
        """
        return scores, targets

    def count(self, scores: Tensor, targets: Tensor) -> Counts:
        """Return the counts of a batch, which are then summed over batches.

        By default, the dict is empty.
        """
        return {}

    def metrics(self, counts: Counts) -> dict[str, float]:
        """Compute the metrics from the summed counts. By default, the dict is empty.

        Metrics without samples are left out.
        """
        return {}

    def classes(self, counts: Counts) -> tuple[list[int], list[float | None]]:
        """Return the number of samples and the main metric of each class.

        By default, both lists are empty. The metric of a class without samples is None.
        """
        return [], []


class Classification(Task):
    """Classification of samples, or of parts of samples, such as pixels.

    The metric is the accuracy.

    Args:
        ignored: The label that loss and accuracy ignore. Default: -100, as in torch.

    Example:
        >>> Classification().loss(torch.zeros(2, 4), torch.tensor([1, -100]))  # -100 is ignored
        tensor(1.3863)
    """

    quality = "accuracy"
    by_class = "accuracy"
    shown = MappingProxyType({"accuracy": "accuracy"})

    def __init__(self, ignored: int = -100) -> None:
        self.ignored = ignored

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the cross-entropy. A model with several outputs needs a user-defined loss.

        Raises:
            ConfigurationError: The targets are not labels, or the labels are per image but the
                outputs per pixel.
        """
        if targets.is_floating_point() and targets.shape != getattr(outputs, "shape", None):
            raise ConfigurationError(
                f"model.task: Classification takes labels, but the targets {[*targets.shape]} are {targets.dtype}; write "
                "labels as integers (1, not 1.0), or set model.task to a task of your own (docs/metrics.md)"
            )
        if (
            isinstance(outputs, Tensor)
            and outputs.dim() > 2
            and targets.dim() == 1
            and not targets.is_floating_point()
        ):
            raise ConfigurationError(
                f"model.model: scores {[*outputs.shape]} are per pixel, but the labels {[*targets.shape]} are per image; use a "
                "model that classifies images, such as LeNet or ResNet8, or data with a label for each pixel"
            )
        return cross_entropy(outputs, targets, ignore_index=self.ignored)

    def counted(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return a mask that is True for valid labels.

        Valid labels lie in [0, classes) and differ from ``ignored``.
        """
        labels = targets.long()  # int64, because uint8 cannot represent -100
        return (labels != self.ignored) & (labels >= 0) & (labels < scores.shape[1])

    def measurable(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities ``[n, classes]`` and labels ``[n]``.

        If the targets are not labels, the arguments are returned unchanged.
        """
        if targets.is_floating_point() or targets.dim() != scores.dim() - 1:
            return scores, targets
        return probabilities(scores, targets, self.counted(scores, targets))

    def count(self, scores: Tensor, targets: Tensor) -> Counts:
        """Return the numbers of labels, predictions and correct predictions, ``[3, classes]``.

        A prediction from non-finite outputs is wrong, and counts for no class.

        Raises:
            ConfigurationError: The targets are integer labels, but the model has only one output.
        """
        if targets.is_floating_point() or targets.shape != scores.shape[:1] + scores.shape[2:]:
            return {}
        if scores.dim() < 2 or scores.shape[1] == 1:
            raise ConfigurationError(
                f"model: outputs {[*scores.shape]} for labels {[*targets.shape]}: with one output the most likely class is always 0; make "
                "the model with 2 outputs, or give targets of floating point, which have a loss and no accuracy, or a task of your own"
            )
        classes, counted = scores.shape[1], self.counted(scores, targets)
        # int64, because uint8 cannot represent the number 256
        labels = targets.long().where(counted, classes)
        guesses = scores.argmax(1).where(counted & scores.isfinite().all(1), classes)
        right = labels.where(labels == guesses, classes)
        # count with index_add, because torchmetrics' bincount waits for the GPU
        none = labels.new_zeros(classes + 1)
        sums = [
            none.index_add(0, x, torch.ones_like(x)) for x in map(Tensor.flatten, (labels, guesses, right))
        ]
        return {"by class": torch.stack(sums)[:, :classes]}

    def metrics(self, counts: Counts) -> dict[str, float]:
        """Return the metric ``accuracy``, the fraction of correct predictions."""
        share = self._share(counts)
        return {} if share is None else {"accuracy": share.float().item()}

    def classes(self, counts: Counts) -> tuple[list[int], list[float | None]]:
        """Return the number of samples and the accuracy of each class."""
        samples, _, right = counts["by class"].tolist() if counts else ([], [], [])
        return samples, [x / total if total else None for x, total in zip(right, samples, strict=True)]

    def _share(self, counts: Counts) -> Tensor | None:
        """Return the fraction of correct predictions, float64; None if there are no samples."""
        samples, _, right = counts["by class"].sum(1).double() if counts else torch.zeros(3)
        return right / samples if samples else None


class Segmentation(Classification):
    """Classification of each pixel, with mean intersection over union and pixel accuracy.

    A model may return several outputs, as a sequence or a mapping. The first output is the
    prediction. All other outputs come from auxiliary heads. Outputs are resized to the size of the
    targets by bilinear interpolation.

    Args:
        ignored: The label of ignored pixels. Default: 255, as in Cityscapes.
        auxiliary_weights: Weight of each auxiliary head's loss, relative to the prediction's loss.

    Raises:
        ConfigurationError: The numbers of auxiliary heads and of ``auxiliary_weights`` differ.

    Example:
        >>> scores, labels = torch.zeros(1, 4, 2, 2), torch.tensor([[[1, 255], [255, 255]]])
        >>> Segmentation().loss(scores, labels)  # three of the four pixels are ignored
        tensor(1.3863)
    """

    quality = "mean_iou"
    by_class = "iou"
    shown = MappingProxyType({"mean_iou": "mean IoU", "pixel_accuracy": "pixel accuracy"})

    def __init__(self, ignored: int = 255, auxiliary_weights: Sequence[float] = ()) -> None:
        self.ignored = ignored
        self.auxiliary_weights = list(auxiliary_weights)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the mean cross-entropy per pixel, summed over the outputs with their weights.

        Ignored pixels do not count. If all pixels are ignored, the loss is 0.
        """
        heads = outputs.values() if isinstance(outputs, Mapping) else outputs
        heads = [heads] if isinstance(heads, Tensor) else [*heads]
        weights = [1.0, *self.auxiliary_weights]
        if len(heads) != len(weights):
            raise ConfigurationError(
                f"Segmentation.auxiliary_weights: {len(weights) - 1} weights, but the model has {len(heads) - 1} outputs beside its "
                "prediction; give one weight for each"
            )
        if any(head.dim() != 1 + targets.dim() or head.dim() < 4 for head in heads):
            raise ConfigurationError(
                f"model.task: Segmentation needs scores [b, classes, height, width] and labels [b, height, width], got "
                f"{[*heads[0].shape]} and {[*targets.shape]}; use task: Classification for a label of each image"
            )
        targets = targets.long()
        counted = (targets != self.ignored).sum().clamp(min=1)
        sums = [
            cross_entropy(enlarged(head, targets), targets, ignore_index=self.ignored, reduction="sum")
            for head in heads
        ]
        total: Tensor = sum(weight * loss for weight, loss in zip(weights, sums, strict=True)) / counted
        return total

    def measurable(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pixels' probabilities ``[n, classes]`` and labels ``[n]``."""
        return super().measurable(enlarged(scores, targets), targets.long())

    def count(self, scores: Tensor, targets: Tensor) -> Counts:
        """Return the numbers of pixels, predictions and correct predictions, ``[3, classes]``.

        Raises:
            ConfigurationError: A label is not the number of a class.
        """
        classes, counted = scores.shape[1], targets != self.ignored
        # no check on a GPU, because the check would wait for a result of the GPU
        if targets.device.type == "cpu" and bool((targets[counted] >= classes).any()):
            raise ConfigurationError(
                f"Segmentation: label {int(targets[counted].max())} of a model with {classes} classes; labels are 0 to {classes - 1}, or "
                f"{self.ignored} for pixels that do not count"
            )
        return super().count(enlarged(scores, targets), targets.long())

    def metrics(self, counts: Counts) -> dict[str, float]:
        """Return ``mean_iou`` and ``pixel_accuracy``.

        The mean is over the classes that occur in the labels or in the predictions.
        """
        known, share = [iou for iou in self.classes(counts)[1] if iou is not None], self._share(counts)
        return {} if share is None else {"mean_iou": sum(known) / len(known), "pixel_accuracy": share.item()}

    def classes(self, counts: Counts) -> tuple[list[int], list[float | None]]:
        """Return the number of pixels and the intersection over union of each class."""
        samples, guesses, right = counts["by class"] if counts else torch.zeros(3, 0)
        either = samples + guesses - right
        shares = [i / u if u else None for i, u in zip(right.tolist(), either.tolist(), strict=True)]
        return samples.tolist(), shares


SHIPPED: tuple[type[Task], ...] = (Classification, Segmentation)

QUALITIES = {task.quality: task.shown[task.quality] for task in SHIPPED}
"""Labels of the shipped tasks' main metrics in figures, by the name of the metric."""


def probabilities(scores: Tensor, targets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 probabilities ``[n, classes]`` and labels ``[n]`` of selected targets.

    If an output is not finite, a wrong class gets probability 1.

    Args:
        scores: Class scores ``[b, classes, ...]``.
        targets: Labels ``[b, ...]``.
        counted: Mask of the targets to select, ``[b, ...]``.
    """
    rows, labels = scores.movedim(1, -1)[counted].double(), targets[counted].long()
    wrong = one_hot((labels + 1) % rows.shape[1], rows.shape[1]).double()
    return rows.softmax(1).where(rows.isfinite().all(1, keepdim=True), wrong), labels


def enlarged(scores: Tensor, targets: Tensor) -> Tensor:
    """Resize class scores ``[b, classes, h, w]`` to the size of the targets ``[b, H, W]``.

    The interpolation is bilinear.
    """
    if scores.shape[-2:] == targets.shape[-2:]:
        return scores
    return interpolate(scores, targets.shape[-2:], mode="bilinear", align_corners=False)


def check_quality(task: Task, row: Mapping[str, float], split: str) -> None:
    """Check that an evaluation has measured the main metric of a user-defined task.

    Raises:
        ConfigurationError: The task's ``quality`` is not a metric of the run.
    """
    evaluated = [name.partition("/")[2] for name in row if name.startswith(f"{split}/")]
    if evaluated and task.quality not in evaluated and not type(task).__module__.startswith("fl_lightning."):
        raise ConfigurationError(
            f"model.task: the quality {task.quality!r} of {type(task).__name__} is no metric of this run; add it to "
            f"model.metrics, or set quality to one of {', '.join(evaluated)}"
        )


def best_is(metric: str, known: Mapping[str, str] = MappingProxyType({})) -> Literal["max", "min"] | None:
    """Return whether large or small values of a metric are best.

    Args:
        metric: The metric's name, such as ``"val/accuracy"`` or ``"test/loss_silobn"``.
        known: Directions of the task's metrics by name, each ``"max"`` or ``"min"``.

    Returns:
        ``"min"`` for a loss, ``"max"`` for a quality such as accuracy, None for other metrics. A
        metric of personal models or of clients has the direction of the server model's metric. A
        variance has no direction.
    """
    if metric in known:
        return "min" if known[metric] == "min" else "max"
    name = re.sub("^(personal|own|client|pooled)_", "", metric.rpartition("/")[2])
    if name.endswith("_variance"):
        return None
    shown = [name for task in SHIPPED for name in task.shown]
    directions: dict[str, Literal["max", "min"]] = {**dict.fromkeys(shown, "max"), "loss": "min"}
    directions |= {of: "min" if best == "min" else "max" for of, best in known.items()}
    # the longest name counts: error_free is not the metric error with the source free
    of = max((x for x in directions if name == x or name.startswith(f"{x}_")), key=len, default="")
    return "min" if name.endswith("loss") else directions.get(of)
