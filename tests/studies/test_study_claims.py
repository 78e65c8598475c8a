"""Verdicts on claims: by paired differences, at all labels that they are about, and nothing said where nothing can be."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from fl_lightning import ConfigurationError
from fl_lightning.experiments.studies import verdicts
from fl_lightning.experiments.studies.study_frame import Chosen, Verdict
from fl_lightning.experiments.studies.verdicts import Comparison, holm, paired_differences
from tests.support.study_frames import study_frame


def study(values, failed=None, **more):
    """Results of methods by E: ``{(method, E): [values of seeds 0, 1, ...]}``.

    ``failed`` has columns of a further cell of the second combination.
    """
    axes = {"method": ["BN", "GN", "FixBN"], "E": ["1", "100"], "lr": ["0.1", "0.2"]}
    rows = []
    for number, ((method, steps), own) in enumerate(values.items()):
        runs = [{"seed": seed, "phase": "done", "why": ""} for seed in range(len(own) or 1)]
        runs += [{"seed": len(own), "why": "", **failed}] if failed and number == 1 else []
        labels = {"method": method, "E": steps, "lr": "0.2" if method == "GN" else "0.1"}
        rows.append({"labels": labels, "values": {"test/accuracy": dict(enumerate(own))}, "runs": runs})
    settings = {"known": axes, "axes": axes, "choose": ["lr"], **more}
    return study_frame(rows, metrics={"test/accuracy": "test"}, **settings)


def judge(claim, found):
    """The verdict on the only claim of a study, None if this scale lacks a label of it."""
    return next(iter(verdicts.with_verdicts(found, [claim]).claims), None)


def verdict(claim, values):
    return judge(claim, study(values)).verdict


def test_pairs_by_seed_decide_where_means_alone_would_not():
    """Seeds differ by more than methods do: the differences by seed do not."""
    values = {("GN", "1"): [0.50, 0.60, 0.70], ("BN", "1"): [0.48, 0.575, 0.68]}
    assert verdict("GN > BN", values) == "holds"
    assert verdict("BN > GN", values) == "does not hold"
    assert verdict("GN > BN", {**values, ("BN", "1"): [0.68, 0.48, 0.575]}) == "undecided"


def test_the_interval_is_students():
    comparison = Comparison.of([0.1, 0.2, 0.3])
    assert comparison.mean == pytest.approx(0.2)
    assert comparison.half_width(0.1) == pytest.approx(2.919986 * 0.1 / 3**0.5, abs=1e-6)
    assert 2 * Comparison.of([0.2 * 3**0.5 / 3 * x for x in (-1, 0, 1)]).p_for == 1


def test_what_is_not_there_leaves_a_claim_undecided():
    """A method that diverges with one seed would look the better for it, and one without a learning rate is nowhere."""
    values = {("GN", "1"): [0.6, 0.61, 0.62], ("BN", "1"): [0.4, 0.41, 0.42]}
    found = study(values, failed={"phase": "failed", "directory": "runs/1-s2"})
    assert judge("GN > BN", found).verdict == judge("BN > GN", found).verdict == "undecided"
    assert judge("GN > BN", found).words == "runs/1-s2 is failed"
    choice = Chosen("lr", {"method": "BN", "E": "100"}, {}, "val/accuracy", None, {}, 1000, [], [])
    found = study({**values, ("GN", "100"): [0.6, 0.61, 0.62]}, choices=[choice])
    assert judge("GN > BN", found).words == "lr of method=BN E=100 was not chosen"
    assert judge("GN > BN at E=1", found).verdict == "holds"


def test_one_pair_says_something_only_where_it_is_far_apart():
    assert verdict("GN > BN", {("GN", "1"): [0.6], ("BN", "1"): [0.45]}) == "one pair agrees"
    assert verdict("GN > BN", {("GN", "1"): [0.5], ("BN", "1"): [0.45]}) == "undecided"
    assert verdict("GN > BN", {("GN", "1"): [0.4], ("BN", "1"): [0.55]}) == "one pair contradicts"
    assert verdict("GN ~ BN within 0.2", {("GN", "1"): [0.4], ("BN", "1"): [0.45]}) == "one pair agrees"
    assert verdict("GN ~ BN within 0.02", {("GN", "1"): [0.4], ("BN", "1"): [0.6]}) == "one pair contradicts"
    assert judge("GN > BN", study({("GN", "1"): [0.6], ("BN", "1"): [0.45]})).p is None


def test_a_difference_is_taken_in_pairs_by_seed():
    """Whatever the learning rates that were chosen; a seed without its counterpart has none."""
    values = {
        ("GN", "1"): [0.5, 0.7, 0.9],
        ("BN", "1"): [0.4, 0.65],
        ("GN", "100"): [0.3],
        ("FixBN", "1"): [0.8],
    }
    found = paired_differences(study(values, difference="GN - BN"))
    assert found.metrics == {"test/accuracy": "GN \N{MINUS SIGN} BN, test"}
    (row,) = found.rows
    assert row.labels == {"method": "GN", "E": "1", "lr": "0.2"}
    assert row.of("test/accuracy").to_dict() == pytest.approx({0: 0.1, 1: 0.05})


def test_a_claim_without_a_place_is_about_every_one():
    values = {
        ("GN", "1"): [0.6, 0.61, 0.62], ("BN", "1"): [0.4, 0.41, 0.42], ("GN", "100"): [0.5, 0.51, 0.52], ("BN", "100"): [0.7, 0.71, 0.72],
    }  # fmt: skip
    words = "2 comparisons: holds in 1, does not hold in 1; p < 0.001, < 0.001 corrected for 1 claim"
    small = pytest.approx(0)
    expected = Verdict("GN > BN", "does not hold", words, p=small, adjusted=small, family=1)
    assert judge("GN > BN", study(values)) == expected
    assert verdict("GN > BN at E=1", values) == "holds"
    assert verdict("BN > GN at E=100", values) == "holds"
    assert verdict("E=100 > E=1 at method=BN", values) == "holds"
    assert verdict("E=100 > E=1 at BN", values) == "holds"
    words, p = judge("GN > BN at E=1", study(values)).words.split("; ")
    assert words == "mean difference +0.200, interval +0.200 to +0.200, 3 pairs"
    assert p == "p < 0.001, < 0.001 corrected for 1 claim"


def test_a_chain_is_all_of_its_pairs():
    values = {("FixBN", "1"): [0.7, 0.71], ("GN", "1"): [0.6, 0.611], ("BN", "1"): [0.4, 0.41]}
    assert verdict("FixBN > GN > BN", values) == "holds"
    assert verdict("GN > FixBN > BN", values) == "does not hold"


def test_a_chain_with_a_method_that_has_no_runs_is_undecided_and_one_of_another_scale_says_nothing():
    values = {("FixBN", "1"): [0.7], ("BN", "1"): [0.5]}
    found, claim = study(values), "FixBN > BN > GN"
    assert judge(claim, found) == Verdict(claim, "undecided", "no pair of runs of BN and GN")
    assert judge(claim, replace(found, axes={**found.axes, "method": ["BN", "FixBN"]})) is None


def test_one_pair_must_be_a_tenth_apart_and_is_nothing_against_a_smaller_margin():
    assert verdict("GN > BN", {("GN", "1"): [0.6], ("BN", "1"): [0.51]}) == "undecided"
    (words,) = [judge("GN ~ BN within 0.05", study({("GN", "1"): [0.5], ("BN", "1"): [0.5]})).words]
    assert words == "difference +0.000 in one pair, which cannot confirm so small a margin"


def test_as_good_as_equal_is_a_claim_with_a_margin():
    values = {
        ("FixBN", "1"): [0.60, 0.61, 0.62],
        ("GN", "1"): [0.601, 0.609, 0.621],
        ("BN", "1"): [0.4, 0.4, 0.4],
    }
    assert verdict("FixBN ~ GN within 0.02", values) == "holds"
    assert verdict("FixBN ~ BN within 0.02", values) == "does not hold"
    assert verdict("FixBN ~ GN within 0.001", values) == "undecided"


def test_numbers_that_are_missing_or_none_decide_nothing():
    assert verdict("GN > BN", {("GN", "1"): [0.5, float("nan")], ("BN", "1"): [0.1, 0.1]}) == "undecided"
    assert verdict("GN > BN", {("GN", "1"): [], ("BN", "1"): [0.1]}) == "undecided"
    found = judge("GN > BN", study({("GN", "1"): [0.5, 0.5], ("BN", "1"): [0.1, float("inf")]}))
    assert found.verdict == "undecided"
    assert found.words == "method=BN E=1 lr=0.1 has no finite number with seed 1"
    failed = {"phase": "failed", "directory": "runs/1-s2", "diverged": True}
    values = {("GN", "1"): [0.6], ("BN", "1"): [0.4]}
    assert judge("GN > BN", study(values, failed)).words == "runs/1-s2 diverged"
    assert judge("GN > BN", study({("GN", "1"): [0.5]})).words == "no pair of runs of GN and BN"


@pytest.mark.parametrize(
    "claim",
    [
        "GN",
        "GN > LN",
        "GN > BN at E=7",
        "GN ~ BN",
        "GN > BN within 0.1",
        "GN ~ BN within x",
        "GN ~ BN within 0",
        "E=1 > GN > 1.5",
    ],
)
def test_a_claim_that_cannot_be_read_is_refused(claim):
    with pytest.raises(ConfigurationError, match="claims: "):
        judge(claim, study({("GN", "1"): [0.5], ("BN", "1"): [0.1]}))


def test_holm_corrects_the_smallest_most_and_stops_at_the_first_that_fails():
    """The adjusted p-values are those of R's ``p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")``."""
    adjusted, levels = zip(*holm([0.01, 0.04, 0.03, 0.005], error=0.05), strict=True)
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert levels == pytest.approx([0.05 / 3, 0.05 / 2, 0.05 / 2, 0.05 / 4])
    for p in np.random.default_rng(0).random((200, 4)) ** 3:
        assert [value <= level for value, (_, level) in zip(p, holm(p), strict=True)] == [
            value <= verdicts.FAMILY_ERROR for value, _ in holm(p)
        ]


def test_claims_of_a_table_are_corrected_together_and_headline_claims_alone():
    """An undecided claim names the smallest difference that its seeds decide: just above it they do."""
    spread = [0.02, -0.01, 0.0, 0.01, -0.02]
    values = {
        ("BN", "1"): [0.5] * 5,
        ("GN", "1"): [0.522 + x for x in spread],
        ("FixBN", "1"): [0.6 + x for x in spread],
    }
    claims = ["GN > BN", "FixBN > BN", "GN ~ BN within 0.1"]
    alone = verdicts.with_verdicts(study(values), ["GN > BN"]).claims
    assert alone[0].verdict == "holds"
    corrected = verdicts.with_verdicts(study(values), [*claims, "FixBN ~ BN within 0.1"]).claims
    assert [x.verdict for x in corrected] == ["undecided", "holds", "holds", "undecided"]
    assert {x.family for x in corrected} == {4}
    assert corrected[0].p == alone[0].p == pytest.approx(ttest_1samp([0.022 + x for x in spread], 0).pvalue)
    assert corrected[0].adjusted == pytest.approx(2 * alone[0].p)
    headline = verdicts.with_verdicts(study(values), [*claims, "FixBN ~ BN within 0.1"], ["GN > BN"]).claims
    assert headline[0].verdict == "holds"
    assert [x.headline for x in headline] == [True, False, False, False]
    fewer = study({key: own[:4] for key, own in values.items()})
    assert not any(x.headline for x in verdicts.with_verdicts(fewer, claims, ["GN > BN"]).claims)
    smallest = corrected[0].decides
    assert f"these seeds can decide a difference of {smallest:.3f} or more" in corrected[0].words
    for factor, decided in ((0.99, "undecided"), (1.01, "holds")):
        values["GN", "1"] = [0.5 + factor * smallest + x for x in spread]
        every = [*claims[:2], "GN ~ BN within 0.5", "FixBN ~ BN within 0.1"]
        found = verdicts.with_verdicts(study(values), every).claims
        assert found[0].verdict == decided


def simulated(paired_differences, studies):
    """Verdicts on three claims of studies with five seeds, cells of deviation 1 around the means."""
    random, claims = np.random.default_rng(7), ["FixBN > BN", "FixBN > GN", "GN > BN"]
    for _ in range(studies):
        cells = random.normal(size=(3, 5)) + paired_differences * np.arange(3)[:, None]
        values = {
            (method, "1"): own.tolist() for method, own in zip(("BN", "GN", "FixBN"), cells, strict=True)
        }
        yield [x.verdict for x in verdicts.with_verdicts(study(values), claims, claims).claims]


@pytest.mark.slow
def test_without_any_difference_at_most_a_tenth_of_the_studies_have_a_wrong_verdict():
    """Of 400 studies; without Holm's correction it is more than a tenth."""
    wrong = sum({*study} != {"undecided"} for study in simulated(0, studies=400))
    assert 8 <= wrong <= 40  # far fewer would mean that nothing is ever decided


def test_differences_of_four_deviations_are_decided_rightly():
    kinds = [kind for study in simulated(4, studies=40) for kind in study]
    assert kinds.count("holds") >= 0.7 * len(kinds)
    assert "does not hold" not in kinds


OF_359 = np.arange(360, dtype=np.float32) / 359
"""Accuracies on 359 samples, as a run logs them."""


@pytest.mark.parametrize(
    "differences",
    [[0.2, 0.2], [0.3 - 0.1, 0.4 - 0.2], [float(OF_359[x + 72]) - float(OF_359[x]) for x in (118, 252)]],
)
def test_two_equal_differences_are_one_pair_since_rounded_values_tie(differences):
    assert Comparison.of(differences).kind(0.05) == "one pair agrees"
    assert Comparison.of([0.2, 0.2001]).kind(0.05) == "holds"


@pytest.mark.parametrize(
    ("metrics", "apart"),
    [
        (("test/own_accuracy", None), True),
        ((None, "test/pooled_accuracy"), True),
        (("test/own_accuracy", "test/client_accuracy"), False),
        (("test/personal_accuracy", None), False),
    ],
)
def test_a_claim_about_different_samples_is_not_tested(metrics, apart):
    """The server's test data and the clients' own are different samples."""
    rows = [
        {
            "labels": {"method": name},
            "metric": metric,
            "values": {"test/accuracy": dict.fromkeys(range(5), 0.5 + 0.1 * place)},
            "runs": [{"seed": seed, "phase": "done", "why": "", "metric": metric} for seed in range(5)],
        }
        for place, (name, metric) in enumerate(zip(("A", "B"), metrics, strict=True))
    ]
    frame = study_frame(rows, {"method": ["A", "B"]}, {"test/accuracy": "accuracy"})
    (claim,) = verdicts.with_verdicts(frame, ["B > A"]).claims
    assert (claim.verdict == "undecided") == apart
    assert ("measured on different samples" in claim.words) == apart
