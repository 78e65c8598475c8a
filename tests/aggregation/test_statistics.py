"""Statistics by a rule: exact with means, robust in both wire forms of FBN, and never out of the domain of variances."""

import pytest
import torch

from fl_lightning import ConfigurationError, FederatedModule
from fl_lightning.aggregation import (
    NNM,
    GeometricMedian,
    Krum,
    LayerStatistics,
    Median,
    StatisticsAggregator,
    TrimmedMean,
    WeightedMean,
    median,
)
from fl_lightning.attacks import NonFinite, SignFlip
from fl_lightning.callbacks import FBN, Byzantine, FixBN, MomentMatching
from tests.support.helpers import blobs, distance, small_cnn, train

UNIFORM = torch.full((10,), 0.1, dtype=torch.float64)


def statistics(n=10, d=6, seed=0, between=1.0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(n, d, generator=generator, dtype=torch.float64) * 2
    variances = torch.rand(n, d, generator=generator, dtype=torch.float64) + 0.1
    return LayerStatistics(means, variances, torch.full((n,), 1 / n, dtype=torch.float64), between)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("domain", [None, "variance", "second_moment"])
@pytest.mark.parametrize("between", [1.0, 11.3])
def test_with_the_mean_every_linear_domain_gives_the_law_of_total_variance(domain, between):
    sent = statistics(between=between)
    ((mean, variance),) = StatisticsAggregator(WeightedMean(), domain)([sent])
    close(mean, sent.means.mean(0))
    close(variance, sent.variances.mean(0) + between * sent.means.var(0, correction=0))


def test_the_logarithm_gives_the_geometric_mean_and_the_median_of_an_odd_number():
    values = torch.tensor([1.0, 1, 1, 1, 4])[:, None]
    sent = LayerStatistics(torch.zeros(5, 1), values, torch.full((5,), 0.2))
    assert StatisticsAggregator(WeightedMean(), "log_variance")([sent])[0][1].item() == pytest.approx(4**0.2)
    assert StatisticsAggregator(Median(), "log_variance")([sent])[0][1].item() == pytest.approx(1)
    odd = statistics(n=9)._replace(between=0.0)
    plain, logarithm = (StatisticsAggregator(Median(), domain)([odd])[0] for domain in (None, "log_variance"))
    close(logarithm[1], plain[1])


def test_both_averages_are_replaced_by_the_rule():
    sent = statistics(between=10.0)
    rule = TrimmedMean(3, NNM())
    ((mean, variance),) = StatisticsAggregator(rule)([sent])
    close(mean, rule(sent.means))
    close(variance, rule(sent.variances) + 10 * rule((sent.means - mean) ** 2))


def test_a_layer_is_a_vector_of_its_own_unless_the_rule_says_otherwise():
    layers = [statistics(seed=1, between=2.0), statistics(d=3, seed=2, between=3.0)]
    rule = Krum(3)
    apart = StatisticsAggregator(rule)(layers)
    for found, layer in zip(apart, layers, strict=True):
        close(found[0], rule(layer.means))
    whole = StatisticsAggregator(Krum(3, per="model"))(layers)
    close(torch.cat([mean for mean, _ in whole]), rule(torch.cat([layer.means for layer in layers], 1)))
    assert any(bool((one[0] != two[0]).any()) for one, two in zip(apart, whole, strict=True))
    means = [StatisticsAggregator(WeightedMean())([layer])[0][1] for layer in layers]
    for found, expected in zip(StatisticsAggregator(WeightedMean())(layers), means, strict=True):
        close(found[1], expected)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(3), Median(pre=NNM(3)), TrimmedMean(3, NNM())])
@pytest.mark.parametrize("between", [1.0, 10.0])
def test_second_moments_of_valid_clients_give_a_variance_without_any_clamp(rule, between):
    for seed in range(200):
        aggregator = StatisticsAggregator(rule, "second_moment")
        sent = statistics(seed=seed, between=between)
        extreme = sent.means * torch.tensor([1.0] * 7 + [-9.0, 1e3, 1e-3], dtype=torch.float64)[:, None]
        ((_, variance),) = aggregator([sent._replace(means=extreme)])
        assert bool((variance >= 0).all())
        assert aggregator.counts()["statistics/clamped"] == 0


@pytest.mark.parametrize("value", [-1.0, torch.nan, torch.inf])
def test_what_is_no_statistic_is_left_out_and_counted(value):
    sent = statistics()
    sent.variances[[2, 5, 8]] = value
    honest = [row for row in range(10) if row not in (2, 5, 8)]
    for domain in ("variance", "log_variance", "second_moment"):
        aggregator = StatisticsAggregator(GeometricMedian(), domain)
        ((mean, variance),) = aggregator([sent])
        assert aggregator.counts() == {"statistics/invalid": 3, "statistics/clamped": 0}
        assert aggregator.counts()["statistics/invalid"] == 0
        if domain != "second_moment":
            close(mean, GeometricMedian()(sent.means[honest]))
        assert bool((variance > 0).all())


@pytest.mark.parametrize("domain", ["variance", "second_moment"])
def test_a_mean_leaves_out_what_is_no_statistic(domain):
    sent = statistics(n=5)
    whole = StatisticsAggregator(WeightedMean(), domain)(
        [
            sent._replace(
                means=sent.means[1:], variances=sent.variances[1:], weights=torch.full((4,), 0.25).double()
            )
        ]
    )
    sent.variances[0, 3] = -5
    for found, expected in zip(
        StatisticsAggregator(WeightedMean(), domain)([sent])[0], whole[0], strict=True
    ):
        close(found, expected)


def test_a_negative_variance_is_clamped_and_counted_where_a_rule_is_robust():
    sent = LayerStatistics(
        torch.zeros(3, 2), torch.tensor([[-1.0, 1], [-2, 1], [-3, 1]]), torch.full((3,), 1 / 3)
    )
    robust, plain = StatisticsAggregator(Median()), StatisticsAggregator(WeightedMean())
    assert robust([sent])[0][1].tolist() == [0, 1]
    assert robust.counts()["statistics/clamped"] == 1
    assert plain([sent])[0][1][0] == pytest.approx(-2)


def test_second_moments_are_refused_where_nothing_is_added_between_clients():
    with pytest.raises(
        ConfigurationError,
        match=r"second_moment needs a method that adds the variance between clients, such as FBN",
    ):
        StatisticsAggregator(Median(), "second_moment")([statistics(between=0.0)])


@pytest.mark.parametrize(
    ("setting", "choices"),
    [
        ({"statistics_domain": "log"}, "statistics_domain: 'log' must be one of variance, log_variance"),
        ({"weighting": "size"}, "weighting: 'size' must be one of examples, uniform, samples"),
        ({"on_divergence": None}, "on_divergence: None must be one of error, record, drop"),
    ],
)
def test_a_wrong_choice_is_refused_in_python_too(setting, choices):
    with pytest.raises(ConfigurationError, match=rf"^FederatedModule\.{choices}"):
        FederatedModule(small_cnn(), **setting)


class PassingOn(Krum):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class WithoutTypes(FBN):
    def __init__(self, wire="run"):
        super().__init__(wire)


class Misspelt(FixBN):
    def __init__(self):
        super().__init__(freeze="affin")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PassingOn(1, score="paper"), "PassingOn.score: 'paper' must be one of byzfl, blanchard"),
        (lambda: PassingOn(1, None, "block"), "PassingOn.per: 'block' must be one of model, layer"),
        (lambda: WithoutTypes("bach"), "WithoutTypes.wire: 'bach' must be one of run, batch"),
        (Misspelt, "Misspelt.freeze: 'affin' must be one of statistics, affine, both"),
        (
            lambda: StatisticsAggregator(Median(), "log"),
            "StatisticsAggregator.domain: 'log' must be one of variance, log_variance, second_moment",
        ),
    ],
)
def test_a_wrong_choice_is_refused_in_a_subclass_with_arguments_of_its_own(make, message):
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert str(refused.value) == message
    assert PassingOn(1, score="blanchard", per=None).score == "blanchard"


TEN = {"num_clients": 10, "sizes": (16,)}


@pytest.mark.parametrize("method", [None, FBN, MomentMatching])
def test_parameters_and_statistics_have_rules_of_their_own(method):
    def trained(**settings):
        return train(small_cnn(), blobs(**TEN), 1, [method()] if method else [], local_steps=1, **settings)

    mean, robust = trained(), trained(statistics_aggregator=Median())
    both, parameters = (
        trained(aggregator=Median()),
        trained(aggregator=Median(), statistics_aggregator=WeightedMean()),
    )
    of = {True: [n for n in mean if "running" in n], False: [n for n in mean if "running" not in n]}
    assert [distance({n: a[n] for n in of[s]}, {n: b[n] for n in of[s]}) == 0 for a, b, s in (
        (robust, mean, False), (robust, both, True), (parameters, both, False), (parameters, mean, True),
        (robust, mean, True), (parameters, mean, False),
    )] == [True] * 4 + [False] * 2  # fmt: skip


@pytest.mark.parametrize("domain", [None, "variance", "second_moment"])
def test_both_wire_forms_are_equal_for_honest_clients_and_a_mean(domain):
    states = [
        train(small_cnn(), blobs(**TEN), 4, [FBN(wire)], statistics_domain=domain)
        for wire in ("run", "batch")
    ]
    assert distance(*states) < 1e-12
    assert distance(states[0], train(small_cnn(), blobs(**TEN), 4, [FBN()])) < 1e-12


@pytest.mark.parametrize("wire", ["run", "batch"])
@pytest.mark.parametrize("domain", [None, "variance", "log_variance", "second_moment"])
@pytest.mark.parametrize("attack", [SignFlip(), NonFinite()], ids=["sign flip", "NaN"])
def test_attackers_of_statistics_do_not_reach_a_defended_run(wire, domain, attack):
    def trained(defence, attackers):
        callbacks = [FBN(wire), Byzantine(attack, attackers, "statistics")]
        return train(
            small_cnn(), blobs(**TEN), 12, callbacks, on_divergence="record", statistics_aggregator=defence,
            statistics_domain=domain if defence else None,
        )  # fmt: skip

    honest, attacked = trained(TrimmedMean(3, NNM()), []), trained(TrimmedMean(3, NNM()), 3)
    clean, undefended = trained(None, []), trained(None, 3)
    names = [name for name in clean if "running" in name]

    def apart(one, two):
        return max(float((one[name] - two[name]).norm()) for name in names)

    assert all(bool(attacked[name].isfinite().all()) for name in attacked)
    assert not apart(undefended, clean) < 1.3 * apart(attacked, honest)
    assert all(bool((attacked[name] >= 0).all()) for name in names if name.endswith("var"))


def test_the_run_form_amplifies_a_lie_about_means_to_the_fixed_point_of_the_equations():
    """Three of ten clients send the opposite of the honest mean, of data with mean 1 and variance 1 (beta = 0.1)."""
    beta, m, v = 0.1, 1.0, 1.0
    plain, robust = StatisticsAggregator(WeightedMean()), StatisticsAggregator(Median(pre=NNM(3)))
    reached = {}
    for name, aggregator, lies, weight in (
        ("run, means", plain, "m", beta), ("run, both", plain, "mv", beta),
        ("batch, means", plain, "m", 1.0), ("batch, both", plain, "mv", 1.0),
        ("defended", robust, "mv", beta),
    ):  # fmt: skip
        m, v = 1.0, 1.0
        for _ in range(400):
            mean, variance = m + weight * (1 - m), v + weight * (1 - v)
            means, variances = torch.full((10, 1), mean).double(), torch.full((10, 1), variance).double()
            means[7:] *= -1
            if "v" in lies:
                variances[7:] *= -1
            ((mean_, variance_),) = aggregator([LayerStatistics(means, variances, UNIFORM, 1 / weight)])
            m += beta / weight * (float(mean_) - m)
            v += beta / weight * (float(variance_) - v)
        reached[name] = [round(m, 4), round(v, 3)]
    assert reached == {
        "run, means": [0.0625, 3.051], "run, both": [0.0625, 0.383],
        "batch, means": [0.4, 1.84], "batch, both": [0.4, 1.24], "defended": [1, 1],
    }  # fmt: skip


def test_the_median_is_the_rule_that_it_was():
    sent = statistics(between=0.0)
    close(StatisticsAggregator(Median())([sent])[0][1], median(sent.variances))


def test_second_moments_keep_their_digits_where_means_are_large():
    sent = statistics(between=10.0)
    shifted = sent._replace(
        means=(sent.means + 3e3).float(), variances=sent.variances.float(), weights=sent.weights.float()
    )
    for rule in (WeightedMean(), Median(pre=NNM(3)), TrimmedMean(3)):
        ((_, variance),) = StatisticsAggregator(rule, "second_moment")([sent])
        ((_, found),) = StatisticsAggregator(rule, "second_moment")([shifted])
        torch.testing.assert_close(found.double(), variance, rtol=5e-3, atol=0)


def test_logarithms_take_the_term_between_clients_too():
    sent = statistics(n=9, between=10.0)
    ((mean, variance),) = StatisticsAggregator(Median(), "log_variance")([sent])
    close(variance, median(sent.variances) + 10 * median((sent.means - mean) ** 2))


@pytest.mark.parametrize("value", [-1.0, torch.nan])
def test_an_invalid_variance_takes_its_mean_with_it(value):
    sent = statistics(n=5, between=0.0)
    sent.means[0] = 1e6
    sent.variances[0, 2] = value
    ((mean, _),) = StatisticsAggregator(WeightedMean(), "variance")([sent])
    close(mean, sent.means[1:].mean(0))


def test_one_vector_for_all_layers_keeps_each_layers_factor_on_the_term_between():
    layers = [
        statistics(seed=1, between=2.0),
        statistics(d=3, seed=2, between=torch.tensor([3.0, 4, 5]).double()),
    ]
    whole = StatisticsAggregator(Median(per="model"))(layers)
    for found, layer in zip(whole, layers, strict=True):
        close(found[1], StatisticsAggregator(Median())([layer])[0][1])
