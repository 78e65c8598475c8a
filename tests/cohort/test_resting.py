"""What rests in a local step: clients that have finished, parameters without gradient, blocks at a method's wish."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import FederatedCallback, SequentialExecutor, VectorizedExecutor
from tests.support.helpers import Rows, blobs, federated_run, small_cnn

SIZES = (16, 40, 64)
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
OPTIMIZERS = pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["SGD", "AdamW"])


def state(cohort, row):
    """Copies of a client's parameters, buffers and optimizer states."""
    kept = {key: cohort.optimizer_state(key).row(row) for key in cohort.optimizer_state_keys}
    tensors = {"": cohort.params.row(row), "buffer": cohort.buffers.row(row), **kept}
    return {(key, n): value.clone() for key, values in tensors.items() for n, value in values.items()}


def equal(first, second):
    return {place for place in first if torch.equal(first[place], second[place])}


class Finished(FederatedCallback):
    """Keeps each client's state after its last local step, and then writes to the rows of all clients."""

    def on_round_start(self, trainer, pl_module, cohort):
        self.last = {}

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        for row, steps in enumerate(cohort.local_steps):
            if step + 1 == steps:
                self.last[row] = state(cohort, row)
            elif step >= steps:
                for rows in (cohort.params, cohort.buffers):
                    for block in rows.blocks.values():
                        block[row].zero_()

    def on_before_aggregate(self, trainer, pl_module, cohort):
        for row, last in self.last.items():
            assert equal(state(cohort, row), last) == {*last}
        assert [*self.last] == [0, 1, 2]
        self.checked = cohort.round


@EXECUTORS
@OPTIMIZERS
def test_clients_that_have_finished_rest_whatever_a_hook_writes(executor, optimizer):
    finished = Finished()
    settings = {"local_epochs": 1, "client_optimizer": optimizer, "executor": executor()}
    federated_run(finished, data=blobs(sizes=SIZES), rounds=2, **settings)
    assert finished.checked == 2


class Spare(nn.Module):
    """A model whose spare layer never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = small_cnn(), nn.Linear(4, 2)

    def forward(self, x):
        return self.body(x)


@EXECUTORS
@OPTIMIZERS
def test_a_parameter_without_gradient_rests_although_clients_take_unequal_steps(executor, optimizer):
    model = Spare()
    before = {name: value.clone() for name, value in model.spare.state_dict().items()}
    settings = {"local_epochs": 1, "client_optimizer": optimizer, "executor": executor()}
    after = federated_run(model=model, data=blobs(sizes=SIZES), **settings).module.model.spare.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Rests(FederatedCallback):
    """Lets the weights rest from the second local step on, and keeps what the steps change."""

    def __init__(self, restart=None):
        self.restart, self.seen = restart, []

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        if step == self.restart:
            cohort.restart_optimizer()
        elif step == 1:
            cohort.rest("weights")
        for block in cohort.grads.blocks.values():
            block += 1  # a block that rests takes no step, whatever its gradient is
        self.before = state(cohort, 0)

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        same = equal(state(cohort, 0), self.before)
        self.seen.append({name for key, name in same if key != "buffer"} & {*cohort.parameter_kinds})
        names = cohort.params.layout["weights"].shapes
        assert all((key, name) in same for key, name in self.before for n in self.seen[-1] if n == name)
        self.weights = {*names}


@EXECUTORS
@OPTIMIZERS
@pytest.mark.parametrize("restart", [None, 2])
def test_a_block_rests_until_the_optimizer_is_restarted(executor, optimizer, restart):
    rests, rates = Rests(restart), Rows()
    federated_run(
        rests, rates, rounds=2, local_steps=3, client_optimizer=optimizer, executor=executor(), data=blobs
    )
    wanted = [set(), rests.weights, rests.weights if restart is None else set()]
    assert rests.seen == wanted * 2
    assert {row["client/lr"] for number, row in rates.rows.items() if number} == {optimizer.keywords["lr"]}
