"""How many rounds a budget of data buys: FixBN, Appendix B.4."""

import random

import pytest

from fl_lightning import ConfigurationError, FederatedDataModule
from fl_lightning.round.plan import RoundPlan
from tests.support.helpers import SaveRounds, distance, federated_run


class Sizes(FederatedDataModule):
    """Clients of given sizes without any data."""

    def __init__(self, sizes, batch_size):
        super().__init__()
        self.sizes, self.batch_size = sizes, batch_size

    @property
    def num_clients(self):
        return len(self.sizes)

    def num_examples(self, client_id):
        return self.sizes[client_id]

    def steps_per_epoch(self, client_id):
        return -(-self.sizes[client_id] // self.batch_size)

    def samples_per_step(self, client_id):
        return self.sizes[client_id] / self.steps_per_epoch(client_id)


def budget_run(budget, max_epochs=-1, ckpt_path=None, callbacks=(), **settings):
    """A module after training on three clients of 40 examples in batches of 8."""
    settings |= {"budget_epochs": budget, "ckpt_path": ckpt_path}
    return federated_run(*callbacks, rounds=max_epochs, **settings).module


@pytest.mark.parametrize(
    ("local_steps", "rounds", "last_steps"),
    [(1, 64000, 1), (20, 3200, 20), (100, 640, 100), (500, 128, 500), (2500, 26, 1500)],
)
def test_128_epochs_of_cifar_10_are_64000_local_steps(local_steps, rounds, last_steps):
    plan = RoundPlan(Sizes([10_000] * 5, 20), local_steps, None, cohort_size=5, seed=0)
    assert plan.limit(128) == rounds
    assert [plan.steps(client, rounds) for client in range(5)] == [last_steps] * 5
    assert {plan.steps(0, r) for r in range(1, rounds)} <= {local_steps}


def test_partial_participation_buys_more_rounds():
    assert RoundPlan(Sizes([10_000] * 10, 20), 100, None, cohort_size=1, seed=0).limit(2) == 100


@pytest.mark.parametrize("case", range(60))
def test_the_budget_is_never_exceeded_and_one_more_step_of_each_client_would_exceed_it(case):
    draw = random.Random(case)
    sizes = [draw.randint(1, 90) for _ in range(draw.randint(1, 7))]
    data = Sizes(sizes, draw.randint(1, 20))
    local_steps = draw.choice([None, 1, 3, 40])
    local_epochs = draw.randint(1, 3) if local_steps is None else None
    plan = RoundPlan(data, local_steps, local_epochs, draw.randint(1, len(sizes)), seed=case)
    budget = draw.uniform(2, 9)
    rounds = plan.limit(budget)
    spent = sum(
        data.samples_per_step(client) * plan.steps(client, r)
        for r in range(1, rounds + 1)
        for client in plan.cohort(r)
    )
    last = plan.cohort(rounds)
    more = sum(
        data.samples_per_step(client)
        for client in last
        if plan.steps(client, rounds) < plan.full_steps(client)
    ) or sum(data.samples_per_step(client) for client in plan.cohort(rounds + 1))
    assert spent <= budget * sum(sizes) + 1e-5
    assert spent + more > budget * sum(sizes)


def test_a_budget_run_processes_exactly_its_samples():
    module = budget_run(3.4)
    assert module.trainer.current_epoch == module.planned_rounds == 9
    assert module.record.samples == 3.4 * 120


def test_max_epochs_below_the_budget_stops_earlier_and_keeps_the_plan():
    module = budget_run(3, max_epochs=2)
    assert module.trainer.current_epoch == 2
    assert module.planned_rounds == 8


def test_max_epochs_above_the_budget_is_cut():
    assert budget_run(1, max_epochs=50).trainer.current_epoch == 3


def test_a_resumed_budget_run_stops_where_the_uninterrupted_one_stops(tmp_path):
    whole = budget_run(3.4, callbacks=[SaveRounds(tmp_path)])
    resumed = budget_run(3.4, ckpt_path=tmp_path / "4.ckpt")
    assert distance(whole.state_dict(), resumed.state_dict()) == 0
    assert resumed.record.samples == whole.record.samples


def test_a_budget_below_one_local_step_is_named():
    with pytest.raises(ConfigurationError, match=r"budget_epochs: 0.1 is less than one local step"):
        budget_run(0.1)
