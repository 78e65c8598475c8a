"""FedDyn: equal to separate models in plain PyTorch, to FedProx in its first round, and its limits."""

from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning import (
    ClientFailures,
    ConfigurationError,
    FederatedCallback,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.callbacks import FedBN, FedDyn, FedProx
from fl_lightning.cohort.rows import parameter_groups
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.round.plan import sample_cohort
from tests.support.helpers import blobs, client_batch, distance, federated_run, small_cnn, train
from tests.support.readme_code import methods

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
SIZES = (16, 24, 40, 32)
TWO_OF_FOUR = partial(sample_cohort, 4, 2, 0)
ALPHA = 0.5


def by_hand(rounds, *, weights=(1, 1, 1, 1), cohort=lambda _: range(4), steps=3, sign=1.0):
    """Algorithm 1 with separate models whose loss has both terms; returns the server's state, h and each g_i."""
    model, data = small_cnn().double().train(), blobs(4, SIZES)
    names = [name for name, _ in model.named_parameters()]
    h = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    own = [dict(h) for _ in weights]
    for number in range(rounds):
        members, states = cohort(number + 1), []
        x = {name: value.detach().clone() for name, value in model.named_parameters()}
        for client in members:
            local = deepcopy(model)
            stepper = torch.optim.SGD(local.parameters(), lr=0.1)
            for step in range(steps):
                inputs, targets = client_batch(data, client, number * steps + step)
                loss = cross_entropy(local(inputs), targets)
                for name, w in local.named_parameters():
                    loss = loss - (own[client][name] * w).sum() + ALPHA / 2 * (w - x[name]).square().sum()
                stepper.zero_grad()
                loss.backward()
                stepper.step()
            states.append({name: value.clone() for name, value in local.state_dict().items()})
        total = sum(weights[client] for client in members)
        shares = [weights[client] / total for client in members]
        for name, old in model.state_dict().items():
            held = [state[name] for state in states]
            if name not in names:
                mean = sum(p * value for p, value in zip(shares, held, strict=True))
                old.copy_(mean if old.is_floating_point() else torch.stack(held).amax(0))
                continue
            for client, state in zip(members, held, strict=True):
                own[client] = {**own[client], name: own[client][name] - ALPHA * (state - x[name])}
                h[name] = h[name] - ALPHA * weights[client] / sum(weights) * (state - x[name])
            old.copy_(sum(p * value for p, value in zip(shares, held, strict=True)) - sign * h[name] / ALPHA)
    return model.state_dict(), h, own


def flat(values):
    """Values by name as the rows of the blocks."""
    groups = parameter_groups(small_cnn(), {})
    return {
        group: torch.cat(
            [value.detach().flatten() for name, value in values.items() if groups[name] == group]
        )
        for group in ("weights", "batch_norm")
    }


def run(*callbacks, rounds=4, data=None, **settings):
    data = data or blobs(4, SIZES)
    return train(small_cnn(), data, rounds, callbacks, **{"local_steps": 3, **settings})


@EXECUTORS
@pytest.mark.parametrize(("weighting", "weights"), [("uniform", (1, 1, 1, 1)), ("examples", SIZES)])
def test_it_equals_the_papers_algorithm_by_hand_with_partial_participation(weighting, weights, executor):
    method = FedDyn(ALPHA)
    trained = run(method, participation=2, weighting=weighting, executor=executor())
    state, h, own = by_hand(4, weights=weights, cohort=TWO_OF_FOUR)
    assert distance(trained, state) < 1e-10
    assert distance(method.memory[-1], flat(h)) < 1e-10
    for client in {client for number in (1, 2, 3, 4) for client in TWO_OF_FOUR(number)}:
        assert distance(method.memory[client], flat(own[client])) < 1e-10
    assert distance(trained, by_hand(4, weights=weights, cohort=TWO_OF_FOUR, sign=-1.0)[0]) > 1e-3
    assert distance(trained, run(participation=2, weighting=weighting)) > 1e-3


def test_gradients_of_the_first_round_are_those_of_fedprox():
    class Gradients(FederatedCallback):
        def __init__(self):
            self.seen = []

        def on_after_local_backward(self, trainer, pl_module, cohort, step):
            if cohort.round == 1:
                self.seen.append({name: value.clone() for name, value in cohort.grads.items()})

    seen = []
    for method in (FedDyn(ALPHA), FedProx(ALPHA), FedProx(2 * ALPHA)):
        after = Gradients()
        run(method, after, rounds=1)
        seen.append(after.seen)
    dynamic, proximal, other = seen
    assert len(dynamic) == 3
    assert all(distance(one, two) < 1e-12 for one, two in zip(dynamic, proximal, strict=True))
    assert distance(dynamic[-1], other[-1]) > 1e-4


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_with_full_participation_h_is_the_mean_of_all_g_in_every_round(weighting):
    weights = torch.tensor((1, 1, 1, 1) if weighting == "uniform" else SIZES).double()

    class Compares(FederatedCallback):
        rounds = 0

        def on_round_end(self, trainer, pl_module, cohort):
            for block, h in method.memory[-1].items():
                rows = torch.stack([method.memory[client][block] for client in range(4)])
                assert torch.allclose(h, (weights / weights.sum()) @ rows, rtol=0, atol=1e-12)
                assert h.abs().max() > 1e-3
            Compares.rounds += 1

    method = FedDyn(ALPHA)
    run(method, Compares(), weighting=weighting)
    assert Compares.rounds == 4


def test_state_of_absent_clients_is_untouched():
    seen = []

    class Keeps(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            held = {c: {b: x.clone() for b, x in method.memory[c].items()} for c in method.memory}
            seen.append((cohort.client_ids, held))

    method = FedDyn(ALPHA)
    run(method, Keeps(), participation=2, rounds=6)
    waited = 0
    for (_, before), (clients, after) in pairwise(seen):
        for client in before.keys() - {*clients, -1}:
            assert distance(before[client], after[client]) == 0
            waited += 1
        assert all(distance(before[c], after[c]) > 0 for c in before.keys() & {*clients})
    assert waited


def test_stragglers_of_a_run_weighted_by_samples_leave_h_the_mean_of_all_g():
    method = FedDyn(ALPHA)
    failures = ClientFailures(dropout=0.0, stragglers=0.5)
    run(method, weighting="samples", failures=failures)
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    for block, h in method.memory[-1].items():
        rows = torch.stack([method.memory[client][block] for client in range(4)])
        assert torch.allclose(h, weights @ rows, rtol=0, atol=1e-12)


def test_two_ranks_are_one():
    ranks = {"devices": 2, "strategy": CohortStrategy()}
    one, two = (run(FedDyn(ALPHA), participation=3, trainer=extra) for extra in ({}, ranks))
    assert distance(one, two) == 0


def test_local_parameters_have_no_terms():
    method = FedDyn(ALPHA)
    run(FedBN(), method, rounds=2)
    assert {block for entry in method.memory.values() for block in entry} == {"weights"}


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_alpha_must_be_above_zero(alpha):
    with pytest.raises(ConfigurationError, match=r"^FedDyn\.alpha: .* must be above 0"):
        FedDyn(alpha)


@EXECUTORS
def test_the_page_has_feddyn(executor):
    settings = {"rounds": 4, "data": blobs(4), "local_steps": 3, "participation": 2, "weighting": "uniform"}
    page, shipped = (
        federated_run(method, executor=executor(), **settings).states
        for method in (methods().Dynamic(ALPHA), FedDyn(ALPHA))
    )
    assert [distance(*pair) for pair in zip(page, shipped, strict=True)] == pytest.approx([0] * 5, abs=1e-12)
