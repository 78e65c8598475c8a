"""DSGD of the FBN paper (Guerraoui et al., arXiv 2405.14670): one local step, damped client momentum, inverse steps."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedDataModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FBN, MaintainedMomentum
from fl_lightning.optimizers.client_lr import InverseSteps, MultiStep
from tests.support.helpers import ArrayClient, States, blobs, distance, small_cnn, train

DAMPED = partial(torch.optim.SGD, momentum=0.99, dampening=0.99)


@pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
@pytest.mark.parametrize(
    ("kept", "steps"), [(True, [0.01, 0.0199, 0.029701]), (False, [1, 1, 1])], ids=["kept", "reset"]
)
def test_damped_momentum_that_is_kept_starts_from_zero_and_each_round_without_as_torchs(
    kept, steps, executor
):
    ones = torch.ones(8, 1, dtype=torch.float64)
    clients = [ArrayClient(ones, ones, 2) for _ in range(3)]
    states, methods = States(), [MaintainedMomentum()] if kept else []
    train(
        nn.Linear(1, 1, bias=False),
        FederatedDataModule(clients, clients[0]),
        3,
        [*methods, states],
        client_optimizer=partial(DAMPED, lr=1.0),
        loss=lambda outputs, _: outputs.mean(),  # the weight's gradient is 1
        executor=executor(),
    )
    taken = [float(before["weight"] - after["weight"]) for before, after in pairwise(states.states)]
    assert taken == pytest.approx(steps, abs=1e-10)
    for method in methods:
        assert float(method.memory[2]["momentum_buffer/weights"]) == pytest.approx(0.029701, abs=1e-10)


def test_the_clients_mean_momentum_is_the_damped_momentum_of_the_mean_gradient():
    settings = {"client_optimizer": partial(DAMPED, lr=5.0), "client_lr_schedule": InverseSteps(4)}
    clients, central = MaintainedMomentum("local"), MaintainedMomentum("local")
    federated = train(small_cnn(), blobs(), 12, [FBN(), clients], **settings)
    twin = train(small_cnn(), blobs(), 12, [FBN(), central], **settings, centralised=True)
    assert distance(federated, twin) < 1e-10
    for block in ("momentum_buffer/weights", "momentum_buffer/batch_norm"):
        own = torch.stack([clients.memory[client][block] for client in range(3)])
        assert float((own.mean(0) - central.memory[0][block]).abs().max()) < 1e-10
        assert float((own - own.mean(0)).abs().max()) > 1e-3


def test_the_learning_rate_of_the_paper():
    rates = [0.1 * InverseSteps(1000)(r, 3000) for r in (1, 1000, 1001, 2000, 2001, 3000)]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.1 / 3, 0.1 / 3])


@pytest.mark.parametrize("period", [3, 0.29, 0.25, 1 / 3])
@pytest.mark.parametrize("rounds", [5, 12, 100])
def test_periods_end_where_milestones_would_be(period, rounds):
    count = rounds // period if isinstance(period, int) else int(1 / period + 1e-9)
    milestones = [k * period for k in range(1, count + 1) if isinstance(period, int) or k * period < 1]
    for round_number in range(1, rounds + 1):
        finished = sum(MultiStep([m], 0.5)(round_number, rounds) == 0.5 for m in milestones)
        assert InverseSteps(period)(round_number, rounds) == 1 / (1 + finished)


@pytest.mark.parametrize("period", [0, -2, 1.0, 0.0, 1.5])
def test_an_unusable_period_is_named(period):
    with pytest.raises(
        ConfigurationError, match=f"InverseSteps.period: {period} must be a round >= 1, or a fraction in"
    ):
        InverseSteps(period)
