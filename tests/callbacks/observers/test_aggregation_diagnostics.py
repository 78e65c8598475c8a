"""AggregationDiagnostics: how far the aggregate is from the honest mean, and whose it is."""

import math

import pytest
import torch

from fl_lightning.aggregation import NNM, Median, MultiKrum, RobustAggregator, TrimmedMean, WeightedMean
from fl_lightning.attacks import ALittleIsEnough, Gaussian
from fl_lightning.callbacks import AggregationDiagnostics, Byzantine
from tests.support.helpers import States, blobs, distance, small_cnn, train

FIVE = {"num_clients": 5, "sizes": (16,)}


@pytest.mark.parametrize(
    ("rule", "share"),
    [(WeightedMean(), 0.4), (MultiKrum(2), 0.0), (TrimmedMean(2), 0.0)],
    ids=["mean", "multi-Krum", "trimmed mean"],
)
def test_the_diagnostics_say_how_far_the_aggregate_is_and_whose_it_is(rule, share):
    watch, states = AggregationDiagnostics(1), States()
    callbacks = [Byzantine(Gaussian(1e6, 0), 2, "parameters"), watch, states]
    train(small_cnn(), blobs(**FIVE), 1, callbacks, aggregator=rule, on_divergence="record")
    assert watch.newest["byzantine/share_parameters"] == pytest.approx(share, abs=1e-9)
    if share:
        assert watch.newest["byzantine/distance_parameters"] > 1e4
    else:
        assert watch.newest["byzantine/distance_parameters"] < 2
    table = watch.tables()["shares"]
    assert table.columns == ["client", "attacker", "means", "parameters", "variances"]
    assert [row[1] for row in table.rows] == ["no"] * 3 + ["yes"] * 2
    assert sum(row[3] for row in table.rows[3:]) == pytest.approx(share, abs=1e-9)
    assert sum(row[3] for row in table.rows) == pytest.approx(1)
    plain = train(small_cnn(), blobs(**FIVE), 1, callbacks[:1], aggregator=rule, on_divergence="record")
    assert distance(plain, states.states[-1]) == 0
    assert not math.isnan(sum(watch.newest.values()))


def test_a_factor_for_each_message_harms_at_least_as_much_as_one_for_all():
    settings = {"aggregator": Median(pre=NNM(2)), "local_steps": 2}
    harms = []
    for per in ("model", "layer"):
        watch = AggregationDiagnostics(1)
        module = [Byzantine(ALittleIsEnough(search="byzfl"), 2, per=per), watch]
        train(small_cnn(), blobs(**FIVE), 1, module, **settings)
        harms.append(watch.newest)
    for what in ("means", "variances"):
        assert harms[1][f"byzantine/distance_{what}"] >= harms[0][f"byzantine/distance_{what}"] - 1e-12


@pytest.mark.parametrize(("rule", "zero"), [(WeightedMean(), True), (MultiKrum(1), False)])
def test_clients_of_different_size_are_no_deviation_of_a_mean(rule, zero):
    watch = AggregationDiagnostics(1)
    train(small_cnn(), blobs(5, (16, 16, 80, 16, 32)), 1, [watch], aggregator=rule)
    assert (watch.newest["byzantine/distance_parameters"] < 1e-12) is zero


def test_the_mean_of_a_rule_for_which_all_are_alike_is_unweighted():
    class Mean(RobustAggregator):
        def aggregate(self, blocks, weights=None):
            return [block.mean(0) for block in blocks]

        def shares_of_rows(self, blocks, weights=None):
            return torch.full((len(blocks[0]),), 1 / len(blocks[0]), dtype=torch.float64)

    watch = AggregationDiagnostics(1)
    train(small_cnn(), blobs(5, (16, 16, 80, 16, 32)), 1, [watch], aggregator=Mean())
    assert watch.newest["byzantine/distance_parameters"] < 1e-12


def test_attackers_beside_rounds_of_other_clients_are_remembered():
    watch = AggregationDiagnostics(1)
    settings = {"participation": 2, "on_divergence": "record"}
    train(small_cnn(), blobs(**FIVE), 6, [watch, Byzantine(Gaussian(1e6, 0), [4], "means")], **settings)
    rows = watch.tables()["shares"].rows
    assert [row[1] for row in rows] == ["no"] * (len(rows) - 1) + ["yes"]
