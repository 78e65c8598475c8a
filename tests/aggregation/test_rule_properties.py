"""What every rule must hold, for many numbers of clients: symmetries, unanimity, limits, bad rows, weights as repetition."""

from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

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
    median,
    weighted_mean,
)

TAU, ITERATIONS = 3.0, 3
WEIGHTED = {"weighting": "weighted", "max_weight": torch.inf}
COORDINATE_RULES = {
    "median": lambda f: Median(),
    "weighted median": lambda f: Median(**WEIGHTED),
    "trimmed mean": TrimmedMean,
    "weighted trimmed mean": partial(TrimmedMean, **WEIGHTED),
    "mean around median": MeanAroundMedian,
}
RULES = {
    **COORDINATE_RULES,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "geometric median": lambda f: GeometricMedian(),
    "weighted geometric median": lambda f: GeometricMedian(**WEIGHTED),
    "clipping": lambda f: CenteredClipping(TAU, ITERATIONS),
    "nnm trimmed mean": lambda f: TrimmedMean(f, NNM()),
    "nnm median": lambda f: Median(f, NNM()),
    "weighted nnm median": lambda f: Median(f, NNM(), **WEIGHTED),
    "nnm clipping": lambda f: CenteredClipping(TAU, ITERATIONS, f, NNM()),
}
EVERY_RULE = pytest.mark.parametrize("name", RULES)
DTYPES = st.sampled_from([torch.float32, torch.float64])
few = settings(max_examples=8, deadline=None, derandomize=True, database=None)


@st.composite
def clients(draw, most=100):
    """Rows [n, 5] without ties, f below n/2, and a generator for more."""
    n = draw(st.integers(3, most))
    f = draw(st.integers(0, (n - 1) // 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    rows = torch.randn(n, 5, generator=generator, dtype=torch.float64).to(draw(DTYPES))
    return rows, f, generator


def close(found, expected, factor=1.0):
    tolerance = factor * (1e-5 if found.dtype == torch.float32 else 1e-10)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance)


def alike(rows):
    return torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)


@EVERY_RULE
@given(case=clients())
@few
def test_order_and_place_of_the_clients_do_not_matter(name, case):
    rows, f, generator = case
    assume(name != "krum" or (len(rows), f) != (3, 1))  # two nearest neighbours have equal scores
    rule, weights = RULES[name](f), alike(rows)
    expected = rule(rows, weights)
    order = torch.randperm(len(rows), generator=generator)
    close(rule(rows[order], weights), expected)
    shift = 10 * torch.randn(5, generator=generator).to(rows.dtype)
    close(rule(rows + shift, weights), expected + shift, factor=10)
    if "clipping" not in name:
        close(rule(rows * 8, weights), expected * 8)


@EVERY_RULE
@given(case=clients())
@few
def test_what_all_but_f_clients_send_is_the_result(name, case):
    rows, f, _ = case
    rows[f:] = rows[-1].clone()
    rows[:f] *= 1e3
    moved = RULES[name](f)(rows, alike(rows)) - rows[-1]
    if "clipping" in name:
        assert float(moved.norm()) <= ITERATIONS * TAU * f / len(rows) + 1e-6
    elif "geometric" in name:
        close(moved, torch.zeros(5))
    else:
        assert not moved.any()


@given(case=clients())
@few
def test_without_byzantine_clients_they_are_the_mean(case):
    rows, _, _ = case
    mean = rows.double().mean(0)
    clipping = CenteredClipping(torch.inf)
    everything = Median(0, Bucketing(len(rows)))
    for rule in (TrimmedMean(0), MeanAroundMedian(0), MultiKrum(0), clipping, everything):
        close(rule(rows), mean)
    for rule in RULES.values():
        mixed = rule(0)
        mixed.pre, mixed._f_of_pre = NNM(0), 0
        close(mixed(rows, alike(rows)), mean)
    close(CenteredClipping(1e-12)(rows), median(rows))
    assert float((median(rows) - mean).abs().max()) > 1e-4


BAD = {
    "nan": lambda rows: rows * torch.nan,
    "one nan": lambda rows: torch.cat([rows[:, :1] * torch.nan, rows[:, 1:]], 1),
    "inf": lambda rows: rows.sign() * torch.inf,
    "zero": torch.zeros_like,
    "huge": lambda rows: rows * 1e30,
    "negative": lambda rows: rows * -1e30,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", [*RULES, "bucketing"])
@given(case=clients(40))
@few
def test_bad_rows_never_reach_a_result(name, bad, case):
    rows, f, _ = case
    if name == "bucketing":
        f = min(f, (-(-len(rows) // 2) - 1) // 2)
        rule = MeanAroundMedian(f, Bucketing(2))
    else:
        rule = RULES[name](f)
    rows += 100
    honest = rows[f:].clone()
    rows[:f] = bad(rows[:f])
    result = rule(rows, alike(rows))
    assert bool(result.isfinite().all())
    slack = 1e-4 + (ITERATIONS * TAU * f / len(rows) if "clipping" in name else 0)
    if "geometric" in name:
        radius = (honest - honest.mean(0)).norm(dim=1).max()
        assert (
            float((result - honest.mean(0)).norm()) <= 2 * len(honest) / (len(rows) - 2 * f) * radius + 1e-4
        )
    else:
        assert bool((result >= honest.amin(0) - slack).all())
        assert bool((result <= honest.amax(0) + slack).all())


def test_bad_rows_reach_a_mean():
    rows = torch.randn(10, 5)
    rows[0] = 1e6
    assert float(TrimmedMean(0)(rows).min()) > 1e4


@given(case=clients(20), weights=st.lists(st.integers(1, 4), min_size=20, max_size=20))
@few
def test_a_client_of_weight_two_is_two_clients(case, weights):
    rows, f, generator = case
    counts = torch.tensor(weights[: len(rows)])
    weights = counts.double() / counts.sum()
    repeated = rows.repeat_interleave(counts, 0)
    order = torch.randperm(len(rows), generator=generator)

    def check(rule, expected, factor=1.0):
        close(rule(rows, weights), expected, factor)
        close(rule(rows, 7.3 * weights), expected, factor)
        close(rule(rows[order], weights[order]), expected, factor)

    check(Median(**WEIGHTED), median(repeated))
    check(GeometricMedian(**WEIGHTED), GeometricMedian()(repeated), 100)
    byzantine = int(counts.topk(f).values.sum())
    assume(2 * byzantine < len(repeated))
    check(TrimmedMean(f, **WEIGHTED), TrimmedMean(byzantine)(repeated))
    mixed = NNM()([repeated], byzantine)[0]
    close(NNM().mix([rows], f, weights).blocks[0].repeat_interleave(counts, 0), mixed)
    check(TrimmedMean(f, NNM(), **WEIGHTED), TrimmedMean(byzantine)(mixed))
    check(TrimmedMean(0, **WEIGHTED), weighted_mean(rows, weights))


@EVERY_RULE
@given(case=clients(30))
@few
def test_shares_are_those_with_which_the_clients_are_mixed(name, case):
    rows, f, generator = case
    weights = torch.rand(len(rows), generator=generator, dtype=torch.float64) + 1
    rule = RULES[name](f)
    if f and rule.weighting == "weighted":
        assume(float(weights.topk(f).values.sum() / weights.sum()) < 0.5)
    shares = rule.shares([rows[:, :2], rows[:, 2:]], weights)
    assert shares.dtype == torch.float64
    assert bool((shares >= 0).all())
    if name in COORDINATE_RULES:  # the mean over the columns
        close(torch.stack([rule.shares([column], weights) for column in rows.split(1, 1)]).mean(0), shares)
    rows = rows[:, :1]
    shares = rule.shares([rows], weights)
    found = shares.to(rows.dtype) @ rows
    if "clipping" in name:
        start = rows if rule.pre is None else rule.pre([rows], f)[0]
        found += (1 - float(shares.sum())) * median(start)
    else:
        close(shares.sum(), torch.ones(()))
    close(found, rule(rows, weights), 10)
