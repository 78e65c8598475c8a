"""Logged values, metric objects and evaluations equal Lightning's, or are refused by name before round 1."""

from pathlib import Path

import lightning as L
import pytest
import torch
import torchmetrics
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.wrappers import Running

from fl_lightning import ConfigurationError, FederatedDataModule
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from tests.support.lightning_sites import TRAINER, Site, federated
from tests.support.plain_lightning import (
    Metrics,
    Small,
    equal_or_refused,
    lightning_client,
    new,
    trained,
)

pytestmark = pytest.mark.first_steps


def refused_before_round_1(kind, message, data=None):
    seen = Metrics()
    with pytest.raises(ConfigurationError, match=message):
        federated(new(kind), seen, data=data, rounds=2)
    assert seen.rounds == 0, "refused after local steps of round 1"


# metric objects in training_step


class MeanOfBatches(torchmetrics.Metric):
    """The mean over updates, written without a count of its own."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, value):
        self.mean = self.mean + (value - self.mean) / self._update_count

    def compute(self):
        return self.mean


class Measures(Small):
    """Updates a metric object in each step."""

    def metric(self):
        return MeanOfBatches()

    def __init__(self):
        super().__init__()
        self.seen = self.metric()

    def training_step(self, batch, batch_idx):
        self.seen.update(batch[0].sum())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class MeasuresByForward(Measures):
    def training_step(self, batch, batch_idx):
        self.seen(batch[0].sum())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return Small.training_step(self, batch, batch_idx)


class LogsComputed(Measures):
    def training_step(self, batch, batch_idx):
        self.seen.update(batch[0].sum())
        return Small.training_step(self, batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("seen", self.seen.compute())
        self.seen.reset()


class MeanMetric(Measures):
    def metric(self):
        return torchmetrics.MeanMetric()


class SumMetric(Measures):
    def metric(self):
        return torchmetrics.SumMetric()


OF_STEPS = [
    Measures,
    MeasuresByForward,
    LogsComputed,
]


def lightning_value(kind, site, name="seen"):
    module = new(kind, torch.float64)
    return float(lightning_client(module, site, precision="64-true").callback_metrics[name])


@pytest.mark.parametrize("kind", [*OF_STEPS, MeanMetric, SumMetric])
def test_a_metric_of_one_client_equals_lightning(kind):
    data = FederatedDataModule({"site": Site(1, train=24)}, server=Site(99))
    got = trained(kind, data, local_epochs=1)["seen"]
    assert got == pytest.approx(lightning_value(kind, Site(1, train=24)), rel=1e-6)


@pytest.mark.parametrize("kind", [*OF_STEPS, MeanMetric])
def test_the_mean_of_several_clients_counts_their_updates(kind):
    data = FederatedDataModule({"long": Site(1, train=24), "short": Site(2, train=8)}, server=Site(99))
    got = trained(kind, data, local_epochs=1)["seen"]
    expected = (3 * lightning_value(kind, Site(1, train=24)) + lightning_value(kind, Site(2, train=8))) / 4
    assert got == pytest.approx(expected, rel=1e-6)


class RunningMean(Measures):
    def metric(self):
        return Running(torchmetrics.MeanMetric(), window=2)


class RunningSum(Measures):
    def metric(self):
        return Running(torchmetrics.SumMetric(), window=2)


class RunningInCollection(Measures):
    def __init__(self):
        super().__init__()
        self.seen = torchmetrics.MetricCollection({"last": RunningMean.metric(self)})

    def training_step(self, batch, batch_idx):
        self.seen.update(batch[0].sum())
        self.log_dict(self.seen, on_step=False, on_epoch=True)
        return Small.training_step(self, batch, batch_idx)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("kind", [RunningMean, RunningSum, RunningInCollection])
def test_a_running_metric_of_steps_is_refused_by_name(kind):
    refused_before_round_1(kind, r"(?s)(?=.*seen)(?=.*Running)")


class RunningInValidation(RunningMean):
    training_step = Small.training_step

    def validation_step(self, batch, batch_idx):
        self.seen.update(batch[0].sum())
        self.log("val_seen", self.seen, on_step=False, on_epoch=True)


def validated(module, site=None):
    """Return the values that Lightning logs in an evaluation of a module."""
    trainer = L.Trainer(precision="64-true", **TRAINER)
    return trainer.validate(module, datamodule=site or Site(99), verbose=False)[0]


def test_a_running_metric_of_the_servers_validation_equals_lightning():
    got = trained(RunningInValidation)["val_seen"]
    assert got == pytest.approx(validated(new(RunningInValidation, torch.float64))["val_seen"], rel=1e-6)


# batch sizes, reductions and batches


class CountsSomeSteps(Small):
    """Logs a loss over the labels that are known, which some batches have none of."""

    sizes = (0, 8, 3)

    def training_step(self, batch, batch_idx):
        self.log("seen", batch[0].sum(), batch_size=self.sizes[batch_idx])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_seen", batch[0].sum(), batch_size=self.sizes[batch_idx])


class CountsLastStep(CountsSomeSteps):
    sizes = (0, 0, 8)


class CountsFirstStep(CountsSomeSteps):
    sizes = (8, 0, 0)


class CountsByDict(CountsSomeSteps):
    def training_step(self, batch, batch_idx):
        self.log_dict({"seen": batch[0].sum()}, batch_size=self.sizes[batch_idx])
        return Small.training_step(self, batch, batch_idx)


class CountsByTensor(CountsSomeSteps):
    sizes = tuple(map(torch.tensor, (0, 8, 3)))


class CountsAfterStep(CountsSomeSteps):
    training_step = Small.training_step

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", batch[0].sum(), batch_size=self.sizes[batch_idx])


class CountsByStepAndEpoch(CountsSomeSteps):
    def training_step(self, batch, batch_idx):
        self.log("seen", batch[0].sum(), batch_size=self.sizes[batch_idx], on_step=True, on_epoch=True)
        return Small.training_step(self, batch, batch_idx)


class CountsNoStep(CountsSomeSteps):
    sizes = (0, 0, 0)


SIZES = [
    CountsSomeSteps,
    CountsLastStep,
    CountsFirstStep,
    CountsByDict,
    CountsByTensor,
    CountsAfterStep,
    CountsByStepAndEpoch,
    CountsNoStep,
]


@pytest.mark.parametrize(
    ("kind", "executor"),
    [*((kind, SequentialExecutor) for kind in SIZES), (CountsSomeSteps, VectorizedExecutor)],
)
def test_a_batch_size_of_zero_counts_as_in_lightning(kind, executor):
    data = FederatedDataModule({"site": Site(1, train=24)}, server=Site(99))
    got = trained(kind, data, local_epochs=1, executor=executor())
    name = "seen_epoch" if kind is CountsByStepAndEpoch else "seen"
    module = new(type("OnEpoch", (kind,), {"log": log_by_epoch}), torch.float64)
    expected = lightning_client(module, Site(1, train=24), precision="64-true").callback_metrics[name]
    assert got[name] == pytest.approx(float(expected), rel=1e-6, nan_ok=True)
    assert got["val_seen"] == pytest.approx(validated(module)["val_seen"], rel=1e-6, nan_ok=True)


def log_by_epoch(self, name, value, on_step=False, on_epoch=True, **kwargs):
    """Log as a round logs: values of single steps only beside the mean."""
    L.LightningModule.log(self, name, value, on_step=bool(on_step), on_epoch=True, **kwargs)


class TwoReductions(Small):
    def training_step(self, batch, batch_idx):
        self.log("score", batch[0].sum())
        self.log("score", batch[0].sum(), reduce_fx="max")
        return super().training_step(batch, batch_idx)


class TwoReductionsInHooks(Small):
    def training_step(self, batch, batch_idx):
        self.log("score", batch[0].sum())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("score", batch[0].sum(), reduce_fx="sum")


class ValueAndMetric(MeanMetric):
    def training_step(self, batch, batch_idx):
        self.log("score", batch[0].sum())
        self.seen.update(batch[0].sum())
        self.log("score", self.seen)
        return Small.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("kind", [TwoReductions, TwoReductionsInHooks, ValueAndMetric])
def test_a_name_with_two_reductions_is_refused_by_name(kind):
    refused_before_round_1(kind, "score")


class TwoReductionsInValidation(Small):
    def validation_step(self, batch, batch_idx):
        self.log("val_score", batch[0].sum())
        self.log("val_score", batch[0].sum(), reduce_fx="max")


def test_a_name_with_two_reductions_in_an_evaluation_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="val_score"):
        federated(new(TwoReductionsInValidation), rounds=1)


class WithScalar(Site):
    """Batches whose first entry has no dimension, as a temperature or an index of a domain."""

    def collate(self, samples):
        inputs, targets = (torch.stack(parts) for parts in zip(*samples, strict=True))
        return torch.tensor(0.5), inputs, targets

    def train_dataloader(self):
        return DataLoader(self.samples, self.batch_size, collate_fn=self.collate)


class WithScalarInDict(WithScalar):
    def collate(self, samples):
        return dict(zip(("domain", "inputs", "targets"), super().collate(samples), strict=True))


class Tempered(Small):
    size = 8

    def training_step(self, batch, batch_idx):
        scale, inputs, targets = batch.values() if isinstance(batch, dict) else batch
        loss = cross_entropy(scale * self.net(inputs), targets)
        self.log("seen", loss, batch_size=self.size, on_step=False, on_epoch=True)
        return loss


class TemperedWithoutSize(Tempered):
    size = None


@pytest.mark.filterwarnings("ignore:Trying to infer")
@pytest.mark.parametrize("kind", [Tempered, TemperedWithoutSize])
@pytest.mark.parametrize("site", [WithScalar, WithScalarInDict])
def test_a_batch_with_a_scalar_first_equals_lightning_or_is_refused(kind, site):
    expected = lightning_value(kind, site(1))
    with equal_or_refused(r"batch[^\n]*(dimension|size)"):
        got = trained(kind, FederatedDataModule({"site": site(1)}, server=Site(99)))
        assert got["seen"] == pytest.approx(expected, rel=1e-6)


# the trainer's optimizers


def rate(module):
    return module.trainer.optimizers[0].param_groups[0]["lr"]


class RateInStep(Small):
    def training_step(self, batch, batch_idx):
        self.log("seen", rate(self), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class RateAtEndOfStep(Small):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", rate(self), on_step=False, on_epoch=True)


class RateAtStart(Small):
    def on_train_epoch_start(self):
        self.log("seen", rate(self))


class RateAtEnd(Small):
    def on_train_epoch_end(self):
        self.log("seen", rate(self))


class RateInValidation(Small):
    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("seen", rate(self))


@pytest.mark.parametrize(
    "kind",
    [
        RateInStep,
        RateAtEndOfStep,
        RateAtStart,
        RateAtEnd,
        RateInValidation,
    ],
)
def test_the_trainers_optimizers_are_lightnings_or_refused_before_round_1(kind):
    seen = Metrics()
    with equal_or_refused(r"self\.trainer\.optimizers"):
        federated(new(kind), seen, rounds=1)
        assert seen.values["seen"] == pytest.approx(0.3)
    assert seen.rounds == 0 or seen.values


def test_the_page_says_what_becomes_of_the_trainers_optimizers():
    page = Path(__file__).parents[2].joinpath("docs", "module-hooks.md").read_text()
    assert any("`self.trainer.optimizers`" in line for line in page.splitlines() if line.startswith("|"))


# names


class LogsInEachHook(Small):
    """Logs a value in hooks of training and validation, with the settings that a test gives."""

    def __init__(self, **settings):
        super().__init__()
        self.settings = settings

    def training_step(self, batch, batch_idx):
        self.log("in training", 1.0, **self.settings)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("at the end of a step", 1.0, **self.settings)

    def validation_step(self, batch, batch_idx):
        self.log("in validation", 1.0, **self.settings)

    def on_train_epoch_end(self):
        self.log("at the end", 1.0)


# the other three pairs are errors in Lightning, which has no value then
@pytest.mark.parametrize(
    ("on_step", "on_epoch"),
    [(None, None), (True, None), (None, True), (True, True), (False, True), (True, False)],
)
def test_names_of_logged_values_are_lightnings(on_step, on_epoch):
    settings = {"on_step": on_step, "on_epoch": on_epoch}
    plain = L.Trainer(**TRAINER, max_epochs=1, num_sanity_val_steps=0)
    plain.fit(LogsInEachHook(**settings), datamodule=Site(0))
    run = federated(LogsInEachHook(**settings), rounds=1)
    expected, found = (
        {name for name in trainer.callback_metrics if name[:2] in ("in", "at") and name[-5:] != "_step"}
        for trainer in (plain, run.fitted)
    )
    # a round has one row, so a value that Lightning has for steps alone has the round's mean
    values_of_steps = {"in training", "at the end of a step", "in validation"}
    assert expected <= found <= expected | values_of_steps
