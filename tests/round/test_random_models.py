"""Random numbers of a model's forward pass depend on seed, round, client and step alone."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import FederatedCallback, FederatedModule, SequentialExecutor
from tests.support.helpers import SaveRounds, blobs, fit, small_cnn
from tests.support.outcomes import MOMENTUM, assert_same, same, states


class Noisy(nn.Module):
    """Adds noise of NumPy, and skips a layer by Python's random numbers."""

    def __init__(self):
        super().__init__()
        self.net = small_cnn()

    def forward(self, x):
        x = x + 0.1 * torch.from_numpy(np.random.randn(*x.shape))
        return self.net(x if random.random() < 0.7 else x * 0.5)


def module():
    return FederatedModule(Noisy(), MOMENTUM, local_steps=2, executor=SequentialExecutor())


def test_a_resumed_run_equals_one_run(tmp_path):
    one, resumed = module(), module()
    fit(one, blobs(), 4, [SaveRounds(tmp_path)])
    np.random.rand(3)
    random.random()
    fit(resumed, blobs(), 4, ckpt_path=tmp_path / "2.ckpt")
    assert same(one.state_dict(), resumed.state_dict())


@pytest.mark.slow
def test_two_ranks_equal_one():
    assert_same(states(1, model=Noisy()), states(2, model=Noisy()))


class Draws(FederatedCallback):
    """Draws in each round, after the clients' local steps."""

    role = "observer"

    def __init__(self):
        self.drawn = []

    def on_round_end(self, trainer, pl_module, cohort):
        self.drawn.append((np.random.rand(), random.random()))


def test_hooks_draw_the_same_numbers_whatever_the_clients_drew():
    seen = []
    for model in (Noisy(), small_cnn()):
        seen.append(Draws())
        fit(
            FederatedModule(model, MOMENTUM, local_steps=2, executor=SequentialExecutor()),
            blobs(),
            2,
            [seen[-1]],
        )
    assert seen[0].drawn == seen[1].drawn
    assert len(set(seen[0].drawn)) == 2
