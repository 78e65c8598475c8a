"""A forward pass that changes its input in place leaves the data, and the batches of others, as they are."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fl_lightning import (
    ClientDataModule,
    ConfigurationError,
    FederatedDataModule,
    FederatedModule,
    NetworkTask,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.callbacks import AdaBN, ClassifierBias, ClientEvaluation, FedBN, StatisticsSources
from fl_lightning.callbacks.observers.batch_norm_diagnostics import BatchNormDiagnostics
from fl_lightning.client_data.batches import BatchStack, copied
from fl_lightning.datamodules import Gaussians, TensorData
from tests.support.helpers import Rows, blobs, fit, small_cnn

pytestmark = pytest.mark.first_steps

SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
EVALUATED = {"limit_val_batches": None, "num_sanity_val_steps": -1, "precision": "32-true"}


class Standardised(nn.Sequential):
    """A model that standardises its input first, in place if ``in_place``."""

    in_place = True

    def __init__(self, features=4, in_place=True):
        super().__init__(nn.Flatten(), nn.Linear(features, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            x -= 0.4
            x.div_(1.7)
        else:
            x = (x - 0.4) / 1.7
        return super().forward(x)


class Rectified(nn.Sequential):
    def __init__(self, features=4, in_place=True):
        layers = nn.ReLU(inplace=in_place), nn.Flatten(), nn.Linear(features, 6), nn.BatchNorm1d(6)
        super().__init__(*layers, nn.ReLU(inplace=in_place), nn.Linear(6, 3))


class Unbatchable(Standardised):
    """Has an operation that vmap cannot run, after the change in place."""

    def forward(self, x):
        out = super().forward(x)
        return out * (1 if bool(out.detach().isfinite().all()) else 0)


def merging_labels(outputs, targets):
    """A loss that merges two labels."""
    targets[targets == 2] = 1
    return cross_entropy(outputs, targets)


def table(**settings):
    draw = torch.Generator().manual_seed(0)
    features, targets = torch.randn(150, 4, generator=draw), torch.arange(150) % 3
    features[:, 0] += targets
    data = {"num_clients": 3, "batch_size": 8, "val_fraction": 0.2, "eval_batch_size": 16}
    return TensorData(features, targets, groups=targets.flip(0), **{**data, **settings})


def points():
    return Gaussians(num_clients=3, samples_per_client=8)


class ListClient(ClientDataModule):
    """A client that keeps its batches and hands out the same tensors in each epoch."""

    def __init__(self, client):
        super().__init__()
        torch.manual_seed(0)
        self.kept = [tuple(batch) for batch in client.train_dataloader()]
        self.num_examples, self.steps_per_epoch = len(client.dataset), len(self.kept)

    def train_batch(self, step):
        return self.kept[step % self.steps_per_epoch]

    def val_dataloader(self):
        return DataLoader(self.kept, batch_size=None)


def lists():
    clients = [ListClient(client) for client in blobs(sizes=(16,), shape=(4, 1, 1)).clients]
    for client in clients:
        client.kept = [(inputs.float(), targets) for inputs, targets in client.kept]
    return FederatedDataModule(clients, clients[0])


OBSERVERS = {
    "the server": list,
    "personal models": lambda: [FedBN()],
    "statistics of the test data": lambda: [AdaBN()],
    "sources of statistics": lambda: [StatisticsSources()],
    "clients": lambda: [ClientEvaluation()],
    "the classifier": lambda: [ClassifierBias()],
    "gradients": lambda: [BatchNormDiagnostics(every_n_rounds=1, measure=["gradients"])],
}


def outcome(make, data, in_place, callbacks=(), executor=SequentialExecutor, loss=None, rounds=3):
    torch.manual_seed(0)
    model = make(2 if data is points else 4, in_place=in_place)
    module = FederatedModule(model, SGD, local_steps=3, executor=executor(), loss=loss)
    made, rows = data(), Rows()
    fit(module, made, rounds, [*callbacks, rows], **EVALUATED)
    fit_metrics = {
        f"{index} {name}": value
        for index, row in rows.rows.items()
        for name, value in row.items()
        if not name.startswith("time/")
    }
    return fit_metrics, {n: x.clone() for n, x in module.state_dict().items()}, module


WITHOUT_OWN_DATA = ("the server", "statistics of the test data", "sources of statistics", "gradients")
CASES = [(Standardised, data, what) for data in (table, lists) for what in OBSERVERS]
CASES += [(Standardised, points, what) for what in WITHOUT_OWN_DATA]
CASES += [(Rectified, table, "the server"), (Rectified, lists, "sources of statistics")]


@pytest.mark.parametrize(("make", "data", "what"), CASES)
def test_each_evaluation_gets_its_own_batch(make, data, what):
    changed, apart = (outcome(make, data, x, OBSERVERS[what]()) for x in (True, False))
    assert changed[0] == pytest.approx(apart[0], rel=1e-6, nan_ok=True)
    assert any("loss" in name for name in apart[0])
    for name, wanted in apart[1].items():
        torch.testing.assert_close(changed[1][name], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("data", [table, points])
def test_predictions_and_labels_stay(data):
    _, _, module = outcome(Standardised, data, True)
    loader = module.trainer.datamodule.test_dataloader()
    before = [inputs.clone() for inputs, _ in loader]
    first, second = (module.trainer.predict(module, loader) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close([inputs for inputs, _ in loader], before, rtol=0, atol=0)


def test_a_loss_that_changes_labels_leaves_the_data():
    made = table()
    made.setup("fit")
    before = made.samples.labels.clone()
    outcome(Standardised, lambda: made, True, OBSERVERS["sources of statistics"](), loss=merging_labels)
    assert torch.equal(made.samples.labels, before)


def equal_states(first, second):
    for name, wanted in first[1].items():
        torch.testing.assert_close(second[1][name], wanted, rtol=1e-5, atol=1e-6)


def test_a_block_that_ran_out_of_memory_is_repeated_with_the_same_batch(monkeypatch):
    gradients, failed = torch.autograd.grad, []
    apart = outcome(Standardised, table, False, executor=VectorizedExecutor)

    def out_of_memory(*arguments, **settings):
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError
        return gradients(*arguments, **settings)

    monkeypatch.setattr(torch.autograd, "grad", out_of_memory)
    equal_states(outcome(Standardised, table, True, executor=VectorizedExecutor), apart)


def test_clients_that_cannot_be_vectorized_get_the_same_batch():
    executor = partial(VectorizedExecutor, where_possible=True)
    equal_states(*(outcome(Unbatchable, table, x, executor=executor) for x in (True, False)))


@dataclass
class Sample:
    inputs: torch.Tensor
    targets: torch.Tensor


class TakesSamples(NetworkTask):
    def client_loss(self, batch):
        return super().client_loss((batch.inputs, batch.targets))


def test_a_copy_of_a_batch_that_is_an_object_has_tensors_of_its_own():
    batch = Sample(torch.ones(2), torch.zeros(2))
    again = copied({"samples": [batch], "name": "x"})
    again["samples"][0].inputs.zero_()
    assert batch.inputs.tolist() == [1.0, 1.0]
    assert again["name"] == "x"


def test_training_batches_without_tensors_are_refused_in_one_line(monkeypatch):
    data = blobs()
    drawn = data.cohort_batch
    objects = lambda *args: BatchStack(batches=[Sample(*x) for x in drawn(*args).batches()])
    monkeypatch.setattr(data, "cohort_batch", objects)
    module = FederatedModule(TakesSamples(small_cnn()), SGD, local_steps=1, check_first_steps=False)
    with pytest.raises(
        ConfigurationError, match="a training batch is a Sample without tensors; use a tensor, or a tuple"
    ):
        fit(module, data, 1)
