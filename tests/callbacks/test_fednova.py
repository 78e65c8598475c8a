"""FedNova: equal to separate models in plain PyTorch, to FedAvg and plain training where it must be, and its limits."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning import ConfigurationError, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FedBN, FedNova
from fl_lightning.callbacks.fednova import step_length
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import ClientStates, blobs, client_batch, distance, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
SIZES = (16, 24, 40, 32)
STEPS = [2, 3, 5, 4]
EPOCHS = {"local_steps": None, "local_epochs": 1}


def sgd(momentum):
    return partial(torch.optim.SGD, lr=0.05, momentum=momentum)


def length(steps, momentum):
    """The sum of the weights of all gradients in SGD's steps, one after the other."""
    weights, moved = [], 0.0
    for _ in range(steps):
        weights = [momentum * weight for weight in weights] + [1.0]
        moved += sum(weights)
    return moved


def by_hand(rounds, momentum, lengths=length, weights=SIZES, cohort=range):
    """The server's state after rounds with separate models, stepped by torch's SGD."""
    model, data = small_cnn().double().train(), blobs(4, SIZES)
    for number in range(rounds):
        members, states = cohort(number + 1) if cohort is not range else range(4), []
        for client in members:
            local = deepcopy(model)
            stepper = sgd(momentum)(local.parameters())
            for step in range(STEPS[client]):
                inputs, targets = client_batch(data, client, number * STEPS[client] + step)
                stepper.zero_grad()
                cross_entropy(local(inputs), targets).backward()
                stepper.step()
            states.append(local.state_dict())
        total = sum(weights[client] for client in members)
        shares = [weights[client] / total for client in members]
        a = [lengths(STEPS[client], momentum) for client in members]
        names = {name for name, _ in model.named_parameters()}
        for name, old in model.state_dict().items():
            held = [state[name] for state in states]
            if name in names:
                update = sum(p * (old - x) / x_a for p, x, x_a in zip(shares, held, a, strict=True))
                old -= sum(p * x_a for p, x_a in zip(shares, a, strict=True)) * update
            elif old.is_floating_point():
                old.copy_(sum(p * x for p, x in zip(shares, held, strict=True)))
            else:
                old.copy_(torch.stack(held).amax(0))
    return model.state_dict()


def run(*callbacks, momentum=0.0, rounds=3, **settings):
    settings = {"client_optimizer": sgd(momentum), **EPOCHS, **settings}
    return train(small_cnn(), blobs(4, SIZES), rounds, callbacks, **settings)


def run_clients(**settings):
    """The clients' states after one round of FedAvg."""
    found = ClientStates()
    run(found, **settings)
    return [*found.end[1].values()]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 1.0])
def test_the_length_is_the_sum_of_the_weights_of_all_gradients(momentum):
    steps = [1, 2, 3, 7, 20]
    expected = torch.tensor([length(tau, momentum) for tau in steps], dtype=torch.float64)
    assert torch.allclose(step_length(steps, momentum), expected, rtol=1e-12, atol=0)
    if momentum == 0:
        assert step_length(steps, momentum).tolist() == steps


@EXECUTORS
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_equals_the_formula_by_hand(momentum, executor):
    federated = run(FedNova(), momentum=momentum, executor=executor())
    assert distance(federated, by_hand(3, momentum)) < 1e-10
    assert distance(federated, run(momentum=momentum)) > 1e-3
    assert distance(federated, by_hand(3, momentum, lengths=lambda steps, _: steps**2)) > 1e-3


@EXECUTORS
def test_it_equals_the_formula_with_partial_participation_and_uniform_weights(executor):
    federated = run(FedNova(), participation=2, weighting="uniform", executor=executor())
    cohort = partial(sample_cohort, 4, 2, 0)
    assert distance(federated, by_hand(3, 0.0, weights=(1, 1, 1, 1), cohort=cohort)) < 1e-10


def test_equal_numbers_of_local_steps_are_fedavg():
    equal = {"local_steps": 3, "local_epochs": None, "momentum": 0.9}
    assert distance(run(FedNova(), **equal), run(**equal)) < 1e-12


def test_one_client_is_plain_training():
    plain, normalised = (
        train(small_cnn(), blobs(1), 3, callbacks, client_optimizer=sgd(0.9), **EPOCHS)
        for callbacks in ([], [FedNova()])
    )
    assert distance(plain, normalised) < 1e-12


def test_each_parameter_group_has_the_length_of_its_own_momentum():
    groups = {"parameter_groups": {"batch_norm": {"momentum": 0.0}}, "momentum": 0.9, "rounds": 1}
    affine = [f"{layer}.{part}" for layer in (1, 4) for part in ("weight", "bias")]
    start = small_cnn().double().state_dict()
    clients = run_clients(**groups)
    federated = run(FedNova(), **groups)
    for name in federated:
        if name in affine or name == "8.weight":
            a = [length(steps, 0.0 if name in affine else 0.9) for steps in STEPS]
            shares = [size / sum(SIZES) for size in SIZES]
            mean = sum(
                p * (start[name] - x[name]) / x_a for p, x, x_a in zip(shares, clients, a, strict=True)
            )
            total = sum(p * x_a for p, x_a in zip(shares, a, strict=True))
            assert torch.allclose(federated[name], start[name] - total * mean, rtol=0, atol=1e-12)


def test_two_ranks_are_one():
    ranks = {"devices": 2, "strategy": CohortStrategy()}
    assert distance(run(FedNova(), momentum=0.9), run(FedNova(), momentum=0.9, trainer=ranks)) == 0


def test_state_that_stays_at_the_clients_is_not_normalised():
    with_nova, without = (run(FedBN(), *extra, rounds=1) for extra in ([FedNova()], []))
    affine = {f"{layer}.{part}" for layer in (1, 4) for part in ("weight", "bias")}
    assert distance({n: with_nova[n] for n in affine}, without) == 0
    assert distance(with_nova, without) > 1e-4


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.Adam, lr=0.01),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    ],
)
def test_an_optimizer_without_a_known_length_is_refused(optimizer):
    with pytest.raises(
        ConfigurationError, match=r"^FedNova: client_optimizer \w+ must be SGD without dampening"
    ):
        run(FedNova(), client_optimizer=optimizer)
