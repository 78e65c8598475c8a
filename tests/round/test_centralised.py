"""The centralised twin of a run: one model on the union of exactly the batches that the clients would have drawn."""

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from fl_lightning import FederatedDataModule, FederatedModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FBN, FixBN, MaintainedMomentum
from fl_lightning.client_data.batches import BatchStack
from fl_lightning.datamodules import Digits
from fl_lightning.experiments.run_directory.describe import method_name
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import (
    ArrayClient,
    States,
    blobs,
    centralised,
    distance,
    federated_run,
    fit,
    small_cnn,
    train,
)

DECAYED = partial(torch.optim.SGD, lr=0.1, weight_decay=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])


@EXECUTORS
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_the_twin_is_plain_training_on_the_union_batches(norm, executor):
    twin = train(small_cnn(norm), blobs(), 5, client_optimizer=DECAYED, executor=executor(), centralised=True)
    assert distance(twin, centralised(small_cnn(norm), blobs(), 5, DECAYED)) < 1e-10


def test_a_federation_with_bn_is_not_its_twin():
    assert distance(train(small_cnn(), blobs(), 3), train(small_cnn(), blobs(), 3, centralised=True)) > 1e-3


def test_the_twin_of_several_local_steps_takes_as_many_steps_on_the_unions():
    twin = train(small_cnn(), blobs(), 2, local_steps=3, centralised=True)
    assert distance(twin, centralised(small_cnn(), blobs(), 6)) < 1e-10


def test_the_twin_with_kept_momentum_is_momentum_sgd():
    twin = train(small_cnn(), blobs(), 4, [MaintainedMomentum()], client_optimizer=MOMENTUM, centralised=True)
    assert distance(twin, centralised(small_cnn(), blobs(), 4, MOMENTUM)) < 1e-10


@EXECUTORS
def test_fixbn_after_t_star_equals_its_twin_from_the_same_state(executor):
    model = small_cnn()
    start = train(model, blobs(), 2)
    states = []
    for central in (False, True):
        model.load_state_dict(start)
        settings = {"executor": executor(), "centralised": central}
        states.append(train(model, blobs(), 5, [FixBN(freeze_round=0)], **settings))
    assert distance(*states) < 1e-10
    model.load_state_dict(start)
    assert distance(states[0], centralised(model, blobs(), 5, frozen_statistics=True)) < 1e-10


def test_the_twin_takes_the_batches_of_the_clients_that_would_have_been_sampled():
    states = States()
    data = blobs(4)
    train(small_cnn(), data, 3, [states], participation=2, centralised=True)
    model = small_cnn().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for round_number in (1, 2, 3):
        members = sample_cohort(4, 2, 0, round_number)
        rows = data.cohort_batch(members, [round_number - 1] * 2).batches()
        inputs, targets = (torch.cat(parts) for parts in zip(*rows, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        assert distance(states.states[round_number], model.state_dict()) < 1e-10


def test_the_twin_leaves_out_clients_that_have_finished_their_round():
    module = FederatedModule(small_cnn(), partial(torch.optim.SGD, lr=0.1), local_epochs=1, centralised=True)
    data = blobs(2, (16, 40))
    fit(module, data, 1)
    assert module.record.clients == {0: (1, 5, module.record.clients[0][2])}
    assert module.record.samples == 16 + 40


def test_nothing_is_sent_in_a_centralised_run():
    module = FederatedModule(small_cnn(), partial(torch.optim.SGD, lr=0.1), local_steps=1, centralised=True)
    fit(module, blobs(), 2)
    assert (
        module.metrics["comm/upload_bytes"]
        == module.metrics["comm/download_bytes"]
        == module.metrics["comm/exchanges"]
        == 0
    )
    assert module.record.upload_bytes == 0


@pytest.mark.parametrize("norm", ["gn", "bn"])
def test_weights_by_samples_make_unequal_batches_one_union_batch(norm):
    """With BN this needs shared statistics: FBN, for instance."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        ArrayClient(
            (1 + size) * torch.randn(60, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (60,), generator=generator),
            size,
        )
        for size in (4, 12, 20)
    ]
    data = FederatedDataModule(clients, clients[0])
    methods = [] if norm == "gn" else [FBN()]
    settings = {"weighting": "samples", "client_optimizer": partial(torch.optim.SGD, lr=0.01)}
    twin = train(small_cnn(norm), data, 3, methods, **settings, centralised=True)
    assert distance(train(small_cnn(norm), data, 3, methods, **settings), twin) < 1e-10
    settings["weighting"] = "examples"
    assert distance(train(small_cnn(norm), data, 3, methods, **settings), twin) > 1e-4


def test_a_union_does_not_depend_on_how_the_batches_are_held():
    data = Digits(num_clients=4, batch_size=5)
    data.setup("fit")
    stacked = data.cohort_batch([0, 2, 3], [7, 7, 7])
    as_rows = BatchStack(
        batches=[tree_map(torch.clone, row) for row in data.cohort_batch([0, 2, 3], [7] * 3).batches()]
    )
    for first, second in zip(stacked.union().batches()[0], as_rows.union().batches()[0], strict=True):
        assert torch.equal(first, second)
        assert len(first) == 15


def test_a_centralised_run_says_so():
    module = federated_run(rounds=1, local_steps=1, centralised=True).module
    assert method_name(module, [FBN()]) == "centralised twin of FedAvg + FBN()"


def test_weights_by_samples_are_those_of_the_batches_that_were_drawn():
    """Without drop_last the last batch of an epoch is smaller than the others."""
    generator = torch.Generator().manual_seed(0)

    class Rest(ArrayClient):
        def train_dataloader(self):
            return DataLoader(self.dataset, self.batch_size, shuffle=True)

    clients = [
        Rest(
            (1 + size) * torch.randn(20, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (20,), generator=generator),
            size,
        )
        for size in (8, 12, 20)
    ]
    data = FederatedDataModule(clients, clients[0])
    settings = {"weighting": "samples", "client_optimizer": partial(torch.optim.SGD, lr=0.01)}
    twin = train(small_cnn("gn"), data, 3, **settings, centralised=True)
    assert distance(train(small_cnn("gn"), data, 3, **settings), twin) < 1e-10
