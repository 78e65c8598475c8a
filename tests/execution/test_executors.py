"""Executors fill the same rows, and one optimizer over all rows is one optimizer per client."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedModule,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.callbacks import FixBN
from fl_lightning.errors import CannotVectorize
from fl_lightning.models import FBNCNN
from tests.support.helpers import SGD, blobs, distance, fit, small_cnn, train
from tests.support.outcomes import METHODS, MOMENTUM, outcome

BLOCKS = [1, 2, 3, 4, None]
EACH_BLOCK = pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size in (3, None) else pytest.mark.nightly) for size in BLOCKS]
)


@pytest.mark.parametrize("method", METHODS)
def test_vectorised_equals_sequential_for_every_method_and_block_size(method):
    def run(executor):
        return outcome(small_cnn("bn"), blobs(), executor, METHODS[method]())

    reference = run(SequentialExecutor())
    for size in BLOCKS:
        assert distance(reference, run(VectorizedExecutor(size))) < 1e-10, size


@pytest.mark.parametrize("method", METHODS)
def test_vectorised_equals_sequential_with_partial_participation_and_uneven_local_epochs(method):
    def run(executor):
        settings = {"participation": 3, "local_steps": None, "local_epochs": 1}
        return outcome(small_cnn("bn"), blobs(4, (16, 32, 24, 16)), executor, METHODS[method](), **settings)

    reference = run(SequentialExecutor())
    for size in (None, 2):
        assert distance(reference, run(VectorizedExecutor(size))) < 1e-10, size


@pytest.mark.parametrize("size", [2, None])
def test_vectorised_equals_sequential_where_a_client_between_two_others_finishes_first(size):
    data = partial(blobs, sizes=(40, 20, 40), batch_size=10)
    settings = {"local_steps": None, "local_epochs": 1}
    reference = outcome(small_cnn("bn"), data(), SequentialExecutor(), **settings)
    found = outcome(small_cnn("bn"), data(), VectorizedExecutor(size), **settings)
    assert distance(reference, found) < 1e-10


@EACH_BLOCK
def test_vectorised_equals_sequential_for_the_fbn_cnn_with_dropout(size):
    torch.manual_seed(0)
    model = FBNCNN(num_classes=3, in_channels=2, image_size=4, dropout=0.25)
    data = partial(blobs, shape=(2, 4, 4), batch_size=4)
    settings = {"rounds": 2, "client_optimizer": SGD}
    reference = outcome(model, data(), SequentialExecutor(), **settings)
    assert distance(reference, outcome(model, data(), VectorizedExecutor(size), **settings)) < 1e-10
    without = deepcopy(model)
    for layer in without.modules():
        layer.p = 0.0
    assert distance(reference, outcome(without, data(), SequentialExecutor(), **settings)) > 1e-3


def test_dropout_draws_a_mask_of_its_own_for_each_seed():
    runs = [
        outcome(small_cnn("bn", dropout=0.5), blobs(), SequentialExecutor(), seed=seed) for seed in (0, 0, 1)
    ]
    assert distance(runs[0], runs[1]) == 0
    assert distance(runs[0], runs[2]) > 1e-3


def test_every_client_step_and_round_has_a_dropout_key_of_its_own():
    keys = []

    class Keys(FederatedCallback):
        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            keys.extend(cohort.buffers["6.key"].tolist())

    outcome(small_cnn("bn", dropout=0.5), blobs(), SequentialExecutor(), [Keys()])
    assert len(set(keys)) == len(keys) == 3 * 3 * 2


def test_every_client_step_and_round_has_random_numbers_of_its_own_in_the_sequential_executor():
    drawn = []

    class Noisy(nn.Sequential):
        def forward(self, x):
            drawn.append(torch.rand(()).item())
            return super().forward(x)

    outcome(Noisy(*small_cnn("gn")), blobs(), SequentialExecutor(), check_first_steps=False)
    assert len(set(drawn)) == len(drawn) == 3 * 3 * 2


def test_tied_and_unused_parameters_train_alike_under_both_executors():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            return self.second(self.first(x.flatten(1)).tanh())

    def run(executor):
        return outcome(Tied(), blobs(shape=(2, 2, 2)), executor)

    results = [run(SequentialExecutor()), run(VectorizedExecutor()), run(VectorizedExecutor(1))]
    assert distance(results[0], results[1]) < 1e-10
    assert distance(results[0], results[2]) < 1e-10
    assert torch.equal(results[0]["first.weight"], results[0]["second.weight"])


def test_a_model_that_draws_its_own_random_numbers_is_refused_by_the_vectorised_executor_only():
    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(x + 0.1 * torch.randn_like(x))

    runs = [
        outcome(Noisy(*small_cnn("gn")), blobs(), SequentialExecutor(), check_first_steps=False)
        for _ in range(2)
    ]
    assert distance(*runs) == 0
    with pytest.raises(ConfigurationError, match="Noisy draws random numbers"):
        outcome(Noisy(*small_cnn("gn")), blobs(), VectorizedExecutor())


@EACH_BLOCK
def test_vectorised_equals_sequential_for_batches_of_different_sizes(size, caplog):
    def run(executor, whole):
        data = blobs(4, (40, 17, 24, 17))
        data.clients[1].batch_size = 4
        if not whole:
            for client in data.clients:
                client.train_dataloader = partial(_all_batches, client)
        return outcome(small_cnn("bn"), data, executor, local_steps=None, local_epochs=1)

    for whole in (True, False):
        found = run(VectorizedExecutor(size, where_possible=True), whole)
        assert distance(run(SequentialExecutor(), whole), found) < 1e-10
    assert "one client after the other" not in caplog.text


def test_batches_with_parts_that_are_no_tensors_are_refused_by_the_vectorised_executor_in_words():
    class Named(nn.Module):
        def forward(self, inputs):
            return inputs[0].flatten(1) @ torch.ones(72, 3, dtype=torch.float64)

    data = blobs()
    for client in data.clients:
        pairs = [((x, "name"), y) for x, y in client.dataset]
        client.train_dataloader = partial(torch.utils.data.DataLoader, pairs, 8)
    words = "VectorizedExecutor needs batches of equal shape from every client, but the clients' batches have a str"
    with pytest.raises(ConfigurationError, match=words):
        outcome(nn.Sequential(Named(), nn.Linear(3, 3)), data, VectorizedExecutor(), check_first_steps=False)


def test_a_block_size_below_one_is_named():
    with pytest.raises(ConfigurationError, match="block_size: 0"):
        VectorizedExecutor(0)


class Recurrent(nn.Module):
    """A model that no batching rule of torch covers."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(36, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.cell(inputs.flatten(2))[0][:, -1])


def test_a_model_that_vmap_cannot_run_is_refused_in_one_line_and_runs_one_client_after_the_other():
    with pytest.raises(
        ConfigurationError, match=r"Recurrent has an operation that .*use SequentialExecutor"
    ) as refusal:
        train(Recurrent(), blobs(), 1, executor=VectorizedExecutor())
    assert "\n" not in str(refusal.value)
    train(Recurrent(), blobs(), 1, executor=SequentialExecutor())


def check_compiled_steps(executor):
    """Compare compiled steps, before and after statistics freeze, with steps that are not compiled."""

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def run(executor, model):
        module = FederatedModule(model, MOMENTUM, local_steps=2, executor=executor)
        fit(module, blobs(shape=(2, 2, 2)), 2, [FixBN(freeze_round=1)])
        return module.state_dict()

    trained, fast = model(), executor(compile=True)
    assert distance(run(executor(), model()), run(fast, trained)) < 1e-10
    assert fast._compiled
    assert trained._compiled_call_impl is None


@pytest.mark.slow
def test_compiled_steps_are_those_of_the_model_and_evaluation_is_not_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    check_compiled_steps(SequentialExecutor)


class Scarce(VectorizedExecutor):
    """A device that holds so many clients at once."""

    room = 2

    def __init__(self, block_size=None):
        super().__init__(block_size)
        self.sizes = []

    def _block(self, module, cohort, batch, rows):
        self.sizes.append(len(rows))
        if len(rows) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._block(module, cohort, batch, rows)


def test_blocks_that_do_not_fit_into_memory_are_halved_until_they_do():
    reference = outcome(small_cnn("bn"), blobs(6), VectorizedExecutor(1), rounds=2)
    scarce = Scarce()
    assert (
        distance(reference, outcome(small_cnn("bn"), blobs(6), scarce, rounds=2, check_first_steps=False))
        < 1e-10
    )
    # half of six does not fit either; what fits is kept to
    assert scarce.sizes == [6, 3] + 6 * 4 * [1]
    scarce = Scarce(5)
    scarce.room = 3
    assert (
        distance(reference, outcome(small_cnn("bn"), blobs(6), scarce, rounds=2, check_first_steps=False))
        < 1e-10
    )
    assert scarce.sizes == [5, 2, 2, 2] + 3 * [2, 2, 2]


def test_a_client_that_does_not_fit_into_memory_alone_is_an_error():
    scarce = Scarce()
    scarce.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        outcome(small_cnn("bn"), blobs(), scarce)


class Uneven(nn.Module):
    """Cannot be computed for all clients at once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(72, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.linear(x if float(x.sum()) > 0 else -x)


def test_what_cannot_be_vectorised_is_computed_one_after_the_other_where_that_is_allowed(caplog):
    torch.manual_seed(0)
    built, clients = Uneven(), blobs()
    for client in clients.clients:
        client.train_dataloader = partial(_all_batches, client)
    with pytest.raises(ConfigurationError, match="SequentialExecutor"):
        outcome(built, clients, VectorizedExecutor())
    reference = outcome(built, clients, SequentialExecutor(), local_steps=None, local_epochs=1)
    found = outcome(built, clients, VectorizedExecutor(where_possible=True), local_steps=None, local_epochs=1)
    assert distance(reference, found) < 1e-10
    assert caplog.text.count("one client after the other: ") == 1


class SecondBlock(VectorizedExecutor):
    """Cannot vectorise anything but the first block of a step."""

    def __init__(self):
        super().__init__(2, where_possible=True)

    def _block(self, module, cohort, batch, rows):
        if rows[0] > 0:
            raise CannotVectorize("not this block")
        return super()._block(module, cohort, batch, rows)


def test_blocks_that_were_computed_before_one_that_cannot_be_vectorised_are_not_computed_again():
    reference = outcome(small_cnn("bn"), blobs(4), SequentialExecutor())
    assert distance(reference, outcome(small_cnn("bn"), blobs(4), SecondBlock())) < 1e-10


def _all_batches(client):
    return torch.utils.data.DataLoader(client.dataset, client.batch_size, shuffle=True)


def test_a_copy_of_an_executor_compiles_its_own_model():
    executor = SequentialExecutor(compile=True)
    executor._compiled = [(nn.Identity(), print)]
    assert not deepcopy(executor)._compiled
    assert executor._compiled


def test_an_error_of_one_client_after_the_other_is_no_matter_of_vectorising(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("the user's own")

    monkeypatch.setattr(
        VectorizedExecutor, "_block", lambda *arguments: (_ for _ in ()).throw(CannotVectorize("no"))
    )
    monkeypatch.setattr(SequentialExecutor, "backward", broken)
    with pytest.raises(RuntimeError, match="the user's own") as raised:
        train(small_cnn(), blobs(), 1, executor=VectorizedExecutor(where_possible=True))
    assert raised.value.__context__ is None
