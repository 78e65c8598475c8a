"""Updates that are not finite: the client that is left out, the rule that withstands it, the run that ends or goes on."""

import math
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fl_lightning import (
    ClientFailures,
    ConfigurationError,
    FederatedCallback,
    FederatedModule,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.aggregation import GeometricMedian, Median, TrimmedMean
from fl_lightning.attacks import NonFinite
from fl_lightning.callbacks import (
    FBN,
    SCAFFOLD,
    Byzantine,
    FedBN,
    FedDyn,
    MaintainedMomentum,
    SiloBN,
    SlidingWindowFixBN,
    StatisticsSources,
)
from fl_lightning.cohort.client_memory import contents
from tests.support.command_line import run as run_command
from tests.support.helpers import SGD, SaveRounds, States, blobs, distance, federated_run, fit, small_cnn
from tests.support.outcomes import MOMENTUM, assert_same, states

SIZES = (16, 40, 64)


class Diverges(FederatedCallback):
    """Client 1 diverges in the second local step of round 2, in a parameter or a statistic."""

    def __init__(self, name="3.weight", rounds=(2,), clients=(1,)):
        self.name, self.rounds, self.clients = name, rounds, clients

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        for row, client in enumerate(cohort.client_ids):
            if cohort.round in self.rounds and client in self.clients and step == 1:
                {**cohort.params, **cohort.buffers}[self.name][row] = math.nan


class Sends(Diverges):
    """Client 1 sends infinity in round 2."""

    role = "attack"

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        pass

    def on_before_aggregate(self, trainer, pl_module, cohort):
        Diverges.on_local_step_end(self, trainer, pl_module, cohort, 1)


run = partial(
    federated_run, data=partial(blobs, 4, SIZES), rounds=4, client_optimizer=MOMENTUM, on_divergence="drop",
    executor=SequentialExecutor(),
)  # fmt: skip


def absent(*callbacks, **settings):
    """The run in which client 1 is absent in round 2."""
    return run(*callbacks, failures=ClientFailures(schedule={1: [[2, 2]]}), **settings)


def remembered(callback):
    leaves = tree_leaves(contents(callback.state_dict()))
    return [torch.as_tensor(leaf) for leaf in leaves if leaf is not None]


METHODS = {
    "FedAvg": list,
    "FedBN": lambda: [FedBN()],
    "FBN": lambda: [FBN()],
    "SCAFFOLD": lambda: [SCAFFOLD()],
    "FedDyn": lambda: [FedDyn()],
    "SCAFFOLD and FedBN": lambda: [SCAFFOLD(), FedBN()],
    "local momentum": lambda: [MaintainedMomentum("local")],
    "global momentum": lambda: [MaintainedMomentum("global")],
    "window": lambda: [SlidingWindowFixBN(2, 0.0)],
}


@pytest.mark.parametrize("weighting", ["examples", "samples"])
@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
def test_a_client_that_diverges_counts_as_absent(methods, executor, weighting):
    settings = {"executor": executor(), "weighting": weighting, "local_steps": None, "local_epochs": 1}
    first, second = methods(), methods()
    module, rows, found, *_ = run(Diverges(), *first, **settings)
    other, wanted_rows, wanted, *_ = absent(*second, **settings)
    kept = [leaf for callback in first for leaf in remembered(callback)]
    wanted_kept = [leaf for callback in second for leaf in remembered(callback)]
    if executor is SequentialExecutor:
        assert_same(found, wanted)
        assert all(torch.equal(a, b) for a, b in zip(kept, wanted_kept, strict=True))
    assert max(map(distance, found, wanted)) < 1e-10
    for a, b in zip(kept, wanted_kept, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    for name in (
        "train/loss",
        "comm/upload_bytes",
        "comm/download_bytes",
        "comm/exchanges",
        "clients/reported",
    ):
        assert [rows[r][name] for r in rows] == pytest.approx([wanted_rows[r][name] for r in rows], abs=1e-10)
    assert [rows[r]["clients/dropped"] for r in rows] == [0, 1, 0, 0]
    assert (module.record.samples, module.record.clients.keys()) == (
        other.record.samples,
        other.record.clients.keys(),
    )
    assert module.record.not_finite == {1: 1}
    assert not module.record.diverged


@pytest.mark.parametrize("name", ["0.bias", "4.running_var"])
def test_what_an_attack_writes_into_the_rows_is_left_out_too(name):
    found = run(Sends(name)).states
    assert_same(found, absent().states)


def test_a_client_of_a_model_with_untrained_parameters_is_left_out_too(capsys):
    def model():
        network = small_cnn()
        network[:3].requires_grad_(False)
        return network

    found = run(Diverges(), model=model()).states
    assert_same(found, absent(model=model()).states)
    assert "round 2: the update of client 1 is not finite, first in layer '3'" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedDyn", "local momentum", "global momentum"])
def test_a_client_that_sends_what_is_not_finite_counts_as_absent_in_what_methods_keep(name):
    (first,), (second,) = METHODS[name](), METHODS[name]()
    assert_same(run(Sends(), first).states, absent(second).states)
    assert all(torch.equal(a, b) for a, b in zip(remembered(first), remembered(second), strict=True))


@pytest.mark.parametrize("make", [SCAFFOLD, FedDyn])
def test_the_server_keeps_the_mean_of_the_clients_that_count(make):
    method = make()
    run(method, Byzantine(NonFinite(), clients=[1], target="parameters"))
    assert sorted(method.memory) == [-1, 0, 2, 3]
    for block, kept in method.memory[-1].items():
        mean = sum(size / 136 * method.memory[c][block] for c, size in ((0, 16), (2, 64), (3, 16)))
        torch.testing.assert_close(kept, mean, rtol=0, atol=1e-12)
        assert kept.any()


def test_a_client_that_sends_what_is_not_finite_is_told_from_one_that_diverges():
    """Local state of methods has it by then; what the server sums up does without."""
    method = SCAFFOLD()
    _, rows, found, *_ = run(Sends(), Diverges(clients=[3]), method, FBN())
    assert rows[2]["clients/dropped"] == 2
    assert rows[2]["clients/reported"] == 2
    assert all(bool(value.isfinite().all()) for value in found[-1].values())


def test_each_client_is_named_once_and_counted_each_time(capsys, tmp_path):
    diverges = Diverges(rounds=(1, 2, 3), clients=(0, 2))
    module, _, found, *_ = run(diverges, SaveRounds(tmp_path))
    line = "round 1: the update of client {} is not finite, first in layer '3'; such updates are left out of their rounds "
    out = capsys.readouterr().out
    assert [out.count(line.format(client)) for client in range(4)] == [1, 0, 1, 0]
    assert out.count("is not finite") == 2
    assert module.record.not_finite == {0: 3, 2: 3}
    resumed = FederatedModule(
        small_cnn(), MOMENTUM, local_steps=2, on_divergence="drop", executor=SequentialExecutor()
    )
    seen = States()
    fit(resumed, blobs(4, SIZES), 4, [diverges, seen], tmp_path / "2.ckpt")
    assert_same(found[2:], seen.states)
    assert resumed.record.not_finite == module.record.not_finite
    assert "is not finite" not in capsys.readouterr().out


@pytest.mark.parametrize("method", [SCAFFOLD, MaintainedMomentum, FBN])
def test_ranks_leave_out_the_same_clients(method):
    settings = {"rounds": 4, "on_divergence": "drop", "min_clients": 2}
    diverges = Diverges(rounds=(2, 3), clients=(0, 3))

    def run_on(ranks):
        return states(
            ranks, data=blobs(4, SIZES), callbacks=[diverges, method(), Sends(rounds=[3])], **settings
        )

    one = run_on(1)
    assert_same(one, run_on(2))
    assert distance(one[2], one[3]) == 0  # too few are left in round 3
    assert distance(one[1], one[2]) > 0


@pytest.mark.parametrize(
    "settings", [{"min_clients": 3}, {"aggregator": TrimmedMean(1)}, {"centralised": True}]
)
def test_a_round_that_too_few_are_left_of_is_skipped(settings, capsys):
    clients = [0] if "centralised" in settings else [1, 3]
    module, rows, found, *_ = run(Diverges(clients=clients), **settings)
    assert distance(found[1], found[2]) == 0 < distance(found[2], found[3])
    assert [rows[r]["clients/skipped"] for r in rows] == [0, 1, 0, 0]
    assert [rows[r]["clients/dropped"] for r in rows] == [0, len(clients), 0, 0]
    assert "no update is aggregated" in capsys.readouterr().out
    assert module.trainer.global_step == 4


@pytest.mark.parametrize("on_divergence", ["error", "drop"])
@pytest.mark.parametrize("aggregator", [Median(), TrimmedMean(1), GeometricMedian()])
def test_a_robust_rule_goes_on_with_what_it_withstands(aggregator, on_divergence, capsys):
    module, rows, found, *_ = run(Sends(), aggregator=aggregator, on_divergence=on_divergence)
    assert "clients/not_finite" not in rows[1]
    assert rows[2]["clients/not_finite"] == 1
    assert module.record.not_finite == {1: 1}
    assert not module.record.diverged
    assert all(bool(value.isfinite().all()) for value in found[-1].values())
    name = type(aggregator).__name__
    assert (
        f"round 2: the update of client 1 is not finite, first in layer '3'; {name} aggregates it"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "method",
    [SCAFFOLD, FedDyn, FedBN, SiloBN, MaintainedMomentum, lambda: StatisticsSources(["silobn"])],
    ids=["SCAFFOLD", "FedDyn", "FedBN", "SiloBN", "MaintainedMomentum", "StatisticsSources"],
)
@pytest.mark.parametrize("first", [1, 2])
def test_a_client_that_diverges_under_a_robust_rule_keeps_its_last_finite_state(method, first):
    callback = method()
    settings = {"aggregator": Median(), "local_steps": 3, "on_divergence": "error"}
    ended = run(Diverges(rounds=[first]), callback, **settings).clients.end
    spoilt = {
        r: [
            client
            for client, state in ended[r].items()
            if not all(x.isfinite().all() for x in state.values())
        ]
        for r in ended
    }
    assert spoilt == {r: [1] if r == first else [] for r in range(1, 5)}
    assert all(bool(leaf.isfinite().all()) for leaf in remembered(callback))


def test_an_aggregate_that_is_not_finite_is_the_error_of_a_robust_rule():
    line = (
        "round 2: the aggregate of TrimmedMean is not finite, first in layer '3' (clients whose update is not finite: 1, 2); "
        "raise TrimmedMean's f"
    )
    with pytest.raises(ConfigurationError) as refused:
        run(Sends(clients=[1, 2]), aggregator=TrimmedMean(1), on_divergence="error")
    assert str(refused.value).startswith(line)
    with pytest.raises(
        ConfigurationError, match=r"first in layer '4' \(clients whose update is not finite: 1, 2\)"
    ):
        run(Sends("4.running_mean", clients=[1, 2]), aggregator=TrimmedMean(1), on_divergence="error")
    module = run(Sends(clients=[1, 2]), aggregator=TrimmedMean(1), on_divergence="record").module
    assert (module.record.diverged, module.record.diverged_round) == (True, 2)


def test_a_weighted_mean_names_round_client_layer_and_the_ways_out():
    with pytest.raises(ConfigurationError) as refused:
        run(Diverges(), on_divergence="error")
    assert str(refused.value) == (
        "round 2: the update of client 1 is not finite, first in layer '3'; lower client_optimizer lr (now 0.05), or set "
        "model.on_divergence: drop to leave such updates out, or record to aggregate them"
    )


def test_a_run_that_goes_on_diverged_says_when_and_ends_with_its_table(capsys):
    options = ("--model.on_divergence", "record", "--model.client_optimizer.init_args.lr", "1e30")
    cli = run_command("--trainer.max_epochs", 2, *options)
    out = capsys.readouterr().out
    assert "round 1: the update of client 0 is not finite, first in layer '" in out
    assert "the run continues, flagged as diverged (model.on_divergence: record)" in out
    table = out.partition("Result\n")[2]
    assert "2  (diverged, first in round 1)" in table
    assert "6 updates of 3 clients" in table
    assert cli.model.record.diverged_round == 1


def test_an_evaluation_that_is_not_finite_belongs_to_the_round_before_it():
    class Ruins(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            if cohort.round == 2:
                cohort.server_parameters["8.weight"].data.fill_(1e308)

    module = FederatedModule(small_cnn(), SGD, local_steps=1, on_divergence="record")
    fit(module, blobs(), 3, [Ruins()], limit_val_batches=1.0)
    assert module.record.diverged_round == 2
