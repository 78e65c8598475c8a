"""Buffers that a model replaces, or keeps beside BN's: every executor leaves the same in them."""

import pytest
import torch
from torch import nn

from fl_lightning import FederatedCallback, SequentialExecutor, VectorizedExecutor
from fl_lightning.errors import CannotVectorize
from tests.support.helpers import SGD, blobs, by_hand, distance, small_cnn
from tests.support.outcomes import outcome

pytestmark = pytest.mark.first_steps


@pytest.mark.parametrize("executor", [SequentialExecutor(), VectorizedExecutor(), VectorizedExecutor(2)])
def test_a_buffer_that_the_model_replaces_instead_of_changing_it_is_kept(executor):
    class Total(nn.Sequential):
        def __init__(self):
            super().__init__(*small_cnn("gn"))
            self.register_buffer("total", torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            self.total = self.total + x.detach().mean((0, 2, 3))
            return super().forward(x)

    state = outcome(Total(), blobs(), executor, client_optimizer=SGD)
    reference, _ = by_hand(Total(), blobs(), 3, steps=[2] * 3)
    assert distance(reference, state) < 1e-10


class Replaces(nn.Module):
    """Puts another tensor in its buffer's place, of another shape and type."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(2))
        self.register_buffer("positive", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        self.largest = x.detach().amax().float()
        self.positive = (x.detach().amax((0, 2, 3)) > 0).double()
        return x


def test_buffers_that_a_model_replaces_are_written_as_one_by_one():
    def run(executor):
        return outcome(nn.Sequential(Replaces(), *small_cnn("bn")), blobs(), executor)

    assert distance(run(SequentialExecutor()), run(VectorizedExecutor())) < 1e-10


class Remembers(nn.Module):
    """Puts one buffer in another one's place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("now", torch.zeros(2))
        self.register_buffer("before", torch.zeros(2))

    def forward(self, x):
        self.before = self.now
        self.now = x.detach().mean((0, 2, 3))
        return x


def test_a_buffer_that_takes_anothers_place_keeps_the_others_numbers():
    class LastTwo(FederatedCallback):
        def on_local_step_end(self, trainer, pl_module, cohort, step):
            if step == 0:
                self.first = cohort.buffers["0.now"].clone()
            else:
                assert torch.equal(cohort.buffers["0.before"], self.first)

    for executor in (SequentialExecutor(), VectorizedExecutor()):
        outcome(nn.Sequential(Remembers(), *small_cnn("bn")), blobs(), executor, [LastTwo()], rounds=2)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2, momentum=None)

    def forward(self, x):
        return self.norm(self.norm(x) + 1)


def test_a_layer_with_cumulative_statistics_that_runs_twice_is_not_vectorised():
    def run(executor):
        return outcome(nn.Sequential(Twice(), *small_cnn("bn")), blobs(), executor)

    with pytest.raises(CannotVectorize, match=r"'0\.norm' has momentum=None and runs more than once"):
        run(VectorizedExecutor())
    assert distance(run(SequentialExecutor()), run(VectorizedExecutor(where_possible=True))) < 1e-10


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm2d(2, track_running_stats=True)  # its statistics lie beside the others
        self.register_buffer("mask", torch.ones(32, 32).tril().bool())
        self.register_buffer("shift", torch.ones(2, 1, 1))

    def forward(self, x):
        self.shift *= 0.5
        return self.norm(x + self.shift)


def test_matrices_among_the_buffers_are_vectorised():
    def run(executor):
        model = nn.Sequential(Masked(), *small_cnn("bn"))
        found = outcome(model, blobs(), executor, local_steps=3)
        return {name: value for name, value in found.items() if value.dtype != torch.bool}

    assert distance(run(VectorizedExecutor()), run(SequentialExecutor())) < 1e-10


def spectral_net(spectral_norm):
    torch.manual_seed(0)
    hidden = spectral_norm(nn.Linear(72, 16))
    return nn.Sequential(
        spectral_norm(nn.Conv2d(2, 2, 3, padding=1)), nn.Flatten(), hidden, nn.ReLU(), nn.Linear(16, 3)
    )


@pytest.mark.parametrize("spectral_norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_the_layers_of_spectral_norm_keep_their_largest_singular_value_in_evaluation(spectral_norm):
    model = spectral_net(spectral_norm).double()
    state = outcome(model, blobs(), SequentialExecutor(), client_optimizer=SGD, local_steps=5)
    model.load_state_dict(state, strict=False)
    model.eval()(torch.zeros(2, 2, 6, 6, dtype=torch.float64))
    for layer in (model[0], model[2]):
        assert float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)) == pytest.approx(
            1, abs=0.03
        )


def test_one_client_keeps_the_singular_vectors_of_plain_pytorch():
    one = blobs(num_clients=1)
    state = outcome(spectral_net(nn.utils.spectral_norm), one, SequentialExecutor(), client_optimizer=SGD)
    reference, _ = by_hand(spectral_net(nn.utils.spectral_norm), one, 3, steps=[2])
    assert distance(reference, state) < 1e-10


class Prior(nn.Module):
    """The share of each class in the last batch: a unit vector, if a client has one class."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shares", torch.ones(3) / 3)

    def forward(self, x):
        if self.training:
            self.shares = nn.functional.one_hot(x.detach().sum((1, 2, 3)).argmax() % 3, 3).double()
        return x


def test_shares_of_classes_stay_shares():
    state = outcome(nn.Sequential(Prior(), *small_cnn("gn")), blobs(), SequentialExecutor(), rounds=1)
    torch.testing.assert_close(state["0.shares"].sum(), torch.tensor(1.0).double())
