"""What every method owes its users: a new callback needs its ``examples`` and no test of its own."""

from functools import cache, partial

import pytest
import torch

from fl_lightning import FederatedCallback
from fl_lightning.verification import certify
from tests.support.contract import ADAM, EVERY_ROW, method_of, run
from tests.support.helpers import States, blobs, distance, federated_run

ROUNDS = 8


@EVERY_ROW
def test_a_method_keeps_what_every_method_promises_and_what_it_claims(row):
    usual = row.module.get("client_optimizer") is not ADAM  # the battery's own client optimizer has momentum
    settings = {} if usual else {"client_optimizer": ADAM}
    assert certify(partial(method_of, row), references=False, settings=settings).failed == []


@cache
def without_a_method(**settings):
    """The server's states in a run without a callback."""
    return federated_run(data=blobs(4, (24, 40, 32)), rounds=ROUNDS, **settings).states


@pytest.mark.first_steps
@EVERY_ROW
def test_a_method_lowers_the_loss_and_changes_the_training_which_an_observer_does_not(row):
    losses, states = [], States()

    class Losses(FederatedCallback):
        def on_train_epoch_end(self, trainer, pl_module):
            losses.append(float(trainer.callback_metrics["train/loss"]))

    run(row, ROUNDS, [Losses(), states])
    assert torch.tensor(losses).isfinite().all()
    assert sum(losses[-2:]) < sum(losses[:2])
    method, plain = method_of(row), without_a_method(**row.module)
    if "an observer" in method.paper:
        assert [distance(*pair) for pair in zip(states.states, plain, strict=True)] == [0] * (ROUNDS + 1)
    elif row.settings not in method.examples[:-1]:  # the last one shows the method in a few rounds
        assert distance(states.states[4], plain[4]) > 1e-4
