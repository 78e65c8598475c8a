"""What a communication round does with its clients: weights, participation, server optimizer, local work."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedModule,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.round.plan import cohort_size, sample_cohort
from tests.support.helpers import (
    SGD,
    States,
    blobs,
    by_hand,
    client_batch,
    distance,
    federated_run,
    small_cnn,
    train,
)

SIZES = (16, 40, 64)
STATISTICS = ["1.running_mean", "1.running_var", "4.running_mean", "4.running_var"]
WEIGHTS = [name for name, _ in small_cnn().named_parameters()]
EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])


class Cohorts(FederatedCallback):
    """Records who took part."""

    def __init__(self):
        self.clients, self.weights, self.local_steps = [], [], []

    def on_round_start(self, trainer, pl_module, cohort):
        self.clients.append(cohort.client_ids)
        self.weights.append(cohort.weights.tolist())
        self.local_steps.append(cohort.local_steps)


def part(state, names):
    return {name: state[name] for name in names}


def test_clients_weigh_as_many_as_their_examples():
    federated = train(small_cnn(), blobs(sizes=SIZES), 3, local_steps=2)
    reference, _ = by_hand(small_cnn(), blobs(sizes=SIZES), 3, steps=[2] * 3, weights=SIZES)
    assert distance(federated, reference) < 1e-10


def test_uniform_weights_ignore_the_number_of_examples():
    federated = train(small_cnn(), blobs(sizes=SIZES), 3, local_steps=2, weighting="uniform")
    assert distance(federated, by_hand(small_cnn(), blobs(sizes=SIZES), 3, steps=[2] * 3)[0]) < 1e-10
    assert distance(federated, train(small_cnn(), blobs(sizes=SIZES), 3, local_steps=2)) > 1e-3


def test_weights_are_renormalised_over_the_participants():
    recorder = Cohorts()
    train(small_cnn(), blobs(sizes=SIZES), 5, [recorder], participation=2)
    for clients, weights in zip(recorder.clients, recorder.weights, strict=True):
        total = sum(SIZES[client] for client in clients)
        assert weights == pytest.approx([SIZES[client] / total for client in clients], abs=1e-15)


@EXECUTORS
def test_partial_participation_equals_averaging_the_participants_by_hand(executor):
    settings = {"participation": 0.5, "seed": 7, "local_steps": 2, "executor": executor()}
    federated = train(small_cnn(), blobs(4, SIZES), 5, **settings)
    weights = [SIZES[i % 3] for i in range(4)]
    reference, _ = by_hand(
        small_cnn(),
        blobs(4, SIZES),
        5,
        steps=[2] * 4,
        weights=weights,
        cohort=partial(sample_cohort, 4, 2, 7),
    )
    assert distance(federated, reference) < 1e-10


def test_the_cohort_is_a_function_of_seed_and_round():
    recorder = Cohorts()
    train(small_cnn(), blobs(6), 5, [recorder], participation=3, seed=2)
    assert recorder.clients == [sample_cohort(6, 3, 2, r) for r in range(1, 6)]
    assert len({tuple(clients) for clients in recorder.clients}) > 1
    assert recorder.clients != [sample_cohort(6, 3, 3, r) for r in range(1, 6)]


def test_every_client_is_sampled_equally_often_in_the_long_run():
    counts = torch.zeros(10)
    for r in range(1, 3001):
        clients = sample_cohort(10, 3, 0, r)
        assert clients == sorted(set(clients))
        counts[clients] += 1
    assert float((counts - 900).abs().max()) < 5 * (3000 * 0.3 * 0.7) ** 0.5


@pytest.mark.parametrize(
    ("clients", "participation", "size"),
    [(100, 0.1, 10), (3, 1.0, 3), (3, 1, 1), (3, 0.01, 1), (18, 0.5, 9), (7, 7, 7)],
)
def test_participation_is_a_number_or_a_fraction_of_clients(clients, participation, size):
    assert cohort_size(clients, participation) == size


@pytest.mark.parametrize("participation", [0, 4, 0.0, 1.5, -0.5])
def test_participation_out_of_range_is_named(participation):
    with pytest.raises(ConfigurationError, match=f"participation: {participation}"):
        train(small_cnn(), blobs(3), 1, participation=participation)


def test_server_sgd_with_rate_one_is_plain_averaging():
    explicit = train(small_cnn(), blobs(), 3, server_optimizer=partial(torch.optim.SGD, lr=1.0))
    assert distance(explicit, train(small_cnn(), blobs(), 3)) == 0
    assert distance(explicit, by_hand(small_cnn(), blobs(), 3)[0]) < 1e-10


@EXECUTORS
def test_a_momentum_server_is_fedavgm(executor):
    velocity = {}

    def fedavgm(name, old, mean):
        velocity[name] = 0.9 * velocity.get(name, 0) + (mean - old)
        return old + 0.5 * velocity[name]

    server = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    settings = {"server_optimizer": server, "local_steps": 2, "executor": executor()}
    federated = train(small_cnn(), blobs(sizes=SIZES), 4, **settings)
    reference, _ = by_hand(small_cnn(), blobs(sizes=SIZES), 4, steps=[2] * 3, weights=SIZES, server=fedavgm)
    assert distance(federated, reference) < 1e-10


@EXECUTORS
def test_an_adam_server_is_fedadam_with_bias_correction(executor):
    moments = {}

    def fedadam(name, old, mean):
        first, second, count = moments.get(name, (0, 0, 0))
        gradient, count = old - mean, count + 1
        first, second = 0.8 * first + 0.2 * gradient, 0.95 * second + 0.05 * gradient**2
        moments[name] = first, second, count
        scale = (second / (1 - 0.95**count)).sqrt() + 1e-2
        return old - 0.03 * first / (1 - 0.8**count) / scale

    server = partial(torch.optim.Adam, lr=0.03, betas=(0.8, 0.95), eps=1e-2)
    settings = {"server_optimizer": server, "local_steps": 2, "executor": executor()}
    federated = train(small_cnn(), blobs(sizes=SIZES), 4, **settings)
    reference, _ = by_hand(small_cnn(), blobs(sizes=SIZES), 4, steps=[2] * 3, weights=SIZES, server=fedadam)
    assert distance(federated, reference) < 1e-10


@pytest.mark.parametrize("server", [torch.optim.SGD, torch.optim.Adam])
def test_statistics_never_pass_through_the_server_optimizer(server):
    recorder = States()
    settings = {"server_optimizer": partial(server, lr=0.0), "local_steps": 2}
    train(small_cnn(), blobs(sizes=SIZES), 3, [recorder], **settings)
    for name in WEIGHTS:
        assert torch.equal(recorder.states[3][name], recorder.states[0][name])
    reference, _ = by_hand(
        small_cnn(), blobs(sizes=SIZES), 3, steps=[2] * 3, weights=SIZES, server=lambda name, old, mean: old
    )
    assert distance(part(recorder.states[3], STATISTICS), part(reference, STATISTICS)) < 1e-10
    assert not torch.equal(recorder.states[3]["1.running_mean"], recorder.states[0]["1.running_mean"])


@EXECUTORS
@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1e-10),
        (partial(torch.optim.Adam, lr=0.01, eps=1e-3), 1e-10),
        # NAdam keeps a scalar in torch's default dtype, which is float64 only inside the Trainer
        (partial(torch.optim.NAdam, lr=0.01, eps=1e-3), 1e-7),
    ],
)
def test_uneven_local_epochs_equal_separate_runs_of_the_clients(executor, optimizer, tolerance):
    recorder = Cohorts()
    settings = {"local_steps": None, "local_epochs": 2, "client_optimizer": optimizer}
    federated = train(small_cnn(), blobs(sizes=SIZES), 3, [recorder], executor=executor(), **settings)
    reference, _ = by_hand(
        small_cnn(), blobs(sizes=SIZES), 3, optimizer=optimizer, steps=[4, 10, 16], weights=SIZES
    )
    assert recorder.local_steps == [[4, 10, 16]] * 3
    assert distance(federated, reference) < tolerance
    assert federated["1.num_batches_tracked"] == 3 * 16


def test_the_training_loss_is_the_weighted_mean_of_the_clients_mean_losses():
    module = federated_run(model=small_cnn("gn"), data=blobs(sizes=SIZES), rounds=1, local_epochs=1).module
    total = 0.0
    for client, size in enumerate(SIZES):
        model = deepcopy(small_cnn("gn")).double()
        stepper, losses = SGD(model.parameters()), []
        for step in range(size // 8):
            inputs, targets = client_batch(blobs(sizes=SIZES), client, step)
            loss = cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            stepper.zero_grad()
            loss.backward()
            stepper.step()
        total += size / sum(SIZES) * sum(losses) / len(losses)
    assert module.metrics["train/loss"] == pytest.approx(total, abs=1e-6)
    assert module.record.samples == sum(SIZES)


def test_a_called_module_is_the_servers_model():
    module, inputs = FederatedModule(small_cnn(), SGD, local_steps=1), torch.rand(2, 2, 6, 6)
    assert torch.equal(module.eval()(inputs), module.model(inputs))
