"""MomentMatching: running statistics aggregated by the law of total variance."""

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedDataModule, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FixBN, MomentMatching
from fl_lightning.methods.running_statistics import client_statistics, set_server_statistics
from tests.support.helpers import ArrayClient, States, blobs, client_batch, distance, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
WEIGHTS = torch.tensor([1, 2, 3]).double() / 6
SIZES = (40, 80, 120)


def bn_first(momentum=0.1):
    """A model whose BN layer sees the data themselves, whatever the weights."""
    return nn.Sequential(nn.BatchNorm2d(2, momentum=momentum), nn.Flatten(), nn.Linear(72, 3))


def aggregated(momentum, local_steps=1, rounds=1, method=MomentMatching, data=None, **settings):
    """The server's mean and variance of the model's first layer."""
    data = data or blobs(sizes=SIZES)
    settings = {"local_steps": local_steps, "client_optimizer": torch.optim.SGD, **settings}
    state = train(bn_first(momentum), data, rounds, [method()] if method else [], **settings)
    return state["0.running_mean"], state["0.running_var"]


def measured(local_steps=1, data=None):
    """Mean and unbiased variance ``[C, channels]`` of each client's first batches, averaged over its local steps."""
    data = data or blobs(sizes=SIZES)
    batches = [[client_batch(data, client, step)[0] for step in range(local_steps)] for client in range(3)]
    means = [torch.stack([x.mean((0, 2, 3)) for x in client]).mean(0) for client in batches]
    variances = [torch.stack([x.var((0, 2, 3)) for x in client]).mean(0) for client in batches]
    return torch.stack(means), torch.stack(variances)


def parts(means, variances):
    """The mean, and the variance within and between the clients."""
    mean = WEIGHTS @ means
    return mean, WEIGHTS @ variances, WEIGHTS @ (means - mean) ** 2


def gap(first, second):
    return float((first - second).abs().max())


class WithoutBetween(MomentMatching):
    def on_round_end(self, trainer, pl_module, cohort):
        means, variances = client_statistics(cohort)
        set_server_statistics(cohort, cohort.mean(means), cohort.mean(variances))


class Unweighted(MomentMatching):
    def on_round_end(self, trainer, pl_module, cohort):
        cohort.weights = torch.full_like(cohort.weights, 1 / len(cohort))
        super().on_round_end(trainer, pl_module, cohort)


def two_clients():
    """Means 0 and 10 and variance 1, every batch all of a client's data."""
    clients = []
    for shift in (0, 10):
        x = torch.randn(16, 2, 6, 6, generator=torch.Generator().manual_seed(shift), dtype=torch.float64)
        x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True) + shift
        clients.append(ArrayClient(x, torch.arange(16) % 3, 16))
    return FederatedDataModule(clients)


def test_two_clients_with_means_0_and_10_and_variance_1_have_variance_26():
    mean, variance = aggregated(1.0, data=two_clients())
    assert gap(mean, torch.tensor(5.0)) < 1e-10
    assert gap(variance, torch.tensor(26.0)) < 1e-10
    _, fedavg = aggregated(1.0, data=two_clients(), method=None)
    assert gap(fedavg, torch.tensor(1.0)) < 1e-10


@EXECUTORS
@pytest.mark.parametrize(("momentum", "local_steps"), [(1.0, 1), (None, 1), (None, 4)])
def test_batch_statistics_and_cumulative_averages_get_the_whole_variance_between_the_clients(
    executor, momentum, local_steps
):
    mean, within, between = parts(*measured(local_steps))
    found = aggregated(momentum, local_steps, executor=executor())
    assert gap(found[0], mean) < 1e-10
    assert gap(found[1], within + between) < 1e-10


@pytest.mark.parametrize("wrong", [WithoutBetween, Unweighted])
def test_a_wrong_aggregation_is_far_from_it(wrong):
    _, within, between = parts(*measured())
    assert gap(aggregated(1.0, method=wrong)[1], within + between) > 1e-2


def test_it_is_the_variance_of_the_union_batch_up_to_bessel():
    data = blobs()
    batches = [client_batch(data, client, 0)[0] for client in range(3)]
    union = torch.cat(batches).transpose(0, 1).flatten(1)
    values = batches[0][:, 0].numel()
    within = torch.stack([x.var((0, 2, 3)) for x in batches]).mean(0)
    _, variance = aggregated(1.0, data=data)
    assert gap(variance - within / values, union.var(1, correction=0)) < 1e-10


@pytest.mark.parametrize("beta", [0.1, 0.3])
def test_of_moving_averages_the_variance_between_the_clients_is_wrong_by_the_factor_beta(beta):
    _, within, between = parts(*measured())
    _, variance = aggregated(beta)
    added = variance - ((1 - beta) * 1.0 + beta * within)
    asked = beta * between
    assert gap(added, beta * asked) < 1e-10
    assert gap(added, asked) > 0.5 * float(asked.max()) > 0.01


@pytest.mark.parametrize("local_steps", [1, 3])
def test_in_the_long_run_moving_averages_hold_the_share_that_the_docstring_says(local_steps):
    _, variance = aggregated(0.3, local_steps, rounds=40, data=two_clients())
    assert gap(variance, 1 + 25 * (1 - 0.7**local_steps)) < 1e-3


def test_parameters_are_those_of_fedavg_bitwise_and_statistics_are_not():
    recorders = []
    for method in ([], [MomentMatching()]):
        recorders.append(States())
        train(small_cnn(), blobs(), 3, [recorders[-1], *method], local_steps=2)
    fedavg, matched = (recorder.states[-1] for recorder in recorders)
    names = dict(small_cnn().named_parameters())
    assert all(torch.equal(fedavg[name], matched[name]) for name in names)
    assert distance(fedavg, matched) > 1e-3


def test_models_without_running_statistics_and_methods_that_freeze_them_are_refused():
    with pytest.raises(ConfigurationError, match="MomentMatching: the model Sequential has no Batch"):
        train(small_cnn("gn"), blobs(), 1, [MomentMatching()])
    with pytest.raises(ConfigurationError, match="cannot be combined"):
        train(small_cnn(), blobs(), 2, [MomentMatching(), FixBN()])
