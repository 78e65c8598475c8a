"""Clients spread over processes: the sequential executor's numbers, bit for bit."""

from functools import partial

import pytest
import torch
from command_line import rows, run
from contract import EVERY_ROW
from contract import run as run_method
from helpers import ArrayClient, States, blobs, fit, small_cnn
from outcomes import MOMENTUM, assert_same, same, states
from torch import nn

from fl_lightning import (
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
    ProcessExecutor,
    SequentialExecutor,
)


@EVERY_ROW
def test_every_method_runs_alike_in_processes_bit_for_bit(row):
    one, several = States(), States()
    run_method(row, extra=[one], executor=SequentialExecutor())
    run_method(row, extra=[several], executor=ProcessExecutor(2))
    assert_same(one.states, several.states)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, None])
def test_the_number_of_workers_changes_no_bit(workers):
    reference = states(SequentialExecutor())
    assert_same(reference, states(ProcessExecutor(workers)))


def test_partial_participation_and_clients_that_finish_early_change_no_bit():
    settings = {"participation": 3, "local_steps": None, "local_epochs": 1}
    data = partial(blobs, 5, (16, 32, 24, 16))
    reference = states(SequentialExecutor(), data(), rounds=5, **settings)
    assert_same(reference, states(ProcessExecutor(2), data(), rounds=5, **settings))


def test_batches_of_different_shape_and_dropout_change_no_bit():
    generator = torch.Generator().manual_seed(0)

    def data():
        clients = [
            ArrayClient(
                torch.randn(24, 2, 6, 6, dtype=torch.float64, generator=generator.manual_seed(i)),
                torch.arange(24) % 3,
                size,
            )
            for i, size in enumerate((4, 8, 6, 12))
        ]
        return FederatedDataModule(clients, clients[0])

    def model():
        return small_cnn(dropout=0.3)

    assert_same(states(SequentialExecutor(), data(), model()), states(ProcessExecutor(2), data(), model()))


class Weighted(FederatedModule):
    """A loss of its own, as a subclass may have."""

    scale = 1.0

    def client_loss(self, batch):
        return self.scale * super().client_loss(batch) + sum(
            p.square().sum() for p in self.model.parameters()
        )


def test_a_loss_of_ones_own_runs_in_the_workers():
    reference = states(SequentialExecutor(), module=Weighted)
    assert_same(reference, states(ProcessExecutor(2), module=Weighted))
    assert not same(reference[-1], states(ProcessExecutor(2))[-1])


class WeightedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by_class", torch.ones(3, dtype=torch.float64))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, self.by_class)


class Changes(FederatedCallback):
    """Changes what is no part of a cohort while the run goes on."""

    def on_round_start(self, trainer, pl_module, cohort):
        pl_module.scale = 1.0 / cohort.round
        for layer in pl_module.model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 0.5 / cohort.round
        pl_module.loss.by_class[0] = cohort.round


class RoundInTheLoss(Weighted):
    def client_loss(self, batch):
        return self.round * super().client_loss(batch)


def test_numbers_that_callbacks_change_reach_the_workers():
    def run(executor):
        seen = States()
        module = RoundInTheLoss(small_cnn(), MOMENTUM, local_steps=2, executor=executor, loss=WeightedLoss())
        fit(module, blobs(), 3, [Changes(), seen])
        return seen.states

    assert_same(run(SequentialExecutor()), run(ProcessExecutor(2)))


class Noisy(nn.Module):
    """Draws from torch's global generator, as stochastic depth does."""

    def forward(self, x):
        return x * (1 + 0.1 * torch.rand(len(x), 1, 1, 1, dtype=x.dtype))


class Scales(nn.Module):
    """Scales its input by numbers that a user keeps in a list, a dict, a tensor that is no buffer, and another object."""

    def __init__(self):
        super().__init__()
        self.scales, self.named, self.loose = [1.0, 1.0], {"all": 1.0}, torch.ones(1, dtype=torch.float64)
        self.function = torch.nn.functional.relu

    def forward(self, x):
        return self.function(x * self.scales[0] * self.named["all"] * self.loose + 0.1)


class ChangesInside(FederatedCallback):
    """Changes one of them, and the loss, from the second round on."""

    def __init__(self, what):
        self.what = what

    def on_round_start(self, trainer, pl_module, cohort):
        scale = pl_module.model[0]
        if cohort.round > 1:
            match self.what:
                case "list":
                    scale.scales[0] = 2.0
                case "dict":
                    scale.named["all"] = 3.0
                case "tensor":
                    scale.loose.fill_(2.0)
                case "function":
                    scale.function = torch.tanh
                case "loss":
                    pl_module.loss = nn.CrossEntropyLoss(label_smoothing=0.3)


@pytest.mark.parametrize("what", ["list", "dict", "tensor", "function", "loss"])
def test_what_callbacks_change_inside_the_model_reaches_the_workers(what):
    def run(executor, changed):
        model = nn.Sequential(Scales(), nn.Flatten(), nn.Linear(72, 3))
        nn.init.constant_(model[2].weight, 0.01)
        nn.init.zeros_(model[2].bias)
        seen = States()
        loss = nn.CrossEntropyLoss()
        module = FederatedModule(model, MOMENTUM, local_steps=2, executor=executor, loss=loss)
        fit(module, blobs(), 3, [ChangesInside(changed), seen])
        return seen.states

    reference = run(SequentialExecutor(), what)
    assert_same(reference, run(ProcessExecutor(2), what))
    assert not same(reference[-1], run(SequentialExecutor(), "nothing")[-1])


def test_random_numbers_of_a_model_are_those_of_its_client():
    def model():
        return nn.Sequential(Noisy(), small_cnn())

    assert_same(states(SequentialExecutor(), model=model()), states(ProcessExecutor(3), model=model()))


class Threads(FederatedCallback):
    """Looks how many threads there are inside rounds and outside."""

    def __init__(self):
        self.inside, self.outside = set(), set()

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.inside.add(torch.get_num_threads())

    def on_round_end(self, trainer, pl_module, cohort):
        self.inside.add(torch.get_num_threads())

    def on_train_epoch_end(self, trainer, pl_module):
        self.outside.add(torch.get_num_threads())


def test_a_round_has_one_thread_and_evaluations_have_those_that_torch_was_told():
    torch.set_num_threads(2)  # of this test: the next one begins with one
    for executor, inside in ((ProcessExecutor(2), {1}), (SequentialExecutor(), {2})):
        threads = Threads()
        module = FederatedModule(small_cnn(), MOMENTUM, local_steps=2, executor=executor)
        fit(module, blobs(), 2, [threads])
        assert (threads.inside, threads.outside) == (inside, {2})
    assert torch.get_num_threads() == 2


def test_the_command_line_takes_it_by_name():
    one = run("--name", "one").attempt
    two = run("--name", "two", "--model.executor", "ProcessExecutor", "--model.executor.num_workers", 2)
    assert isinstance(two.model.executor, ProcessExecutor)
    assert rows(one) == rows(two.attempt)
