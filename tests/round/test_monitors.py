"""A monitored metric that nothing logs is refused before training, and never one that is logged."""

from types import SimpleNamespace

import pytest
import torchmetrics
from contract import EVERY_ROW, method_of
from helpers import SGD, blobs, fit, small_cnn
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint

from fl_lightning import ConfigurationError, FederatedModule
from fl_lightning.callbacks import BatchNormDiagnostics, FixBN
from fl_lightning.round.monitors import check_monitors
from fl_lightning.testing import Rows

EVALUATED = {"num_sanity_val_steps": -1, "limit_val_batches": 1.0}


def train(*callbacks, kind=FederatedModule, rounds=2, **trainer):
    metrics = {"f1": lambda: torchmetrics.F1Score("multiclass", num_classes=3)}
    module = kind(small_cnn(), SGD, local_steps=1, metrics=metrics)
    return fit(module, blobs(), rounds, callbacks, **{**EVALUATED, **trainer})


@pytest.mark.parametrize(
    "monitor", ["val_loss", "val/losss", "test/loss", "accuracy", "bn/train_eval_gap", "train/los"]
)
def test_a_metric_that_nothing_logs_is_refused_before_training(monitor):
    words = rf"EarlyStopping.monitor: nothing in this run logs '{monitor}'; logged are: train/loss, .*val/accuracy.*comm/"
    with pytest.raises(ConfigurationError, match=words):
        train(FixBN(), EarlyStopping(monitor))
    with pytest.raises(ConfigurationError, match="ModelCheckpoint"):
        train(ModelCheckpoint(monitor=monitor))


@pytest.mark.parametrize(
    "monitor", ["val/loss", "val/f1", "train/loss", "client/lr", "comm/upload_bytes", "bn/train_eval_gap",
                "val/accuracy_batch_statistics"]
)  # fmt: skip
def test_a_metric_of_the_task_of_model_metrics_or_of_an_observer_is_accepted(monitor):
    assert train(EarlyStopping(monitor), BatchNormDiagnostics()).global_step == 2


def test_a_variant_that_is_measured_on_demand_is_accepted():
    measured = BatchNormDiagnostics(measure=["bias"])
    assert train(EarlyStopping("val/accuracy_recalibrated"), measured).global_step == 2


def test_without_an_evaluation_before_training_only_the_other_split_is_refused():
    before = {"num_sanity_val_steps": 0}
    assert train(EarlyStopping("val/f1"), **before).global_step == 2
    with pytest.raises(ConfigurationError, match=r"'test/loss'.* logged are: train/loss, .*val/\.\.\."):
        train(EarlyStopping("test/loss"), **before)


class Mine(Callback):
    """Logs a metric after the first round."""

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("mine", 1.0)


class Own(FederatedModule):
    """A module of a user's own that logs."""

    def on_train_epoch_end(self):
        self.log("mine", 1.0)
        super().on_train_epoch_end()


def log(trainer, pl_module):
    pl_module.log("mine", 1.0)


def test_classes_and_functions_of_a_user_may_log_anything(tmp_path):
    for callbacks in ([Mine()], [LambdaCallback(on_train_epoch_end=log)]):
        assert train(*callbacks, EarlyStopping("mine", check_on_train_epoch_end=True)).global_step == 2
    assert train(EarlyStopping("mine", check_on_train_epoch_end=False, strict=False)).global_step == 2
    assert train(EarlyStopping("mine", strict=False), kind=Own).global_step == 2
    assert train(ModelCheckpoint(dirpath=tmp_path, monitor="step", mode="max")).global_step == 2


class FirstRow(Callback):
    """Keeps row 0."""

    def on_train_start(self, trainer, pl_module):
        self.row = dict(pl_module.metrics)


@EVERY_ROW
def test_no_metric_of_a_shipped_callback_is_refused(row):
    """Every metric of four rounds is accepted, from row 0 and the callbacks' ``logs`` alone."""
    rows, first, method = Rows(), FirstRow(), method_of(row)
    steps = {} if "local_epochs" in row.module else {"local_steps": 2}
    module = FederatedModule(small_cnn(), **{"client_optimizer": SGD, **steps, **row.module})
    fit(module, blobs(4, (24, 40, 32)), 4, [method, first, rows], **EVALUATED)
    assert first.row["round"] == 0
    for metric in {metric for values in rows.rows.values() for metric in values} - {"round"}:
        trainer = SimpleNamespace(callbacks=[method, EarlyStopping(metric)])
        check_monitors(trainer, module, first.row, "val")
