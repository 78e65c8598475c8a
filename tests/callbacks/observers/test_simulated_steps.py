"""The attacks' model of a client: the gradients and statistics that clients really compute, and their derivatives."""

import pytest
import torch
from torch import nn

from fl_lightning import SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FBN, FedBN, FedTAN, FixBN, HybridBN, MomentMatching, SiloBN
from fl_lightning.callbacks.observers.simulated_steps import simulated_step
from fl_lightning.methods import Observer
from fl_lightning.models.norm import make_norm
from tests.support.helpers import blobs, federated_run, small_cnn

METHODS = {
    "BN": (list, "bn"),
    "GN": (list, "gn"),
    "FixBN": (lambda: [FixBN(freeze_round=2)], "bn"),
    "FBN": (lambda: [FBN()], "bn"),
    "FBN, batch": (lambda: [FBN(wire="batch")], "bn"),
    "FedTAN": (lambda: [FedTAN()], "bn"),
    "FedTAN, own": (lambda: [FedTAN(backward="own")], "bn"),
    "SiloBN": (lambda: [SiloBN()], "bn"),
    "FedBN": (lambda: [FedBN()], "bn"),
    "HybridBN": (lambda: [HybridBN()], "bn"),
    "MomentMatching": (lambda: [MomentMatching()], "bn"),
}


class Beside(Observer):
    """Simulates the first step of each round, and keeps what the clients compute then."""

    def __init__(self, rows=None, look=None):
        self.rows, self.look, self.found = rows, look, {}

    def on_round_start(self, trainer, pl_module, cohort):
        rows = [*range(len(cohort))] if self.rows is None else self.rows
        batch = pl_module.client_batches(cohort, rows, 0).stack()
        with torch.random.fork_rng():
            self.found[cohort.round] = simulated_step(pl_module, cohort, rows, batch, "tested"), {}, {}
            if self.look is not None:
                self.look(pl_module, cohort, rows, batch)

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        if step == 0:
            _, gradients, buffers = self.found[cohort.round]
            gradients.update({name: value.clone() for name, value in cohort.grads.items()})
            buffers.update({name: value.clone() for name, value in cohort.buffers.items()})


@pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
@pytest.mark.parametrize("method", METHODS)
def test_its_gradients_are_those_of_the_clients(method, executor):
    callbacks, norm = METHODS[method]
    beside = Beside()
    federated_run(
        *callbacks(),
        beside,
        model=small_cnn(norm, 0.0),
        data=blobs(),
        rounds=4,
        local_steps=2,
        executor=executor(),
    )
    for step, gradients, _ in beside.found.values():
        assert step.gradients
        for name, value in step.gradients.items():
            torch.testing.assert_close(value, gradients[name], rtol=1e-9, atol=1e-12)
        assert all(gradients[name].abs().sum() > 0 for name in step.gradients if name.endswith("8.weight"))


def test_what_stays_at_the_clients_has_no_gradient():
    beside = Beside()
    federated_run(FedBN(), beside, model=small_cnn("bn", 0.0), data=blobs(), rounds=1)
    (step, gradients, _), layers = beside.found[1], {"1.weight", "1.bias", "5.weight", "5.bias"}
    assert gradients.keys() - step.gradients.keys() >= {name for name in gradients if name in layers} != set()


def test_its_moments_follow_from_the_running_statistics_that_a_client_sends():
    model, beside = small_cnn("bn", 0.0), Beside()
    before = {name: value.double().clone() for name, value in model.named_buffers()}
    federated_run(beside, model=model, data=blobs(), rounds=1)
    step, _, buffers = beside.found[1]
    assert step.means
    for layer, mean in step.means.items():
        names = f"{layer}.running_mean", f"{layer}.running_var"
        found = [(buffers[name] - 0.9 * before[name]) / 0.1 for name in names]
        torch.testing.assert_close(mean, found[0], rtol=1e-9, atol=1e-12)
        # running variances are unbiased, with n / (n - 1) for n values of a channel
        ratio = found[1] / step.variances[layer]
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-9, atol=0)
        assert 1 < ratio.mean() < 1.2


@pytest.mark.parametrize("method", ["BN", "GN", "FBN", "FedTAN", "HybridBN"])
def test_its_derivatives_with_respect_to_the_batch_are_right(method):
    callbacks, norm = METHODS[method]
    checked = []

    def look(pl_module, cohort, rows, batch):
        inputs, labels = (part[:, :2] for part in batch)

        def sums(inputs):
            step = simulated_step(pl_module, cohort, rows, (inputs, labels), "tested")
            weights = torch.Generator().manual_seed(0)
            values = [*step.gradients.values(), *step.means.values(), *step.variances.values()]
            return sum((x * torch.rand(x.shape, generator=weights, dtype=x.dtype)).sum() for x in values)

        inputs = inputs.clone().requires_grad_()
        checked.append(torch.autograd.gradcheck(sums, inputs, fast_mode=True))

    model = nn.Sequential(nn.Conv2d(2, 4, 3), make_norm(norm, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    federated_run(*callbacks(), Beside(look=look), model=model, data=blobs(), rounds=1)
    assert checked == [True]


def test_rows_may_appear_several_times():
    beside = Beside(rows=[1, 1])
    federated_run(beside, model=small_cnn("bn", 0.0), data=blobs(), rounds=1)
    for value in beside.found[1][0].gradients.values():
        assert torch.equal(value[0], value[1])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.once, self.head = nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.Linear(72, 3)

    def forward(self, images):
        return self.head(self.once(self.norm(self.norm(images).tanh())).flatten(1))


def test_a_layer_that_is_called_twice_has_no_moments():
    beside = Beside()
    federated_run(beside, model=Twice(), data=blobs(), rounds=1)
    step, gradients, _ = beside.found[1]
    assert step.means.keys() == step.variances.keys() == {"once"}
    torch.testing.assert_close(step.gradients["norm.weight"], gradients["norm.weight"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.5])
def test_dropout_is_off_and_stays_on_for_training(dropout):
    found = []
    for rate in (0.0, dropout):
        model, beside = small_cnn("bn", rate), Beside()
        federated_run(beside, model=model, data=blobs(), rounds=1)
        found.append(beside.found[1][0].gradients["0.weight"])
        assert model[6].training
    assert torch.equal(*found)
