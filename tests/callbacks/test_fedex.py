"""FedEx over "freeze now?" (Khodak et al. 2021, adapted to FixBN's T*)."""

import math
from copy import deepcopy
from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning import ConfigurationError, FederatedCallback, SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FedExFixBN, FedNova, FixBN
from fl_lightning.callbacks.fedex import (
    discounted_mean,
    entropy,
    exponentiated_step,
    gradient_estimate,
    step_size,
)
from fl_lightning.round.policy import policy_table
from tests.support.helpers import SaveRounds, blobs, client_batch, distance, federated_run, small_cnn, train

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
SCHEDULES = ("auto", "adaptive", "aggressive", "constant")
UNIFORM = torch.full((4,), 0.25, dtype=torch.float64)
STATISTICS = [f"{layer}.running_{name}" for layer in (1, 4) for name in ("mean", "var")]


def theta_at(freeze):
    """A method whose theta gives freezing the probability ``freeze`` and never moves."""
    method = FedExFixBN(cutoff=0.0)
    method.log_theta = torch.tensor([1 - freeze, freeze], dtype=torch.float64).log()
    method._choices = lambda pl_module, cohort: torch.full((len(cohort),), int(freeze == 1))
    method.on_before_aggregate = lambda *args: None
    return method


def search(rounds, method=None, extra=(), ckpt_path=None, **settings):
    method, data = method or FedExFixBN(), blobs(4, (24, 40, 32))
    states = federated_run(method, *extra, data=data, rounds=rounds, ckpt_path=ckpt_path, **settings).states
    return method, states


# The distribution


def test_with_one_configuration_nothing_ever_moves():
    theta = torch.zeros(1, dtype=torch.float64)
    gradient = gradient_estimate(torch.rand(4).double(), torch.zeros(4).long(), UNIFORM, theta.exp(), 0.3)
    for schedule in SCHEDULES:
        size, _ = step_size(gradient, schedule, 0.0)
        assert torch.equal(exponentiated_step(theta, gradient, size), theta)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_theta_begins_and_stays_on_the_simplex(schedule):
    assert torch.allclose(FedExFixBN().log_theta.exp(), 2 * UNIFORM[:2])
    generator = torch.Generator().manual_seed(0)
    log_theta, past = torch.full((3,), -math.log(3), dtype=torch.float64), 0.0
    for _ in range(200):
        choices = torch.multinomial(log_theta.exp(), 4, True, generator=generator)
        losses = 100 * torch.rand(4, generator=generator).double()
        gradient = gradient_estimate(losses, choices, UNIFORM, log_theta.exp(), 50.0)
        size, past = step_size(gradient, schedule, past)
        log_theta = exponentiated_step(log_theta, gradient, size)
        assert log_theta.exp().sum() == pytest.approx(1, abs=1e-12)
        assert (log_theta.exp() >= 0).all()


@pytest.mark.parametrize("baseline", [0.0, 1.5])
@pytest.mark.parametrize("losses", [(2.0, 2.0), (1.0, 3.0)])
def test_the_estimate_is_unbiased_whatever_the_baseline(baseline, losses):
    theta, weights = torch.tensor([0.2, 0.8], dtype=torch.float64), torch.tensor([0.5, 0.3, 0.2]).double()
    expected = torch.zeros(2, dtype=torch.float64)
    for choices in product((0, 1), repeat=3):
        index = torch.tensor(choices)
        seen = torch.tensor([losses[c] for c in choices], dtype=torch.float64)
        expected += theta[index].prod() * gradient_estimate(seen, index, weights, theta, baseline)
    assert torch.allclose(expected, torch.tensor(losses, dtype=torch.float64) - baseline, atol=1e-12)
    moved = exponentiated_step(theta.log(), expected, 0.7)
    # equal losses: the mean step is none at all
    assert torch.allclose(moved.exp(), theta, atol=1e-12) == (losses[0] == losses[1])


def test_dividing_by_anything_but_theta_would_be_biased():
    theta, losses = torch.tensor([0.2, 0.8], dtype=torch.float64), torch.tensor([1.0, 3.0]).double()
    one = torch.ones(1, dtype=torch.float64)
    expected = sum(
        theta[c] * gradient_estimate(losses[c : c + 1], torch.tensor([c]), one, UNIFORM[:2] * 2, 0.0)
        for c in (0, 1)
    )
    assert float((expected - losses).abs().max()) > 0.1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_clear_winner_is_found(schedule):
    generator = torch.Generator().manual_seed(0)
    log_theta, past = torch.full((2,), -math.log(2), dtype=torch.float64), 0.0
    for _ in range(100):
        choices = torch.multinomial(log_theta.exp(), 4, True, generator=generator)
        losses = torch.tensor([1.0, 0.0], dtype=torch.float64)[choices]
        gradient = gradient_estimate(losses, choices, UNIFORM, log_theta.exp(), 0.5)
        size, past = step_size(gradient, schedule, past)
        log_theta = exponentiated_step(log_theta, gradient, size)
        if entropy(log_theta) < 0.1:
            break
    assert entropy(log_theta) < 0.1
    assert log_theta.argmax() == 1


def test_step_sizes_are_those_of_the_paper_and_its_code():
    gradient, root = torch.tensor([3.0, -4.0]), math.sqrt(2 * math.log(2))
    assert step_size(gradient, "constant", 0.0) == (root, 0.0)
    assert step_size(gradient, "aggressive", 0.0) == (root / 4, 0.0)
    assert step_size(gradient, "auto", 3.0) == (root / 2, 4.0)
    assert step_size(gradient, "adaptive", 9.0) == (root / 5, 25.0)
    assert (
        step_size(gradient * 0, "aggressive", 0.0)[0] == step_size(gradient * 0, "adaptive", 0.0)[0] == root
    )


def test_baseline_and_entropy():
    assert discounted_mean([1.0, 2.0, 4.0], 1.0) == pytest.approx(7 / 3)
    assert discounted_mean([1.0, 2.0, 4.0], 0.0) == 4.0
    assert discounted_mean([1.0, 2.0, 4.0], 0.5) == pytest.approx((0.25 + 1 + 4) / 1.75)
    assert entropy(UNIFORM.log()) == pytest.approx(math.log(4))
    assert entropy(torch.tensor([0.0, -math.inf])) == 0.0


def test_losses_that_are_not_finite_are_ignored(monkeypatch):
    """Clients have 24, 40, 32 and 24 samples, and the first reports no number."""
    losses = torch.tensor([math.nan, 1, 3, 2], dtype=torch.float64)
    monkeypatch.setattr("fl_lightning.callbacks.fedex.held_out_losses", lambda *args: losses[args[-1]])
    method, _ = search(3)
    assert method.past_losses == pytest.approx([(40 * 1 + 32 * 3 + 24 * 2) / 96] * 3)
    assert method.log_theta.isfinite().all()
    assert abs(method.log_theta[0] - method.log_theta[1]) > 0.01


# The method


@EXECUTORS
def test_where_all_clients_choose_the_batch_training_is_fedavg(executor):
    plain = train(small_cnn(), blobs(4, (24, 40, 32)), 3, local_steps=2, executor=executor())
    _, states = search(3, theta_at(0.0), executor=executor())
    assert distance(states[-1], plain) < 1e-12


@EXECUTORS
def test_where_all_clients_choose_the_servers_statistics_training_is_fixbn_from_the_start(executor):
    callbacks = [FixBN(freeze_round=0)]
    frozen = train(small_cnn(), blobs(4, (24, 40, 32)), 3, callbacks, local_steps=2, executor=executor())
    _, states = search(3, theta_at(1.0), executor=executor())
    assert distance(states[-1], frozen) < 1e-12
    assert distance(states[-1], train(small_cnn(), blobs(4, (24, 40, 32)), 3, local_steps=2)) > 1e-3


class Watch(FederatedCallback):
    """In the first round: which clients are frozen, their statistics and the loss that they should report."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if cohort.round > 1:
            return
        self.frozen = cohort.buffers["1.frozen"].tolist()
        self.kept = [
            all(torch.equal(cohort.buffers[name][row], cohort.server_buffers[name]) for name in STATISTICS)
            for row in range(len(cohort))
        ]
        self.losses, self.weights = [], cohort.weights.tolist()
        for row, client in enumerate(cohort.client_ids):
            model = deepcopy(small_cnn()).double()
            model.load_state_dict(
                {
                    **cohort.params.row(row),
                    **{
                        k: v
                        for k, v in cohort.buffers.row(row).items()
                        if "frozen" not in k and "key" not in k
                    },
                }
            )
            inputs, targets = client_batch(pl_module.data, client, cohort.local_steps[row])
            self.losses.append(cross_entropy(model.eval()(inputs), targets).item())


@EXECUTORS
def test_each_client_follows_its_own_choice_and_reports_the_loss_of_its_own_model_on_its_next_batch(executor):
    watch = Watch()
    method, _ = search(1, extra=[watch], seed=1, executor=executor())
    assert set(watch.frozen) == {True, False}
    assert watch.kept == watch.frozen
    expected = sum(w * loss for w, loss in zip(watch.weights, watch.losses, strict=True))
    assert method.past_losses == [pytest.approx(expected, rel=1e-12)]


def test_the_loss_is_of_the_clients_model_also_if_fednova_comes_first():
    data = blobs(4, (24, 40, 32))
    losses = []
    for order in (1, -1):
        methods = [method := FedExFixBN(), FedNova()][::order]
        train(small_cnn(), data, 2, methods, local_steps=None, local_epochs=1)
        losses.append(method.past_losses)
    assert losses[0] == losses[1]


def test_choices_are_a_function_of_seed_round_and_client():
    seen = []
    for executor in (SequentialExecutor(), VectorizedExecutor()):
        watch = Watch()
        search(1, extra=[watch], seed=1, executor=executor)
        seen.append(watch.frozen)
    assert seen[0] == seen[1]


def test_when_freezing_wins_the_rest_of_the_run_is_frozen_and_t_star_is_logged():
    method = FedExFixBN(cutoff=0.3)
    method.log_theta = torch.tensor([0.01, 0.99], dtype=torch.float64).log()
    method, states = search(4, method)
    assert method.freeze_round == 1
    assert all(torch.equal(states[r][name], states[1][name]) for r in (2, 3, 4) for name in STATISTICS)
    assert policy_table(small_cnn(), [method], 4)["mean"] == [(1, "averaged"), (2, "frozen")]


def test_when_the_batch_wins_training_goes_on_with_batch_statistics_for_good():
    method = FedExFixBN(cutoff=0.3)
    method.log_theta = torch.tensor([0.99, 0.01], dtype=torch.float64).log()
    watch = Watch()
    method, states = search(4, method, [watch])
    assert (method.freeze_round, method.batch_round) == (None, 1)
    assert not any(torch.equal(states[4][name], states[3][name]) for name in STATISTICS)
    assert policy_table(small_cnn(), [method], 4)["mean"] == [(1, "averaged")]


@pytest.mark.parametrize("start", [1, 3, 5])
def test_a_resumed_search_is_the_same_bit_for_bit(start, tmp_path):
    settings = {"participation": 3}
    method, states = search(6, extra=[SaveRounds(tmp_path)], **settings)
    again, resumed = search(6, ckpt_path=tmp_path / f"{start}.ckpt", **settings)
    assert not torch.equal(method.log_theta, FedExFixBN().log_theta)
    assert torch.equal(method.log_theta, again.log_theta)
    assert (method.past_losses, method.past_steps) == (again.past_losses, again.past_steps)
    assert all(torch.equal(states[-1][name], resumed[-1][name]) for name in resumed[-1])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"schedule": "scale"}, "schedule: 'scale' must be one of auto"),
        ({"discount": 1.5}, "discount: 1.5"),
        ({"cutoff": 0.7}, "cutoff: 0.7"),
        ({"cutoff": -0.1}, "cutoff: -0.1"),
    ],
)
def test_settings_out_of_range_are_named(settings, named):
    with pytest.raises(ConfigurationError, match=named):
        FedExFixBN(**settings)


def test_a_model_without_bn_is_refused():
    with pytest.raises(ConfigurationError, match="FedExFixBN: the model Sequential has no Batch"):
        train(small_cnn("gn"), blobs(), 1, [FedExFixBN()])
