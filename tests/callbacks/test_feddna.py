"""FedDNA (lite): statistics by importances that minimise a stated divergence."""

import math
from itertools import pairwise

import pytest
import torch
from torch.distributions import Normal, kl_divergence

import fl_lightning.callbacks.feddna
from fl_lightning import ConfigurationError, FederatedCallback, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FedDNA, FedPer, MomentMatching
from fl_lightning.callbacks.feddna import reverse_kl_importances
from tests.support.helpers import blobs, distance, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
EPS = 1e-5
SETTINGS = {"local_steps": 2}


def clients(count, channels=7, spread=1.0, seed=0):
    """Means, variances and unequal weights of some clients."""
    generator = torch.Generator().manual_seed(seed)
    means = spread * torch.randn(count, channels, generator=generator, dtype=torch.float64)
    variances = torch.rand(count, channels, generator=generator, dtype=torch.float64) + 0.1
    weights = torch.rand(count, generator=generator, dtype=torch.float64) + 0.2
    return means, variances, weights / weights.sum()


def mixture(q, means, variances):
    mean = q @ means
    return Normal(mean, (q @ (variances + means**2) - mean**2).sqrt())


def reverse_kl(q, means, variances, weights):
    """sum p_i KL(N(q) || N_i) with torch's own KL divergence, averaged over the channels."""
    variances = variances + EPS
    own = Normal(means, variances.sqrt())
    return float(weights @ kl_divergence(mixture(q, means, variances), own).mean(1))


def forward_kl(q, means, variances, weights):
    own = Normal(means, variances.sqrt())
    return float(weights @ kl_divergence(own, mixture(q, means, variances)).mean(1))


def simplex_points(count, number=2000):
    torch.manual_seed(0)
    return torch.distributions.Dirichlet(torch.full((count,), 0.5, dtype=torch.float64)).sample((number,))


def test_importances_p_are_the_minimum_of_kl():
    means, variances, weights = clients(4)
    importances = FedDNA().importances(means, variances, weights)
    assert torch.equal(importances, weights)
    best = forward_kl(importances, means, variances, weights)
    assert all(forward_kl(q, means, variances, weights) >= best for q in simplex_points(4))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [0.05, 1.0, 5.0])
def test_reverse_kl_is_as_low_as_on_a_fine_grid_for_two_clients(seed, spread):
    problem = clients(2, spread=spread, seed=seed)
    q = reverse_kl_importances(*problem)
    grid = torch.linspace(0, 1, 1001, dtype=torch.float64)
    values = [reverse_kl(torch.stack((share, 1 - share)), *problem) for share in grid]
    assert reverse_kl(q, *problem) <= min(values) + 1e-8
    assert abs(float(q[0]) - float(grid[values.index(min(values))])) < 2e-3


@pytest.mark.parametrize("count", [3, 10])
def test_reverse_kl_is_lower_than_with_p_and_with_any_other_point_of_the_simplex(count):
    problem = clients(count, spread=0.5)
    best = reverse_kl(reverse_kl_importances(*problem), *problem)
    assert best < reverse_kl(problem[2], *problem) - 1e-3
    assert all(reverse_kl(q, *problem) >= best - 1e-8 for q in simplex_points(count))


def test_the_objective_never_rises_with_more_iterations():
    problem = clients(5, spread=0.5)
    values = [reverse_kl(reverse_kl_importances(*problem, iterations), *problem) for iterations in range(40)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(values))


@pytest.mark.parametrize("wrong", ["between", "squares"])
def test_a_wrong_objective_ends_elsewhere(monkeypatch, wrong):
    problem = clients(5, spread=0.5)
    right = reverse_kl(reverse_kl_importances(*problem), *problem)
    if wrong == "between":
        monkeypatch.setattr(
            fl_lightning.callbacks.feddna, "total_variance", lambda mean, var, q: (q @ mean, q @ var)
        )
        found = reverse_kl_importances(*problem)
    else:
        found = reverse_kl_importances(problem[0] ** 2, *problem[1:])
    assert reverse_kl(found, *problem) > right + 1e-4


@pytest.mark.parametrize("count", [2, 5])
def test_importances_lie_on_the_simplex_and_follow_the_clients_when_they_change_places(count):
    means, variances, weights = clients(count)
    q = reverse_kl_importances(means, variances, weights)
    assert bool((q >= 0).all())
    assert math.isclose(float(q.sum()), 1, abs_tol=1e-12)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    moved = reverse_kl_importances(means[order], variances[order], weights[order])
    assert float((moved - q[order]).abs().max()) < 1e-4


def test_identical_clients_get_the_importances_p():
    means, variances, weights = clients(4)
    same = means[:1].expand(4, -1), variances[:1].expand(4, -1)
    assert float((reverse_kl_importances(*same, weights) - weights).abs().max()) < 1e-12


def test_a_client_far_from_the_others_counts_less():
    means, variances = torch.zeros(3, 5, dtype=torch.float64), torch.ones(3, 5, dtype=torch.float64)
    means[2] = 4
    q = reverse_kl_importances(means, variances, torch.full((3,), 1 / 3, dtype=torch.float64))
    assert float(q[2]) < 0.1
    assert abs(float(q[0] - q[1])) < 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_leave_p(value):
    means, variances, weights = clients(3)
    means[1, 2] = value
    assert torch.equal(reverse_kl_importances(means, variances, weights), weights)


def test_a_dead_channel_with_variance_zero_is_no_trouble():
    means, variances, weights = clients(3)
    variances[1, 2] = 0
    assert bool(reverse_kl_importances(means, variances, weights).isfinite().all())


@EXECUTORS
def test_kl_is_moment_matching_bitwise(executor):
    settings = {**SETTINGS, "executor": executor()}
    data = {"sizes": (40, 80, 120)}
    lite = train(small_cnn(), blobs(**data), 4, [FedDNA()], **settings)
    assert distance(lite, train(small_cnn(), blobs(**data), 4, [MomentMatching()], **settings)) == 0


@EXECUTORS
def test_the_server_holds_the_mixture_of_the_importances(executor):
    seen = {}

    class Watched(FedDNA):
        def on_round_end(self, trainer, pl_module, cohort):
            super().on_round_end(trainer, pl_module, cohort)
            means, variances = cohort.buffers["1.running_mean"], cohort.buffers["1.running_var"]
            every = (
                torch.cat([cohort.buffers[f"{i}.{n}"] for i in (1, 4)], 1)
                for n in ("running_mean", "running_var")
            )
            q = reverse_kl_importances(*every, cohort.weights)
            mean = q @ means
            variance = q @ variances + q @ (means - mean) ** 2
            seen.update(mean=mean, var=variance, q=q, metrics=dict(trainer.callback_metrics))

    callback = Watched("reverse_kl")
    state = train(small_cnn(), blobs(), 3, [callback], executor=executor(), **SETTINGS)
    assert float((state["1.running_mean"] - seen["mean"]).abs().max()) < 1e-10
    assert float((state["1.running_var"] - seen["var"]).abs().max()) < 1e-10
    assert float((seen["q"] - 1 / 3).abs().max()) > 0.05
    assert math.isclose(float(seen["metrics"]["feddna/max_importance"]), float(seen["q"].max()), rel_tol=1e-5)
    entropy = -float((seen["q"] * seen["q"].log()).sum())
    assert math.isclose(float(seen["metrics"]["feddna/entropy"]), entropy, rel_tol=1e-4)


class Seen(FederatedCallback):
    """The clients' state at the end of a round."""

    def on_round_end(self, trainer, pl_module, cohort):
        self.weights, self.clients = cohort.weights.clone(), {n: x.clone() for n, x in cohort.buffers.items()}


@pytest.mark.parametrize("method", [FedDNA("reverse_kl"), MomentMatching()])
def test_statistics_that_clients_keep_in_their_heads_have_no_effect(method):
    state = train(small_cnn(), blobs(), 2, [FedPer(["8", "4"]), method, seen := Seen()], **SETTINGS)
    sent = FedDNA(getattr(method, "divergence", "kl")).aggregate(
        seen.clients["1.running_mean"], seen.clients["1.running_var"], seen.weights
    )
    for name, value in zip(("running_mean", "running_var"), sent, strict=True):
        assert float((state[f"1.{name}"] - value).abs().max()) < 1e-10
        assert float((state[f"4.{name}"] - seen.weights @ seen.clients[f"4.{name}"]).abs().max()) < 1e-10


def test_it_is_refused_if_clients_keep_all_statistics():
    with pytest.raises(ConfigurationError, match="leave a BN layer out of the head"):
        train(small_cnn(), blobs(), 1, [FedPer(["8", "4", "1"]), FedDNA()])


def test_the_lite_version_says_so(capsys):
    train(small_cnn(), blobs(), 1, [FedDNA("reverse_kl")])
    assert "FedDNA (lite): importances minimise reverse_kl" in capsys.readouterr().out
    assert "lite" in FedDNA.paper
    assert "(lite)" in FedDNA.__doc__.splitlines()[0]


def test_mistakes_are_named():
    with pytest.raises(ConfigurationError, match=r"FedDNA\.divergence: 'js' must be one of kl, reverse_kl"):
        FedDNA("js")
    with pytest.raises(ConfigurationError, match="FedDNA: the model Sequential has no Batch"):
        train(small_cnn("gn"), blobs(), 1, [FedDNA()])
