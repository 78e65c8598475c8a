"""Metrics of torchmetrics: those of all samples at once, for any number of batches, ranks, variants and clients."""

import math
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torchmetrics as tm
from torch import nn
from torch.nn.functional import mse_loss

from fl_lightning import ConfigurationError, FederatedDataModule, FederatedModule, Task
from fl_lightning.callbacks import ClientEvaluation, FedBN
from fl_lightning.clients.metrics import defined_value, make_metrics, undefined_is_nan
from fl_lightning.datamodules import Shards, TensorData
from fl_lightning.methods.own_data import weighed_accuracy
from fl_lightning.round import Classification, Segmentation, ServerEvaluation
from tests.support.helpers import SGD, ArrayClient, blobs, fit, small_cnn

CLASSES = 3
EVALUATED = {"limit_val_batches": None, "num_sanity_val_steps": -1}


def multiclass(kind, **settings):
    return partial(kind, task="multiclass", num_classes=CLASSES, **settings)


OF_CLASSES = {
    "top2": multiclass(tm.Accuracy, top_k=2),
    "balanced": multiclass(tm.Accuracy, average="macro"),
    "by_class": multiclass(tm.Accuracy, average="none"),
    "f1": multiclass(tm.F1Score, average="macro"),
    "f2": multiclass(tm.FBetaScore, beta=2.0),
    "precision": multiclass(tm.Precision, average="weighted"),
    "recall": multiclass(tm.Recall, average="macro"),
    "specificity": multiclass(tm.Specificity),
    "auroc": multiclass(tm.AUROC),
    "binned": multiclass(tm.AUROC, thresholds=10),
    "average_precision": multiclass(tm.AveragePrecision),
    "calibration": multiclass(tm.CalibrationError),
    "kappa": multiclass(tm.CohenKappa),
    "matthews": multiclass(tm.MatthewsCorrCoef),
    "jaccard": multiclass(tm.JaccardIndex),
    "hamming": multiclass(tm.HammingDistance),
    "hinge": multiclass(tm.HingeLoss),
    "confusion": multiclass(tm.ConfusionMatrix),
    "statistics": multiclass(tm.StatScores),
}


class RunningMean(tm.Metric):
    """The mean of the outputs. Its state is a mean, which the states of unequal batches do not tell."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.count += len(outputs)
        self.mean = self.mean + (outputs - self.mean).sum() / self.count

    def compute(self):
        return self.mean


OF_NUMBERS = {
    "mean": RunningMean,
    "mse": tm.MeanSquaredError,
    "mae": tm.MeanAbsoluteError,
    "r2": tm.R2Score,
    "explained": tm.ExplainedVariance,
    "pearson": tm.PearsonCorrCoef,
    "spearman": tm.SpearmanCorrCoef,
    "concordance": tm.ConcordanceCorrCoef,
}


class Numbers(Task):
    """A number for each sample."""

    quality = "r2"

    def loss(self, outputs, targets):
        return mse_loss(outputs, targets)


def batches(numbers):
    generator = torch.Generator().manual_seed(0)
    for size in (7, 5, 1, 6, 9):
        scores = torch.randn(size, CLASSES, generator=generator).double()
        if numbers:
            yield scores[:, 0], scores[:, 0] + scores[:, 1]
        else:
            yield scores.softmax(1), torch.randint(0, CLASSES, (size,), generator=generator)


def over_ranks(settings, given, size):
    """The metrics where every rank has evaluated some of the batches."""
    task, evaluations = Numbers(), [ServerEvaluation() for _ in range(size)]
    task.measured = make_metrics(settings, None)
    for rank, evaluation in enumerate(evaluations):
        ranks = SimpleNamespace(size=size, rank=rank, exchange=lambda _: [[x._share()] for x in evaluations])
        client = SimpleNamespace(computing=lambda batch: nullcontext())
        run = SimpleNamespace(
            ranks=ranks, task=task, seed=0, trainer=SimpleNamespace(global_step=0), client=client
        )
        for number, batch in enumerate(given):
            evaluation.divide(run, batch, number, lambda batch, to: to.update(*batch, torch.tensor(1.0)))
    assert evaluations[0].finish().pop("loss") == 1
    return evaluations[0].metrics | evaluations[0].arrays


@pytest.mark.filterwarnings("ignore:.*will save all")
@pytest.mark.parametrize("settings", [OF_CLASSES, OF_NUMBERS], ids=["classes", "numbers"])
def test_metrics_of_batches_are_those_of_all_samples_on_any_number_of_ranks(settings):
    given = [*batches(settings is OF_NUMBERS)]
    outputs, targets = map(torch.cat, zip(*given, strict=True))
    found = over_ranks(settings, given, 1)
    for name, make in settings.items():
        metric = make().set_dtype(torch.float64)
        metric.update(outputs, targets)
        expected = torch.as_tensor(metric.compute()).double()
        assert torch.allclose(torch.as_tensor(found[name]).double(), expected, rtol=1e-6, atol=1e-7), name
    assert [over_ranks(settings, given, ranks) for ranks in (2, 3)] == [found] * 2


def test_the_r2_of_years_has_the_digits_of_float64():
    generator = torch.Generator().manual_seed(0)
    years = (1998 + 11 * torch.randn(3000, generator=generator)).round()
    guesses = years + 10 * torch.randn(3000, generator=generator)
    metric = tm.R2Score().set_dtype(torch.float64)
    metric.update(guesses.double(), years.double())
    found = over_ranks({"r2": tm.R2Score}, [(guesses, years)], 1)["r2"]
    assert found == pytest.approx(float(metric.compute()), abs=1e-6)


def data():
    given = blobs(4, sizes=(40, 24, 33))
    clients = [ArrayClient(*x.dataset.tensors, x.batch_size) for x in given.clients]
    found = FederatedDataModule(clients, ArrayClient(*given.server.dataset.tensors, 8))
    found.num_classes = CLASSES
    return found


@cache
def rows(ranks):
    """All metrics of a run in which clients have models of their own."""
    torch.manual_seed(0)
    settings = {name: make for name, make in OF_CLASSES.items() if name != "f1"}
    settings["f1"] = partial(tm.F1Score, task="multiclass", average="macro")
    settings["micro"] = multiclass(tm.Accuracy)
    module = FederatedModule(small_cnn(), SGD, local_steps=2, metrics=settings)
    given = {"strategy": "cohort", "devices": ranks} if ranks > 1 else {}
    fit(module, data(), 2, [FedBN(), ClientEvaluation()], **EVALUATED, **given)
    metrics = {name: value for name, value in module.metrics.items() if not name.startswith("time/")}
    return metrics, module.evaluation.arrays, module.evaluation.class_samples


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_count_logs_the_metrics_of_one_process(ranks):
    assert rows(ranks) == rows(1)


def test_metrics_are_logged_of_the_server_of_personal_models_and_of_clients():
    metrics, arrays, samples = rows(1)
    for name in ("f1", "auroc", "top2"):
        kinds = ("", "personal_", "own_", "client_")
        assert {f"val/{kind}{name}" for kind in kinds} <= metrics.keys()
    assert metrics["val/micro"] == pytest.approx(metrics["val/accuracy"], abs=1e-7)
    assert [sum(row) for row in arrays["confusion"]] == samples
    assert {"confusion", "by_class", "statistics"} == arrays.keys()


def test_an_estimate_from_the_accuracy_of_classes_is_no_other_metric():
    class ByF1(Classification):
        quality = "f1"

    torch.manual_seed(0)
    inputs, labels = torch.randn(60, 4), torch.arange(60) % CLASSES
    data = TensorData(inputs, labels, num_clients=2, batch_size=5, partition=Shards(class_fraction=0.6))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    metrics = {"f1": multiclass(tm.F1Score, average="macro")}
    module = FederatedModule(model, SGD, local_steps=1, task=ByF1(), metrics=metrics)
    fit(module, data, 1, [FedBN(), ClientEvaluation()], **EVALUATED)
    classes = module.evaluation.class_quality
    shares = [weighed_accuracy(classes, histogram) for histogram in data.class_histograms()]
    assert module.metrics["test/client_accuracy"] == pytest.approx(sum(shares) / 2, abs=1e-6)
    assert {"test/own_accuracy", "test/personal_f1"} <= module.metrics.keys()
    assert not {"test/own_f1", "test/client_f1"} & module.metrics.keys()


def test_outputs_that_are_not_finite_count_as_wrong_and_ignored_labels_not_at_all():
    scores = torch.tensor([[9.0, 0, 0], [float("nan"), 9, 0], [0, 9, 0], [0, 0, 9]])
    targets = torch.tensor([0, 0, 1, -100])
    task = Classification()
    task.measured = make_metrics({"micro": multiclass(tm.Accuracy), "auroc": multiclass(tm.AUROC)}, None)
    evaluation = ServerEvaluation()
    evaluation.update(scores, targets, torch.tensor(1.0), task)
    metrics = evaluation.finish()
    assert metrics["micro"] == metrics["accuracy"] == pytest.approx(2 / 3)


def test_pixels_are_samples():
    task = Segmentation()
    task.measured = make_metrics(
        {"jaccard": multiclass(tm.JaccardIndex), "micro": multiclass(tm.Accuracy)}, None
    )
    scores = torch.randn(2, CLASSES, 4, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(40).reshape(2, 4, 5) % (CLASSES + 1)
    targets[targets == CLASSES] = 255
    evaluation = ServerEvaluation()
    evaluation.update(scores, targets, torch.tensor(1.0), task)
    metrics = evaluation.finish()
    assert metrics["jaccard"] == pytest.approx(metrics["mean_iou"], abs=1e-6)
    assert metrics["micro"] == pytest.approx(metrics["pixel_accuracy"], abs=1e-6)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"mse": tm.MeanSquaredError}, "model.metrics.mse: MeanSquaredError cannot be computed from outputs"),
        ({"accuracy": multiclass(tm.F1Score)}, "model.metrics: 'accuracy' is taken"),
        ({"a/b": multiclass(tm.F1Score)}, "model.metrics: 'a/b' is no name"),
        ({1: multiclass(tm.F1Score)}, "model.metrics: 1 is no name"),
        ({"own_f1": multiclass(tm.F1Score)}, "model.metrics: 'own_f1' is taken"),
        ({"f1": partial(tm.F1Score, task="multiclass", average="best")}, "model.metrics.f1: "),
        ({"f1": lambda: 3}, "model.metrics.f1: int is no metric"),
        (
            {"mse": partial(tm.MeanSquaredError, squard=True)},
            "model.metrics.mse: Unexpected keyword arguments: `squard`",
        ),
        (
            {"pearson": tm.PearsonCorrCoef},
            "model.metrics.pearson: PearsonCorrCoef cannot be computed from outputs",
        ),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused_before_training(metrics, words):
    trained = []

    class Module(FederatedModule):
        def client_batches(self, *args):
            trained.append(args)
            return super().client_batches(*args)

    def run():
        fit(Module(small_cnn(), SGD, local_steps=1, metrics=metrics), data(), 1)

    with pytest.raises(ConfigurationError, match=words):
        run()
    assert trained == []


class PerClass(tm.Metric):
    full_state_update = False

    def __init__(self, num_classes=None):
        super().__init__()
        self.add_state("counts", torch.zeros(num_classes), "sum")

    def update(self, scores, labels):
        self.counts += labels.bincount(minlength=len(self.counts))

    def compute(self):
        return self.counts.max()


@pytest.mark.parametrize(
    "setting",
    [
        PerClass,
        lambda num_classes=None: tm.classification.MulticlassAUROC(num_classes, thresholds=5),
        lambda num_classes=0: tm.classification.MulticlassAccuracy(num_classes or int("no number")),
        lambda num_classes: tm.classification.MulticlassAccuracy(num_classes),
    ],
)
def test_a_metric_gets_the_number_of_classes_whatever_its_error_without_them_says(setting):
    (metric,) = make_metrics({"it": setting}, 3).values()
    assert getattr(metric, "num_classes", 3) == 3
    with pytest.raises(ConfigurationError, match=r"^model\.metrics\.it: "):
        make_metrics({"it": setting}, None)


def test_a_task_needs_no_more_than_a_loss():
    given = blobs(4, sizes=(40, 24, 33))
    sources = [(*x.dataset.tensors, x.batch_size) for x in (*given.clients, given.server)]
    *numbers, server = [ArrayClient(inputs, labels.float(), size) for inputs, labels, size in sources]
    model = nn.Sequential(nn.Flatten(), nn.Linear(sources[0][0][0].numel(), 1), nn.Flatten(0))
    module = FederatedModule(
        model, SGD, local_steps=2, task=Numbers(), metrics={"r2": tm.R2Score, "mse": tm.MeanSquaredError}
    )
    fit(module, FederatedDataModule(numbers, server), 3, **EVALUATED)
    assert module.metrics["val/mse"] == pytest.approx(module.metrics["val/loss"], rel=1e-5)
    assert module.task.best == {"r2": "max", "mse": "min", "loss": "min"}


def test_a_batch_whose_labels_are_all_ignored_changes_no_metric():
    task = Classification()
    settings = {"auroc": multiclass(tm.AUROC), "calibration": multiclass(tm.CalibrationError)}
    task.measured = make_metrics(settings, None)
    given = [*batches(numbers=False)]
    found = []
    for ignored in (False, True):
        evaluation = ServerEvaluation()
        for scores, labels in given:
            evaluation.update(scores, labels, torch.tensor(1.0), task)
        if ignored:
            evaluation.update(scores, torch.full_like(labels, -100), torch.tensor(1.0), task)
        found.append(evaluation.finish())
    assert found[0] == found[1]


def test_a_metric_that_wraps_others_is_computed_from_all_inputs():
    settings = {"by": lambda: tm.wrappers.ClasswiseWrapper(OF_CLASSES["by_class"]())}
    found = over_ranks(settings, [*batches(numbers=False)], 2)
    plain = over_ranks({"by_class": OF_CLASSES["by_class"]}, [*batches(numbers=False)], 1)
    assert [*found.values()] == pytest.approx(plain["by_class"], abs=1e-7)


def test_an_evaluation_that_is_finished_twice_has_the_same_metrics():
    task = Numbers()
    task.measured = make_metrics({"mse": tm.MeanSquaredError}, None)
    evaluation = ServerEvaluation()
    evaluation.update(torch.ones(3), torch.zeros(3), torch.tensor(1.0), task)
    assert evaluation.finish() == evaluation.finish() == {"loss": 1.0, "mse": 1.0}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("average", "labels", "defined"),
    [
        ("macro", [0, 1, 2], True),
        ("macro", [0, 1], False),
        ("weighted", [0, 1], True),
        ("weighted", [0], False),
    ],
)
def test_a_metric_of_a_class_that_no_sample_has_is_nan(average, labels, defined, rank, monkeypatch):
    """torchmetrics takes 0 for such a class. In a weighted mean, the weight of an absent class is 0."""
    monkeypatch.setattr(tm.utilities.prints.rank_zero_only, "rank", rank)  # it warns on rank 0 only
    targets = torch.tensor(labels).repeat(8)
    scores = torch.randn(len(targets), 3, generator=torch.Generator().manual_seed(0)).softmax(1)
    task = Classification()
    task.measured = make_metrics({"auroc": partial(tm.AUROC, task="multiclass", average=average)}, 3)
    evaluation = ServerEvaluation()
    evaluation.update(scores.log(), targets, torch.tensor(1.0), task)
    found = evaluation.finish()["auroc"]
    if not defined:
        assert math.isnan(found)
        return
    of_classes = []
    for label in labels:
        own, others = scores[targets == label, label], scores[targets != label, label]
        of_classes.append((own[:, None] > others[None]).double().mean())
    assert found == pytest.approx(float(torch.stack(of_classes).mean()), abs=1e-6)


@pytest.mark.parametrize(
    "wrap", [tm.wrappers.ClasswiseWrapper, lambda metric: metric + 0.0, tm.wrappers.MinMaxMetric]
)
def test_an_undefined_metric_in_a_metric_is_nan_each_time(wrap):
    one = tm.classification.MulticlassAUROC(3, average="macro" if wrap is tm.wrappers.MinMaxMetric else None)
    metric = wrap(one)
    generator = torch.Generator().manual_seed(0)
    metric.update(torch.rand(8, 3, generator=generator).softmax(1), torch.zeros(8).long())
    usual = metric.compute
    for _ in range(2):
        values = [defined_value(metric)]
        with undefined_is_nan([x for x in metric.modules() if isinstance(x, tm.Metric)]) as undefined:
            values.append(metric.compute())
        for value in values:
            parts = value.values() if isinstance(value, dict) else [value]
            assert torch.stack([*parts])[: 1 if wrap is tm.wrappers.MinMaxMetric else None].isnan().all()
        assert undefined
    assert metric.compute is usual


def test_other_warnings_of_a_metric_are_shown():
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert defined_value(tm.MeanSquaredError()).isnan()
