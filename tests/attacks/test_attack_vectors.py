"""Attacks on messages: numbers computed by hand, laws, ByzFL's own, and the searches for the factor that harms most."""

import math

import pytest
import torch

from benchmarks.aggregation import part_of_byzfl
from fl_lightning import ConfigurationError, attacks
from fl_lightning.aggregation import NNM, Median, TrimmedMean, WeightedMean
from fl_lightning.attacks import (
    ALittleIsEnough,
    FallOfEmpires,
    Gaussian,
    Message,
    Mimic,
    ModelReplacement,
    NonFinite,
    SignFlip,
    a_little_is_enough,
    fall_of_empires,
    sign_flip,
)
from fl_lightning.attacks.search import search
from fl_lightning.attacks.vectors import a_little_factor

BYZFL = pytest.mark.skipif(part_of_byzfl("attacks") is None, reason="byzfl is not installed")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def normal(n, d=23, seed=0, dtype=torch.float64):
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (rows * torch.arange(1, d + 1) + 0.5).to(dtype)


def message(rule=None, h=7, f=3, **kwargs):
    return Message(
        normal(h, **kwargs), normal(f, seed=1, **kwargs), torch.full((h + f,), 1 / (h + f)), rule or Median()
    )


def test_values_computed_by_hand():
    honest = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 8.0]])
    assert sign_flip(honest).tolist() == [-3, -4]
    assert fall_of_empires(honest).tolist() == [-6, -8]
    assert fall_of_empires(honest, 0.5).tolist() == [-1.5, -2]
    assert a_little_is_enough(honest, 2).tolist() == [7, 12]  # deviations 2 and 4 with h - 1
    assert a_little_is_enough(honest, -1, ddof=0).tolist() == pytest.approx(
        [3 - math.sqrt(8 / 3), 4 - math.sqrt(32 / 3)]
    )
    sent = Message(honest, honest[:1], torch.full((4,), 1 / 4), Median())
    for client in (1, 4):
        assert Mimic(client).messages([sent])[0].tolist() == [3, 4]
    assert a_little_factor(10, 3) == pytest.approx(0.180, abs=5e-4)
    assert a_little_factor(50, 24) == pytest.approx(1.426, abs=5e-4)


@TYPES
def test_laws_that_hold_between_attacks(dtype):
    honest, shift = normal(8, dtype=dtype), torch.arange(23, dtype=dtype)
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    mean = honest.mean(0)
    torch.testing.assert_close(fall_of_empires(honest, -1), mean, **close)
    torch.testing.assert_close(a_little_is_enough(honest, 0), mean, **close)
    torch.testing.assert_close(fall_of_empires(honest, 1), sign_flip(honest), **close)
    moved = a_little_is_enough(honest + shift)
    torch.testing.assert_close(moved, a_little_is_enough(honest) + shift, **close)
    assert float((fall_of_empires(honest + shift) - fall_of_empires(honest) - shift).abs().max()) > 1
    for attack in (sign_flip, fall_of_empires, a_little_is_enough):
        torch.testing.assert_close(attack(honest.flip(0)), attack(honest), **close)


def test_fewer_honest_clients_than_a_deviation_needs_are_refused():
    with pytest.raises(
        ConfigurationError, match="1 honest clients have no standard deviation with ddof=1; it needs 2"
    ):
        a_little_is_enough(normal(1))
    assert a_little_is_enough(normal(1), ddof=0).isfinite().all()


def test_origins_differ_as_they_say():
    one = message()
    mean, deviation = one.honest.mean(0), one.honest.std(0)
    (byzfl,) = ALittleIsEnough().messages([one])
    (blades,) = ALittleIsEnough(origin="blades").messages([one])
    (paper,) = ALittleIsEnough(origin="paper").messages([one])
    torch.testing.assert_close(byzfl, mean + 1.5 * deviation)
    torch.testing.assert_close(blades, mean + a_little_factor(10, 3) * deviation)
    torch.testing.assert_close(paper, one.own.mean(0) - 1.5 * one.own.std(0, correction=0))
    factors = {
        origin: FallOfEmpires(origin=origin).messages([one])[0] / mean
        for origin in ("byzfl", "blades", "paper")
    }
    assert {origin: round(float(found[0]), 6) for origin, found in factors.items()} == {
        "byzfl": -2,
        "blades": -1,
        "paper": -0.1,
    }


def test_others_send_what_their_names_say():
    one = message()
    assert torch.equal(SignFlip().messages([one])[0], -one.honest.mean(0))
    assert torch.equal(Mimic(2).messages([one])[0], one.honest[2])
    assert torch.equal(ModelReplacement(4).messages([one])[0], 4 * one.own)
    assert NonFinite("inf").messages([one])[0].isinf().all()
    torch.manual_seed(0)
    drawn = Gaussian(3.0, 2.0).messages([message(d=10_000)])[0]
    assert drawn.shape == (3, 10_000)
    assert drawn.mean() == pytest.approx(3, abs=0.05)
    assert drawn.std() == pytest.approx(2, abs=0.05)
    assert not torch.equal(drawn[0], drawn[1])


def test_the_search_finds_what_a_curve_of_one_top_has():
    asked = []

    def harm(factor):
        asked.append(factor)
        return -abs(factor - 13)

    # 10 is better, 30 worse; steps of 20 x 0.8, 0.8 ** 2, ... from 10 upwards, of which the sixth is the first to be better
    found = search(harm)
    assert len(asked) == 20
    assert asked[:4] == [0, 10, 30, 26]
    assert found == pytest.approx(10 + 20 * 0.8**6)
    assert search(lambda factor: -factor) == 0
    assert search(lambda factor: math.nan if factor > 5 else factor) <= 5


@pytest.mark.parametrize("attack", [FallOfEmpires, ALittleIsEnough])
@pytest.mark.parametrize("rule", [Median(pre=NNM(3)), TrimmedMean(3, NNM())], ids=["median", "trimmed mean"])
def test_a_searched_factor_harms_and_is_one_for_all_messages(attack, rule):
    messages = [message(rule, d=5), message(rule, d=9)]

    def harm(sent):
        moved = [m.aggregate(vector) - m.honest.mean(0) for m, vector in zip(messages, sent, strict=True)]
        return float(torch.cat(moved).norm())

    found = attack(search="byzfl").messages(messages)
    assert harm(found) >= harm(
        [m.honest.mean(0) if attack is ALittleIsEnough else 0 * m.honest[0] for m in messages]
    )
    factors = set()
    for one, vector in zip(messages, found, strict=True):
        mean = one.honest.mean(0)
        scale = one.honest.std(0) if attack is ALittleIsEnough else -mean
        base = mean if attack is ALittleIsEnough else 0
        factors |= {round(float(value), 6) for value in (vector - base) / scale}
    assert len(factors) == 1


def test_nothing_is_searched_under_a_mean_which_has_no_worst_factor():
    one = message(WeightedMean())
    assert torch.equal(FallOfEmpires(search="byzfl").messages([one])[0], fall_of_empires(one.honest))


@BYZFL
@TYPES
@pytest.mark.parametrize("n", [3, 10, 41])
def test_vectors_are_those_of_byzfl(n, dtype):
    theirs = part_of_byzfl("attacks")
    honest = normal(n, dtype=dtype)
    for ours, their in (
        (sign_flip(honest), theirs.SignFlipping()),
        (fall_of_empires(honest), theirs.InnerProductManipulation()),
        (a_little_is_enough(honest), theirs.ALittleIsEnough()),
        (honest[1], theirs.Mimic(epsilon=1)),
    ):
        torch.testing.assert_close(
            ours, torch.as_tensor(their(honest.double().numpy())).to(dtype), rtol=1e-5, atol=1e-5
        )


@BYZFL
@pytest.mark.parametrize("name", ["InnerProductManipulation", "ALittleIsEnough"])
@pytest.mark.parametrize("rule", ["TrMean", "Median"])
@pytest.mark.parametrize("seed", range(4))
def test_searched_vectors_are_those_of_byzfl(name, rule, seed):
    theirs, aggregators = part_of_byzfl("attacks"), part_of_byzfl("aggregators")
    f, h = 3, 7
    settings = {"f": f} if rule == "TrMean" else {}
    optimal = getattr(theirs, f"Optimal_{name}")(
        agg=getattr(aggregators, rule)(**settings), pre_agg_list=[aggregators.NNM(f)], f=f
    )
    honest = normal(h, seed=seed)
    ours = {"TrMean": TrimmedMean(f, NNM()), "Median": Median(pre=NNM(f))}[rule]
    kind = getattr(attacks, {"InnerProductManipulation": "FallOfEmpires"}.get(name, name))
    one = Message(honest, honest[:f], torch.full((h + f,), 1 / (h + f)), ours)
    torch.testing.assert_close(
        kind(search="byzfl").messages([one])[0],
        torch.as_tensor(optimal(honest.numpy())),
        rtol=1e-9,
        atol=1e-9,
    )
