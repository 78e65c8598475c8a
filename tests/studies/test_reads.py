"""Which columns of a study's table can exist is known before its first run."""

import pytest
from helpers import SGD, small_cnn
from torchmetrics import ConfusionMatrix, R2Score
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix, MulticlassF1Score

from fl_lightning import ConfigurationError, FederatedModule
from fl_lightning.experiments.studies.reads import check_columns_exist, texts

METRICS = {
    "confusion": MulticlassConfusionMatrix,
    "by_class": lambda num_classes: MulticlassF1Score(num_classes, average=None),
    "object": ConfusionMatrix(task="multiclass", num_classes=3),
    "f1": MulticlassF1Score,
    "auroc": MulticlassAUROC,
    "r2": R2Score,
}


def test_a_metric_with_several_values_is_no_column():
    module = FederatedModule(small_cnn(), SGD, local_steps=1, metrics=METRICS)
    known = texts(module, {"trainer": {"callbacks": []}, "model": {}}, 3)
    assert known == {"accuracy", "loss", "f1", "auroc", "r2"}
    check_columns_exist(["test/f1", "val/client_auroc_worst", "test/r2"], known)
    with pytest.raises(
        ConfigurationError, match=r"metrics: no run can have test/confusion.*; every number has one of acc"
    ):
        check_columns_exist(["test/f1", "test/confusion"], known)
    # the data may know their classes only later
    assert {"confusion", "f1"} < texts(module, {"trainer": {"callbacks": []}, "model": {}}, None)
