"""Clients that count by weight, and what part each has in a result: values by hand, ties, and what is refused."""

import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.aggregation import (
    NNM,
    Bucketing,
    CenteredClipping,
    GeometricMedian,
    Krum,
    MeanAroundMedian,
    Median,
    MultiKrum,
    TrimmedMean,
    WeightedMean,
)

weighted_median = Median(weighting="weighted", max_weight=torch.inf)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(("counts", "expected"), [((1, 1, 1, 1), 1.5), ((1, 1, 2, 3), 2), ((1, 1, 1, 3), 6)])
@pytest.mark.parametrize("total", [1, 3, 7, 49])  # n_i / N ties as n_i does
def test_weighted_median_by_hand(counts, expected, total):
    rows, counts = column(0, 1, 2, 10), torch.tensor(counts, dtype=torch.float64)
    assert weighted_median(rows, counts / (total * counts.sum())) == expected


def test_a_heavy_client_is_the_geometric_median():
    weights = torch.tensor([1, 1, 3], dtype=torch.float64) / 5
    assert GeometricMedian(weighting="weighted")(column(0, 1, 2), weights) == 2


def test_clipping_leaves_out_what_is_not_finite():
    spoilt = torch.cat([torch.randn(8, 4), torch.full((1, 4), torch.nan)])
    found = CenteredClipping(1.0, 2)(spoilt)
    start, finite = spoilt.nan_to_num(torch.inf).median(0).values, spoilt[:-1]
    for _ in range(2):
        moves = finite - start
        start = start + (moves * (1 / moves.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)
    torch.testing.assert_close(found, start)


@pytest.mark.parametrize(
    ("values", "counts", "expected"),
    [
        ((0, 1, 2, 10), (1, 1, 2, 1), 2),
        ((0, 1, 2, 10), (2, 2, 3, 2), 5 / 3),  # of 1, a third is left
        ((0, 1, 2, 3, 10), (1, 1, 1, 1, 1), 2),
        ((0, 1, 2, 3, torch.nan), (1, 1, 1, 1, 1), 2),
    ],
)
def test_weighted_trimmed_mean_by_hand(values, counts, expected):
    rule = TrimmedMean(1, weighting="weighted")
    found = rule(column(*values), torch.tensor(counts, dtype=torch.float64))
    torch.testing.assert_close(found, column(expected)[0])


@pytest.mark.parametrize(
    "rule", [Median, lambda **kw: TrimmedMean(3, **kw), lambda **kw: TrimmedMean(3, NNM(), **kw)]
)
def test_attackers_with_less_than_half_of_all_weight_stay_outside(rule):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        rows = torch.randn(10, 6, generator=generator, dtype=torch.float64)
        weights = torch.rand(10, generator=generator, dtype=torch.float64) + 0.5
        rows[weights.topk(3).indices] = 1e9
        honest = rows[(rows < 1e9).all(1)]
        found = rule(weighting="weighted")(rows, weights / weights.sum())
        assert bool(((found >= honest.amin(0) - 1e-9) & (found <= honest.amax(0) + 1e-9)).all())
    assert float(WeightedMean()(rows, weights).min()) > 1e6


def test_no_client_counts_for_more_than_the_cap():
    rows = column(0, 1, 2, 10)
    weights = torch.tensor([1, 1, 1, 97], dtype=torch.float64) / 100
    assert weighted_median(rows, weights) == 10
    assert (
        Median(weighting="weighted")(rows, weights) == 10
    )  # twice the mean is 1/2; without its like, all else is 3/100
    assert Median(weighting="weighted", max_weight=1)(rows, torch.full((4,), 0.25)) == 1.5
    weights = torch.tensor([1, 1, 1, 3], dtype=torch.float64) / 6
    assert weighted_median(rows, weights) == Median(weighting="weighted")(rows, weights) == 6
    assert Median(weighting="weighted", max_weight=1.5)(rows, weights) == 2
    assert Median()(rows, weights) == 1.5


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (TrimmedMean(2, weighting="weighted"),
         ("TrimmedMean.f: the 2 heaviest rows (at positions 1, 3) have 0.667 of all weight, which must be less than half; "
          "lower f or max_weight, or use weighting: uniform")),
        (Median(pre=NNM(2), weighting="weighted"), "NNM.f: the 2 heaviest rows (at positions 1, 3) have 0.667 of all weight"),
        (GeometricMedian(2, weighting="weighted"), "GeometricMedian.f: the 2 heaviest rows"),
    ],
)  # fmt: skip
def test_clients_that_may_own_the_majority_are_refused_by_position(rule, message):
    weights = torch.tensor([1, 4, 1, 4, 2], dtype=torch.float64) / 12
    with pytest.raises(ConfigurationError) as refused:
        rule(torch.randn(5, 2), weights)
    assert str(refused.value).startswith(message)
    rule(torch.randn(5, 2), torch.full((5,), 0.2))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (WeightedMean(), (0.1, 0.3, 0.2, 0.2, 0.2)),
        (Median(), (0, 0, 1, 0, 0)),
        (TrimmedMean(1), (0, 1 / 3, 1 / 3, 1 / 3, 0)),
        (MeanAroundMedian(1), (1 / 4, 1 / 4, 1 / 4, 1 / 4, 0)),
        (Krum(1), (0, 1, 0, 0, 0)),
        (MultiKrum(1), (1 / 4, 1 / 4, 1 / 4, 1 / 4, 0)),
        (GeometricMedian(), (0, 0, 1, 0, 0)),
        (CenteredClipping(8**0.5), (0.2, 0.2, 0.2, 0.2, 0.05)),
        # mixed: 1.5, 1.5, 1.5, 1.5, 4; the third of them
        (Median(1, NNM()), (0.25, 0.25, 0.25, 0.25, 0)),
        # trimmed at 0.3 on either side: 0.1 of the second, then 0.2 and 0.1 of all
        (TrimmedMean(1, weighting="weighted"), (0, 0.25, 0.5, 0.25, 0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_by_hand(rule, expected, dtype):
    rows = column(0, 1, 2, 3, 10).to(dtype)
    weights = torch.tensor([0.1, 0.3, 0.2, 0.2, 0.2], dtype=torch.float64)
    found = rule.shares([rows, rows], weights)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)
    assert rule.shares([rows[:1]], weights[:1] / weights[:1]) == 1


def test_shares_in_the_mean_are_weights_of_float64_beside_the_rows():
    given = torch.tensor([0.25, 0.75])
    assert WeightedMean().shares([column(1, 2)], given).equal(given.double())
    assert WeightedMean().shares([column(1, 2)]).tolist() == [0.5, 0.5]
    assert WeightedMean().shares([column(1, 2).to("meta")], given).is_meta


def test_every_client_is_in_one_bucket_by_chance():
    rows = torch.eye(10, dtype=torch.float64)
    torch.manual_seed(3)
    buckets = Bucketing(3)
    (first,), (second,) = buckets([rows], 0), buckets([rows], 0)
    assert sorted((first > 0).sum(1).tolist()) == [1, 3, 3, 3]
    torch.testing.assert_close(first.sum(1), torch.ones(4, dtype=torch.float64))
    assert bool(((first > 0).sum(0) == 1).all())
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(torch.cat(Bucketing(3)([rows[:, :4], rows[:, 4:]], 0), 1), first)
    rows[2] = torch.nan
    assert int(buckets([rows], 0)[0].isnan().any(1).sum()) == 1


def test_a_bucket_counts_by_the_weight_of_its_clients():
    rows, weights = column(0, 1, 2, 3, 10), torch.tensor([0.1, 0.3, 0.2, 0.2, 0.2], dtype=torch.float64)
    mixed = Bucketing(2).mix([rows], 0, weights)
    torch.testing.assert_close(mixed.weights @ mixed.blocks[0], weights @ rows)
    torch.testing.assert_close(mixed.shares @ rows, mixed.blocks[0])
    torch.manual_seed(0)
    shares = TrimmedMean(1, Bucketing(2)).shares([rows], weights)
    torch.manual_seed(0)
    torch.testing.assert_close(shares @ rows, TrimmedMean(1, Bucketing(2))(rows))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (TrimmedMean(2, Bucketing(3)),
         "TrimmedMean.f: 2 must be less than half of a round's 4 buckets of 3; use at most 1, or at least 5 buckets of 3"),
        (Median(pre=Bucketing(2, f=3)), "Bucketing.f: 3 must be less than half of a round's 5 buckets of 2; use at most 2"),
        (Krum(1, Bucketing(4), score="blanchard"),
         "Krum.score: blanchard needs at least f + 3 = 4 buckets of 4 in a round, not 3; use byzfl"),
    ],
)  # fmt: skip
def test_a_rule_that_too_few_buckets_reach_is_refused_beforehand(rule, message):
    with pytest.raises(ConfigurationError) as refused:
        rule.check(10)
    assert str(refused.value).startswith(message)
