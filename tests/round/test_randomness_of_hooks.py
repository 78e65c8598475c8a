"""What callbacks and models draw from the global generators depends on the round alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import FederatedCallback, FederatedModule, SequentialExecutor, VectorizedExecutor
from tests.support.helpers import SGD, SaveRounds, blobs, distance, fit, small_cnn, train


class Noise(FederatedCallback):
    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        for gradient in cohort.grads.values():
            gradient += 0.1 * torch.randn_like(gradient)


class Jitter(nn.Module):
    """A model that draws noise of its own."""

    def forward(self, inputs):
        return F.dropout(inputs, 0.3, self.training)


def test_noise_of_a_callback_is_equal_under_every_executor():
    results = [
        train(small_cnn(), blobs(), 3, [Noise()], local_steps=2, executor=executor)
        for executor in (SequentialExecutor(), VectorizedExecutor(), VectorizedExecutor(2))
    ]
    assert distance(results[0], results[1]) < 1e-10
    assert distance(results[0], results[2]) < 1e-10
    assert distance(results[0], train(small_cnn(), blobs(), 3, local_steps=2)) > 1e-3


class Draws(FederatedCallback):
    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.drawn = torch.randn(4)


def test_two_callbacks_of_one_class_draw_different_numbers():
    alone, first, second = Draws(), Draws(), Draws()
    train(small_cnn(), blobs(), 1, [alone])
    train(small_cnn(), blobs(), 1, [first, second])
    assert torch.equal(first.drawn, alone.drawn)
    assert not torch.isclose(first.drawn, second.drawn).any()


@pytest.mark.parametrize("draws", ["callback", "model"])
def test_a_resumed_run_draws_the_numbers_of_the_uninterrupted_one(draws, tmp_path):
    def start(**settings):
        torch.manual_seed(torch.seed())
        model = nn.Sequential(
            *small_cnn()[:-1], Jitter() if draws == "model" else nn.Identity(), nn.Linear(24, 3)
        )
        model.load_state_dict(small_cnn(seed=1).state_dict(), strict=False)
        nn.init.constant_(model[-1].weight, 0.1)
        nn.init.zeros_(model[-1].bias)
        module = FederatedModule(model, SGD, local_steps=2, seed=4)
        callbacks = [SaveRounds(tmp_path), *([Noise()] if draws == "callback" else [])]
        fit(module, blobs(), 4, callbacks, **settings)
        return module.state_dict()

    whole = start()
    assert distance(start(ckpt_path=tmp_path / "2.ckpt"), whole) == 0
