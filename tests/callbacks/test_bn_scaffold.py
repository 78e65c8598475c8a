"""BN-SCAFFOLD, our reading of Quintana et al., arXiv 2410.03281: by hand, and against FedTAN."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import FederatedCallback, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import BNSCAFFOLD, SCAFFOLD, FedTAN
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import SGD, blobs, client_batch, distance, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
RESTING = partial(torch.optim.SGD, lr=0.0)
STEPS, ROUNDS, LR, FLOOR = 2, 5, 0.1, 0.1


class Gradients(FederatedCallback):
    """Collects the mean gradient of each round, before a method corrects it."""

    def __init__(self):
        self.found = []

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        self.found.append({name: x.double().mean(0) for name, x in cohort.grads.items()})


def gradients(method, rounds):
    """Mean gradients with constant weights; each client's batch is all its data."""
    train(
        small_cnn(), apart(), rounds, [seen := Gradients(), method], client_optimizer=RESTING, local_steps=1
    )
    return seen.found


def apart():
    return blobs(3, (8, 8, 8))


@pytest.mark.first_steps
def test_with_constant_weights_the_gradient_is_that_of_fedtan_after_a_round_for_each_layer():
    (exact,) = gradients(FedTAN(backward="own"), 1)
    found = gradients(BNSCAFFOLD(floor=1e-6), 4)
    assert [distance(gradient, exact) < 1e-12 for gradient in found] == [False, False, True, True]
    uncorrected = gradients(BNSCAFFOLD(statistics=False), 4)
    assert distance(uncorrected[3], exact) > 1e-2


class ByHand(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias, self.eps, self.momentum = layer.weight, layer.bias, layer.eps, layer.momentum
        self.shift, self.plain_gradient = (0.0, 0.0), False
        self.running, self.seen = (0.0, 1.0), []

    def forward(self, x):
        u, s, size = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x[:, 0].numel()
        self.seen.append((u.detach(), s.detach()))
        mean = u + self.shift[0]
        value = torch.maximum(s.detach() + self.shift[1], FLOOR * s.detach())
        around = (x - mean.detach().view(-1, 1, 1)).square().mean((0, 2, 3))
        around = s if self.plain_gradient else around
        var = value + around - around.detach()
        new, rate = (mean.detach(), value * size / (size - 1)), self.momentum
        self.running = tuple(
            (1 - rate) * old + rate * fresh for old, fresh in zip(self.running, new, strict=True)
        )
        scaled = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + self.eps).sqrt()
        return scaled * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def layers(model):
    return [model[1], model[4]]


def by_hand(participation, mutant=None):
    """Separate models without gradient correction: the server's parameters and running statistics."""
    data, server, own = blobs(), deepcopy(small_cnn()).double(), {}
    for place in (1, 4):
        server[place] = ByHand(server[place]).double()
    for number in range(ROUNDS):
        models = []
        known = [*own.values()]
        for client in sample_cohort(3, participation, 0, number + 1):
            local = deepcopy(server)
            for place, layer in enumerate(layers(local)):
                layer.seen, layer.plain_gradient = [], mutant == "plain gradient"
                if known and (client in own or mutant == "newcomers start from 0"):
                    mean = torch.stack([k[place][0] for k in known]).mean(0)
                    between = [
                        k[place][1] + (0 if mutant == "within" else (k[place][0] - mean).square())
                        for k in known
                    ]
                    mine = own.get(client, [(0.0, 0.0)] * 2)[place]
                    layer.shift = (mean - mine[0], torch.stack(between).mean(0) - mine[1])
                else:
                    layer.shift = (0.0, 0.0)
            optimizer = torch.optim.SGD(local.parameters(), lr=LR)
            for k in range(STEPS):
                inputs, targets = client_batch(data, client, number * STEPS + k)
                optimizer.zero_grad()
                F.cross_entropy(local(inputs), targets).backward()
                optimizer.step()
            models.append((client, local))
        for client, local in models:
            own[client] = [
                tuple(torch.stack(x).mean(0) for x in zip(*m.seen, strict=True)) for m in layers(local)
            ]
        for name, parameter in server.named_parameters():
            parameter.data = torch.stack([m.get_parameter(name).detach() for _, m in models]).mean(0)
        for place, layer in enumerate(layers(server)):
            both = [[layers(m)[place].running[i] for _, m in models] for i in (0, 1)]
            layer.running = tuple(torch.stack(each).mean(0) for each in both)
    state = {name: parameter.detach() for name, parameter in server.named_parameters()}
    for place in (1, 4):
        state |= dict(
            zip((f"{place}.running_mean", f"{place}.running_var"), server[place].running, strict=True)
        )
    return state


@EXECUTORS
@pytest.mark.parametrize("participation", [3, 2])
def test_it_equals_the_reading_by_hand(executor, participation):
    settings = {"local_steps": STEPS, "participation": participation, "executor": executor()}
    found = train(small_cnn(), blobs(), ROUNDS, [BNSCAFFOLD(gradients=False, floor=FLOOR)], **settings)

    def gap(mutant=None):
        reference = by_hand(participation, mutant)
        return distance({name: found[name] for name in reference}, reference)

    assert gap() < 1e-10
    for mutant in ("within", "plain gradient") + (("newcomers start from 0",) if participation == 2 else ()):
        assert gap(mutant) > 1e-5


def test_without_statistics_it_is_scaffold():
    settings = {"rounds": 4, "local_steps": 3, "participation": 2, "client_optimizer": SGD}
    scaffold = train(small_cnn(), blobs(), callbacks=[SCAFFOLD()], **settings)
    assert (
        distance(train(small_cnn(), blobs(), callbacks=[BNSCAFFOLD(statistics=False)], **settings), scaffold)
        < 1e-12
    )
    assert distance(train(small_cnn(), blobs(), callbacks=[BNSCAFFOLD()], **settings), scaffold) > 1e-3
