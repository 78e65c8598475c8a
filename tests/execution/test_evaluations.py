"""What is computed over evaluation data and clients' data is the same number for any number of ranks, on each of them."""

from functools import cache, partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from fl_lightning import FederatedDataModule, FederatedModule, NetworkTask
from fl_lightning.callbacks import (
    FBN,
    BatchNormDiagnostics,
    ClassifierBias,
    ClientEvaluation,
    FedBN,
    FedExFixBN,
    FedTAN,
    StaticBN,
    StatisticsSources,
)
from fl_lightning.methods.statistics_pass import measured_statistics
from tests.support.helpers import SGD, ArrayClient, blobs, distance, fit, small_cnn, with_task

SIZES = pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
EVALUATED = {"limit_val_batches": None, "num_sanity_val_steps": -1}
MODES = ["pooled", "pooled_total_variance", "per_client", "per_client_total_variance"]


class Everywhere(L.Callback):
    """What every rank has after each evaluation must be the same."""

    def on_validation_end(self, trainer, pl_module):
        own = {name: float(value) for name, value in trainer.callback_metrics.items() if "time" not in name}
        own |= {"classes": pl_module.evaluation.class_quality, "samples": pl_module.evaluation.class_samples}
        ranks = pl_module.ranks
        assert ranks.exchange(lambda: own) == [own] * ranks.size


class Passes(L.Callback):
    """All passes over the clients' data, after each round."""

    def __init__(self):
        self.measured = {}

    def on_train_epoch_end(self, trainer, pl_module):
        for mode in MODES:
            found = measured_statistics(trainer, pl_module, mode)
            self.measured |= {f"{mode} {name}": value for name, value in found.items()}


class Noisy(nn.Module):
    """Draws in eval mode, too."""

    def forward(self, inputs):
        return inputs + torch.randn_like(inputs)


def noisy():
    return nn.Sequential(Noisy(), *small_cnn())


class Own(FederatedModule):
    """A validation step of its own, with a metric of its own."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.seen = SumMetric()

    def validation_step(self, batch, batch_idx):
        self.client.evaluate_batch(batch, self.evaluation)
        self.seen.update(len(batch[1]))
        self.log("val/seen", self.seen)
        self.log("val/mean_batch", float(batch_idx))


class Half(Own):
    """Shares every second batch and adds the others on every rank."""

    def validation_step(self, batch, batch_idx):
        step = super().validation_step if batch_idx % 2 else partial(FederatedModule.validation_step, self)
        step(batch, batch_idx)


class NoOwnData(ArrayClient):
    """A client that can be served by the class accuracies only."""

    val_dataloader = L.LightningDataModule.val_dataloader
    test_dataloader = L.LightningDataModule.test_dataloader


class Shuffled(ArrayClient):
    """Evaluation data in another order each time."""

    def val_dataloader(self):
        return DataLoader(self.dataset, 16, shuffle=True)


def data(client=ArrayClient, server=ArrayClient):
    given = blobs(4, sizes=(40, 24, 33))
    clients = [client(*x.dataset.tensors, x.batch_size) for x in given.clients]
    return FederatedDataModule(clients, server(*given.server.dataset.tensors, 8))


def run(size, callbacks, module=FederatedModule, model=small_cnn, **sources):
    """Metrics and state of a run of two rounds."""
    torch.manual_seed(0)
    federated = module(model(), SGD, local_steps=2)
    ranks = {"strategy": "cohort", "devices": size} if size > 1 else {}
    fit(federated, data(**sources), 2, [*callbacks, Everywhere()], **EVALUATED, **ranks)
    metrics = {name: value for name, value in federated.metrics.items() if not name.startswith("time/")}
    return metrics, federated.state_dict()


RUNS = {
    "one's own step": lambda size: run(size, [], module=Own),
    "a step that shares some batches": lambda size: run(size, [], module=Half),
    "a model that draws": lambda size: run(size, [StatisticsSources(), ClientEvaluation()], model=noisy),
    "observers": lambda size: run(
        size,
        [
            StatisticsSources(),
            ClassifierBias(train_samples=50),
            ClientEvaluation(),
            BatchNormDiagnostics(1, measure=["statistics", "gradients", "gap", "bias"]),
        ],
    ),
    "diagnostics of a joint pass": lambda size: run(size, [FedTAN(), BatchNormDiagnostics(1)]),
    "diagnostics of FBN": lambda size: run(size, [FBN(), BatchNormDiagnostics(1)]),
    "clients' own data": lambda size: run(size, [FedBN(), ClientEvaluation()]),
    "clients without own data": lambda size: run(size, [FedBN(3), ClientEvaluation()], client=NoOwnData),
    "a pass after each round": lambda size: run(size, [StaticBN()]),
    "FedEx": lambda size: run(size, [FedExFixBN()], model=noisy),
    "shuffled data": lambda size: run(size, [], server=Shuffled),
}


@cache
def alone(name):
    return RUNS[name](1)


@pytest.mark.filterwarnings("ignore:.*shuffling enabled")
@SIZES
@pytest.mark.parametrize("name", RUNS)
def test_any_number_of_ranks_has_the_numbers_of_one_process(name, size):
    metrics, state = RUNS[name](size)
    expected, expected_state = alone(name)
    assert metrics == expected
    assert distance(state, expected_state) == 0


@SIZES
def test_every_pass_over_the_clients_data_measures_the_same(size):
    found = []
    for ranks in (1, size):
        passes = Passes()
        run(ranks, [passes])
        found.append(passes.measured)
    assert len(found[0]) == 16
    assert found[0].keys() == found[1].keys()
    assert distance(*found) == 0


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluations_outside_of_fit_are_shared_likewise(stage):
    found = []
    for ranks in ({}, {"strategy": "cohort", "devices": 2}):
        module = FederatedModule(small_cnn(), SGD, local_steps=1)
        trainer = fit(module, data(), 1, [FedBN(), ClientEvaluation()], **EVALUATED, **ranks)
        found += getattr(trainer, stage)(module, datamodule=data(), verbose=False)
    assert len(found[0]) == 17
    assert found[0] == found[1]


def test_the_batches_of_an_evaluation_are_divided():
    counts = []

    class CountingTask(NetworkTask):
        counted = 0

        def evaluate_batch(self, *args):
            self.counted += 1
            super().evaluate_batch(*args)

    class Counting(FederatedModule):
        def __init__(self, model, *settings, **named):
            super().__init__(CountingTask(model), *settings, **named)

        def on_train_end(self):
            counts.append(self.ranks.exchange(lambda: self.client.counted))

    for size in (1, 2, 5):
        run(size, [], module=Counting)
    # three evaluations of 137 examples in batches of 64
    assert counts == [[9], [6, 3], [3, 3, 3, 0, 0]]


def test_an_error_in_the_batch_of_another_rank_says_where():
    class Failing(NetworkTask):
        def evaluate_batch(self, batch, evaluation):
            if self.run.ranks.rank == 1:
                raise ValueError("no such label")
            super().evaluate_batch(batch, evaluation)

    with pytest.raises(RuntimeError, match="no such label") as caught:
        run(2, [], module=with_task(Failing))
    assert "evaluating the server after round 0, batch 2" in caught.value.__notes__
