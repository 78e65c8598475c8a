"""FedProx: the gradient of its penalty, equal to the README's own, and FedAvg where it must be."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning import ConfigurationError, FederatedCallback, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FedBN, FedProx
from tests.support.helpers import blobs, client_batch, distance, small_cnn, train
from tests.support.readme_code import methods

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
SIZES = (16, 24, 40, 32)


def run(*callbacks, data=None, rounds=3, **settings):
    return train(small_cnn(), data or blobs(4), rounds, callbacks, **{"local_steps": 3, **settings})


def penalised(model, data, rounds, mu, steps=3):
    """Separate models whose loss has the proximal term, in plain PyTorch."""
    model = deepcopy(model).double().train()
    for number in range(rounds):
        states = []
        for client in range(data.num_clients):
            local = deepcopy(model)
            stepper = torch.optim.SGD(local.parameters(), lr=0.1)
            for step in range(steps):
                inputs, targets = client_batch(data, client, number * steps + step)
                pairs = zip(local.parameters(), model.parameters(), strict=True)
                apart = sum((mine - server.detach()).square().sum() for mine, server in pairs)
                stepper.zero_grad()
                (cross_entropy(local(inputs), targets) + mu / 2 * apart).backward()
                stepper.step()
            states.append(local.state_dict())
        for name, old in model.state_dict().items():
            held = torch.stack([state[name] for state in states])
            old.copy_(held.mean(0) if old.is_floating_point() else held.amax(0))
    return model.state_dict()


class PushesAway(FedProx):
    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.mu = -self.mu
        super().on_after_local_backward(trainer, pl_module, cohort, step)
        self.mu = -self.mu


class OfTheSquareWithoutHalf(FedProx):
    def on_after_local_backward(self, *args):
        super().on_after_local_backward(*args)
        super().on_after_local_backward(*args)


@EXECUTORS
def test_it_equals_separate_models_whose_loss_has_the_proximal_term(executor):
    reference = penalised(small_cnn(), blobs(4), 3, 0.7)
    assert distance(run(FedProx(0.7), executor=executor()), reference) < 1e-10
    for mutant in (PushesAway, OfTheSquareWithoutHalf):
        assert distance(run(mutant(0.7), executor=executor()), reference) > 1e-4


@EXECUTORS
def test_it_is_bit_for_bit_the_method_of_the_readme(executor):
    settings = {
        "local_steps": None,
        "local_epochs": 1,
        "client_optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
        "executor": executor(),
    }
    ours, own = (
        run(method, data=blobs(4, SIZES), **settings) for method in (FedProx(0.3), methods().FedProx(0.3))
    )
    assert distance(ours, own) == 0


@EXECUTORS
def test_without_mu_or_with_one_local_step_it_is_fedavg(executor):
    assert distance(run(FedProx(0.0), executor=executor()), run(executor=executor())) == 0
    one_step = {"local_steps": 1, "executor": executor()}
    assert distance(run(FedProx(5.0), **one_step), run(**one_step)) == 0
    assert distance(run(FedProx(5.0)), run()) > 1e-3


def test_statistics_and_what_clients_keep_are_not_pulled():
    changed = {}

    class Before(FederatedCallback):
        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            self.grads = {name: value.clone() for name, value in cohort.grads.items()}
            self.buffers = {name: value.clone() for name, value in cohort.buffers.items()}

    class After(FederatedCallback):
        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            for kind, rows in (("grads", cohort.grads), ("buffers", cohort.buffers)):
                for name, value in rows.items():
                    equal = torch.equal(value, getattr(before, kind)[name])
                    changed[name] = changed.get(name, False) or not equal

    before = Before()
    run(FedBN(), before, FedProx(0.5), After())
    affine = {f"{layer}.{part}" for layer in (1, 4) for part in ("weight", "bias")}
    weights = {name for name, _ in small_cnn().named_parameters()} - affine
    moved = {name for name, one in changed.items() if one}
    # the biases before BN have no gradient, so they do not leave the server
    assert weights - {"0.bias", "3.bias"} <= moved <= weights
    assert changed.keys() > weights | affine


def test_a_negative_mu_is_named():
    with pytest.raises(ConfigurationError, match=r"FedProx\.mu: -1 must be at least 0"):
        FedProx(-1)
