"""Clients that fail without malice: who drops out, who takes fewer steps, and rounds that too few are left of."""

from copy import deepcopy
from functools import partial

import pytest
import torch

from fl_lightning import (
    ClientFailures,
    ConfigurationError,
    FederatedCallback,
    FederatedModule,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.aggregation import TrimmedMean
from fl_lightning.callbacks import FBN, SCAFFOLD, FedBN, FixBN, MaintainedMomentum
from fl_lightning.round.plan import RoundPlan, sample_cohort
from tests.support.helpers import (
    SGD,
    SaveRounds,
    States,
    blobs,
    by_hand,
    distance,
    federated_run,
    fit,
    small_cnn,
)
from tests.support.outcomes import assert_same, states

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
SIZES = (16, 40, 64)
OFTEN = ClientFailures(dropout=0.4, stragglers=0.5)
AWAY = ClientFailures(schedule={1: [[2, 3]], 2: [[3, 3]]})


class Cohorts(FederatedCallback):
    """Who takes part in each round, and with how many steps, at each of two hooks."""

    def __init__(self):
        self.start, self.end, self.steps = {}, {}, {}

    def on_round_start(self, trainer, pl_module, cohort):
        self.start[cohort.round] = cohort.client_ids
        self.steps[cohort.round] = cohort.local_steps

    def on_round_end(self, trainer, pl_module, cohort):
        self.end[cohort.round] = cohort.client_ids


def plan(failures, clients=10, seed=0, **settings):
    return RoundPlan(blobs(clients), 20, None, clients, seed, failures=failures, **settings)


run = partial(federated_run, data=partial(blobs, 3, SIZES))


def test_by_default_every_client_reports_after_all_its_steps():
    given, absent = ClientFailures(), ClientFailures(schedule={3: [[1, 1]]})
    assert all(given.reports(client, 0, 2) and given.steps(20, client, 0, 2) == 20 for client in range(10))
    assert [absent.reports(client, 0, 1) for client in (2, 3)] == [True, False]


def test_failures_are_a_function_of_seed_round_and_client():
    first, again, other = (plan(ClientFailures(0.3, stragglers=0.3), seed=seed) for seed in (0, 0, 1))
    rounds = range(1, 30)
    cohorts = [first.cohort(r) for r in rounds]
    steps = [[first.steps(client, r) for client in range(10)] for r in rounds]
    assert cohorts == [again.cohort(r) for r in rounds] != [other.cohort(r) for r in rounds]
    assert steps == [[again.steps(client, r) for client in range(10)] for r in rounds]
    fewer = plan(ClientFailures(dict.fromkeys(range(5), 0.3)))  # others' draws do not change
    assert [[c for c in fewer.cohort(r) if c < 5] for r in rounds] == [
        [c for c in x if c < 5] for x in cohorts
    ]
    assert all({5, 6, 7, 8, 9} <= set(fewer.cohort(r)) for r in rounds)


def test_probabilities_hold_in_the_long_run_and_stragglers_take_any_number_of_steps():
    failing = plan(ClientFailures(dropout=0.3, stragglers=0.4))
    rounds = range(1, 1001)
    assert abs(sum(len(failing.cohort(r)) for r in rounds) - 7000) < 5 * (10_000 * 0.3 * 0.7) ** 0.5
    steps = torch.tensor([failing.steps(client, r) for r in rounds for client in range(10)])
    counts = torch.bincount(steps, minlength=21)
    assert counts[0] == 0
    assert float((counts[1:20] - 200).abs().max()) < 5 * (200 * 0.98) ** 0.5
    assert int(counts[20]) == pytest.approx(6200, abs=250)


@EXECUTORS
def test_absences_by_schedule_equal_averaging_those_who_report_by_hand(executor):
    seen = Cohorts()
    module, rows, *_ = run(seen, rounds=4, failures=AWAY, executor=executor())
    cohorts = {1: [0, 1, 2], 2: [0, 2], 3: [0], 4: [0, 1, 2]}
    assert seen.start == cohorts
    assert [rows[r]["clients/reported"] for r in cohorts] == [3, 2, 1, 3]
    assert [rows[r]["clients/skipped"] for r in cohorts] == [0] * 4
    assert rows[2]["comm/upload_bytes"] == pytest.approx(2 / 3 * rows[1]["comm/upload_bytes"])
    assert module.record.samples == 9 * 2 * 8
    reference, _ = by_hand(
        small_cnn(), blobs(sizes=SIZES), 4, steps=[2] * 3, weights=SIZES, cohort=cohorts.get
    )
    assert distance(module.state_dict(), reference) < 1e-10


def test_a_client_that_never_reports_is_one_that_never_takes_part():
    always = ClientFailures(
        dropout={client: 1.0 for client in range(4) if client not in sample_cohort(4, 2, 0, 1)}
    )
    absent = run(rounds=1, data=blobs(4, SIZES), failures=always).module
    sampled = run(rounds=1, data=blobs(4, SIZES), participation=2).module
    assert distance(absent.state_dict(), sampled.state_dict()) == 0


@EXECUTORS
def test_stragglers_equal_separate_runs_of_as_many_steps(executor):
    failures, seen = ClientFailures(stragglers={0: 1.0, 2: 1.0}), Cohorts()
    module = run(seen, rounds=1, failures=failures, local_steps=9, executor=executor()).module
    (steps,) = seen.steps.values()
    assert steps[1] == 9 > max(steps[0], steps[2])
    reference, _ = by_hand(small_cnn(), blobs(sizes=SIZES), 1, steps=steps, weights=SIZES)
    assert distance(module.state_dict(), reference) < 1e-10


def test_the_twin_trains_on_the_batches_of_those_who_report():
    settings = {"failures": OFTEN, "local_steps": 1, "weighting": "samples"}
    federated = run(FBN(), rounds=4, **settings).module
    twin, rows, *_ = run(FBN(), rounds=4, centralised=True, **settings)
    assert distance(federated.state_dict(), twin.state_dict()) < 1e-10
    assert twin.record.samples == federated.record.samples < 4 * 3 * 8
    assert min(row["clients/reported"] for row in rows.values()) < 3


def test_a_budget_is_spent_on_what_clients_really_do():
    module = federated_run(rounds=-1, budget_epochs=2, failures=OFTEN).module
    assert module.planned_rounds > 5
    assert 240 - 3 * 8 < module.record.samples <= 240
    away = ClientFailures(schedule={0: [[1, 10**9]]})
    with pytest.raises(
        ConfigurationError, match=r"budget_epochs: 2 is never spent: rounds 1 to 10000 have fewer than 3 rep"
    ):
        fit(
            FederatedModule(small_cnn(), SGD, local_steps=2, budget_epochs=2, failures=away, min_clients=3),
            blobs(),
            -1,
        )


METHODS = {"fedavg": list, "fbn": lambda: [FBN()], "scaffold and local bn": lambda: [SCAFFOLD(), FedBN()]}


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_bits_are_those_of_one_process_on_any_number_of_ranks(methods):
    settings = {"failures": OFTEN, "rounds": 5, "min_clients": 2}
    one = states(data=blobs(4), callbacks=methods(), **settings)
    assert_same(one, states(2, data=blobs(4), callbacks=methods(), **settings))
    together = states(data=blobs(4), callbacks=methods(), **{**settings, "executor": VectorizedExecutor()})
    assert max(map(distance, one, together)) < 1e-10


def test_a_run_that_goes_on_fails_as_the_uninterrupted_one(tmp_path):
    def module():
        momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return FederatedModule(
            small_cnn(), momentum, server_optimizer=momentum, local_steps=2, failures=AWAY, min_clients=2
        )

    whole = module()
    fit(whole, blobs(), 5, [SaveRounds(tmp_path), MaintainedMomentum(), FixBN(3)])
    for number in (1, 2, 3, 4):
        resumed = module()
        fit(resumed, blobs(), 5, [MaintainedMomentum(), FixBN(3)], tmp_path / f"{number}.ckpt")
        assert distance(whole.state_dict(), resumed.state_dict()) == 0
        assert resumed.record.clients == whole.record.clients


class Skips(FederatedCallback):
    """The hooks that are called in each round, and the policy of statistics."""

    def __init__(self):
        self.called, self.policies = [], {}

    def on_round_start(self, trainer, pl_module, cohort):
        self.called.append((cohort.round, "start"))
        self.policies[cohort.round] = cohort.policy["mean"]

    def on_round_end(self, trainer, pl_module, cohort):
        self.called.append((cohort.round, "end"))


def optimizer_state(module):
    return deepcopy(module.trainer.optimizers[0].state_dict()["state"])


class ServerOptimizer(FederatedCallback):
    def __init__(self):
        self.after = {}

    def on_train_epoch_end(self, trainer, pl_module):
        self.after[pl_module.round] = optimizer_state(pl_module)


@pytest.mark.parametrize(
    "server",
    [partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1), partial(torch.optim.Adam, lr=0.1)],
)
def test_a_round_with_too_few_reports_counts_and_leaves_the_server_as_it_is(server, capsys):
    calls, server_states, optimizers = Skips(), States(), ServerOptimizer()
    methods = [FixBN(3), calls, server_states, optimizers]
    module, rows, *_ = run(*methods, rounds=4, failures=AWAY, min_clients=2, server_optimizer=server)
    assert (
        "round 3: 1 of 3 clients can be aggregated, and model.min_clients is 2: no update is aggregated"
        in capsys.readouterr().out
    )
    assert calls.called == [(r, hook) for r in (1, 2, 4) for hook in ("start", "end")]
    assert calls.policies[4] == "frozen"
    assert distance(server_states.states[2], server_states.states[3]) == 0
    assert distance(server_states.states[3], server_states.states[4]) > 0
    torch.testing.assert_close(optimizers.after[2], optimizers.after[3], rtol=0, atol=0)
    assert (rows[3]["clients/reported"], rows[3]["clients/skipped"], rows[3]["comm/upload_bytes"]) == (
        1,
        1,
        0,
    )
    assert "train/loss" not in rows[3]
    assert list(rows) == [1, 2, 3, 4]
    assert module.trainer.global_step == 4
    assert {client: number for client, (number, _, _) in module.record.clients.items()} == {0: 3, 1: 2, 2: 3}


def test_a_run_whose_first_round_is_skipped_trains_in_the_next():
    for settings in ({}, {"centralised": True}):
        skipping = ClientFailures(schedule={client: [[1, 1]] for client in range(3)})
        module, rows, *_ = run(rounds=2, failures=skipping, **settings)
        assert [rows[r]["clients/reported"] for r in (1, 2)] == [0, 3]
        assert module.record.samples == 3 * 2 * 8


def test_a_round_that_is_too_small_for_the_aggregator_is_skipped(capsys):
    failures = ClientFailures(schedule={0: [[2, 2]], 1: [[2, 3]], 2: [[2, 2]]})
    rows = run(rounds=3, data=blobs(5, SIZES), failures=failures, aggregator=TrimmedMean(1)).rows
    assert [rows[r]["clients/skipped"] for r in (1, 2, 3)] == [0, 1, 0]
    assert "round 2: 2 of 5 clients can be aggregated, and TrimmedMean needs 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_clients": 4}, "model.min_clients: 4 must be at least 1 and at most the 3 clients of a round"),
        ({"min_clients": 0}, "model.min_clients: 0 must be at least 1"),
        ({"failures": {"dropout": 1.5}}, "ClientFailures.dropout: 1.5 must be a probability in [0, 1]"),
        ({"failures": {"stragglers": {1: -0.1}}}, "ClientFailures.stragglers: -0.1 must be a probability"),
        ({"failures": {"schedule": {1: [[3, 2]]}}}, "ClientFailures.schedule: [[3, 2]] must be [first round, last round]"),
        ({"failures": {"schedule": {1: [3, 4]}}}, "ClientFailures.schedule: [3, 4] must be [first round, last round]"),
        ({"failures": {"schedule": {7: None}}}, "ClientFailures.schedule: None must be [first round, last round] by client id, such as {7: [[3, 5]]}"),
        ({"failures": {"schedule": {1: 4}}}, "ClientFailures.schedule: 4 must be [first round, last round] by client id"),
        ({"failures": {"schedule": {1: [["a", 5]]}}}, "ClientFailures.schedule: [['a', 5]] must be [first round"),
        ({"failures": {"schedule": {1.5: [[1, 2]]}}}, "ClientFailures.schedule: 1.5 must be a client's number, such as 7"),
        ({"failures": {"stragglers": {True: 0.5}}}, "ClientFailures.stragglers: True must be a client's number, such as 7"),
        ({"failures": {"schedule": [1]}}, "ClientFailures.schedule: [1] must be [first round, last round] by client id, such as {7: [[3, 5]]}"),
        ({"failures": {"schedule": [[1, 2]]}}, "ClientFailures.schedule: [[1, 2]] must be [first round, last round] by client id"),
        ({"failures": {"schedule": []}}, "ClientFailures.schedule: [] must be [first round, last round] by client id"),
        ({"failures": {"schedule": ((3, 5), (7, 9))}}, "ClientFailures.schedule: ((3, 5), (7, 9)) must be [first round"),
        ({"failures": {"dropout": None}}, "ClientFailures.dropout: None must be a probability in [0, 1]"),
        ({"failures": {"dropout": {"a": 0.5}}}, "ClientFailures.dropout: 'a' must be a client's number, such as 7"),
        ({"failures": {"stragglers": {1: None}}}, "ClientFailures.stragglers: None must be a probability in [0, 1]"),
        ({"failures": {"dropout": {3: 0.5}}}, "ClientFailures.dropout: there is no client 3; there are clients 0 to 2"),
    ],
)  # fmt: skip
def test_impossible_settings_are_one_line(settings, message):
    given = settings.get("failures")
    with pytest.raises(ConfigurationError) as refused:
        run(rounds=1, **{**settings, "failures": given and ClientFailures(**given)})
    assert str(refused.value).startswith(message)


def test_metrics_of_runs_without_failures_have_no_columns_of_them():
    assert not [name for name in run(rounds=1).rows[1] if name.startswith("clients/")]


def test_clients_are_numbers_also_where_a_file_writes_texts():
    assert ClientFailures(dropout={"7": 0.5}, schedule={"7": [[1, 2]]}).dropout == {7: 0.5}
