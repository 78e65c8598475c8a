"""Metrics of ``model.metrics`` that need no settings, such as sensitivity and specificity.

If there are two classes, class 1 is positive.
"""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torchmetrics import AUROC, CalibrationError, Metric
from torchmetrics.classification import MulticlassConfusionMatrix


class ClassSensitivity(MulticlassConfusionMatrix):
    """Sensitivity (recall): the share of the positive samples that are predicted as positive.

    With more than two classes, each class is positive once. The value is the mean over the classes
    that have samples. The sensitivity is NaN without positive samples.
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """Return the sensitivity, a scalar."""
        return _of_positive(self.confmat.diagonal(), self.confmat.sum(1))


class ClassSpecificity(MulticlassConfusionMatrix):
    """Specificity: the share of the negative samples that are predicted as negative.

    With more than two classes, each class is positive once. The value is the mean over these
    classes. The specificity is NaN without negative samples.
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """Return the specificity, a scalar."""
        negative = self.confmat.sum() - self.confmat.sum(1)
        return _of_positive(negative - self.confmat.sum(0) + self.confmat.diagonal(), negative)


def _of_positive(right: Tensor, samples: Tensor) -> Tensor:
    shares = right.double() / samples
    return shares[1] if len(shares) == 2 else shares.nanmean()


def _of_task(make: Callable[..., Metric], num_classes: int) -> Metric:
    return make(task="binary" if num_classes == 2 else "multiclass", num_classes=num_classes)


NAMED: Mapping[str, Callable[[int], Metric]] = {
    "sensitivity": ClassSensitivity,
    "specificity": ClassSpecificity,
    "calibration": partial(_of_task, CalibrationError),
    "auroc": partial(_of_task, AUROC),
}
"""Metrics by their name in ``model.metrics``. The argument is the number of classes."""
