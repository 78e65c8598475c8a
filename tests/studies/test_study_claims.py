"""Verdicts on claims: by paired differences, at all labels that they are about, and nothing said where nothing can be."""

import pytest

from fl_lightning import ConfigurationError
from fl_lightning.experiments.studies.claims import difference, interval, judge


def study(values, choose=()):
    """Findings of methods by E: ``{(method, E): [values of seeds 0, 1, ...]}``."""
    axes = {"method": ["BN", "GN", "FixBN"], "E": ["1", "100"], "lr": ["0.1", "0.2"]}
    groups = [
        {
            "labels": {"method": method, "E": steps, "lr": "0.2" if method == "GN" else "0.1"},
            "values": {"test/accuracy": {str(seed): value for seed, value in enumerate(own)}},
            "runs": [{"phase": "done"}],
        }
        for (method, steps), own in values.items()
    ]
    return {
        "known": axes,
        "axes": axes,
        "metrics": {"test/accuracy": "test"},
        "choose": ["lr"],
        "choices": [],
        "groups": groups,
    }


def verdict(claim, values):
    return judge(claim, study(values))["verdict"]


def test_pairs_by_seed_decide_where_means_alone_would_not():
    """Seeds differ by more than methods do: the differences by seed do not."""
    values = {("GN", "1"): [0.50, 0.60, 0.70], ("BN", "1"): [0.48, 0.575, 0.68]}
    assert verdict("GN > BN", values) == "holds"
    assert verdict("BN > GN", values) == "does not hold"
    assert verdict("GN > BN", {**values, ("BN", "1"): [0.68, 0.48, 0.575]}) == "undecided"


def test_the_interval_is_students():
    low, high = interval([0.1, 0.2, 0.3])
    assert (low, high) == pytest.approx(
        (0.2 - 2.919986 * 0.1 / 3**0.5, 0.2 + 2.919986 * 0.1 / 3**0.5), abs=1e-6
    )


def test_what_is_not_there_leaves_a_claim_undecided():
    """A method that diverges with one seed would look the better for it, and one without a learning rate is nowhere."""
    found = study({("GN", "1"): [0.6, 0.61], ("BN", "1"): [0.4, 0.41]})
    found["groups"][1]["runs"].append({"phase": "failed", "directory": "runs/1-s2"})
    assert judge("GN > BN", found)["verdict"] == judge("BN > GN", found)["verdict"] == "undecided"
    assert judge("GN > BN", found)["words"] == "runs/1-s2 is failed"
    found = study({("GN", "1"): [0.6, 0.61], ("BN", "1"): [0.4, 0.41], ("GN", "100"): [0.6, 0.61]})
    found["choices"] = [{"axis": "lr", "for": {"method": "BN", "E": "100"}, "chosen": None}]
    assert judge("GN > BN", found)["words"] == "lr of method=BN E=100 was not chosen"
    assert judge("GN > BN at E=1", found)["verdict"] == "holds"


def test_one_pair_says_something_only_where_it_is_far_apart():
    assert verdict("GN > BN", {("GN", "1"): [0.6], ("BN", "1"): [0.45]}) == "holds"
    assert verdict("GN > BN", {("GN", "1"): [0.5], ("BN", "1"): [0.45]}) == "undecided"
    assert verdict("GN > BN", {("GN", "1"): [0.4], ("BN", "1"): [0.55]}) == "does not hold"


def test_a_difference_is_taken_in_pairs_by_seed():
    """Whatever the learning rates that were chosen; a seed without its counterpart has none."""
    values = {
        ("GN", "1"): [0.5, 0.7, 0.9],
        ("BN", "1"): [0.4, 0.65],
        ("GN", "100"): [0.3],
        ("FixBN", "1"): [0.8],
    }
    found = difference(study(values) | {"difference": "GN - BN"})
    assert found["metrics"] == {"test/accuracy": "GN \N{MINUS SIGN} BN, test"}
    (group,) = found["groups"]
    assert group["labels"] == {"method": "GN", "E": "1", "lr": "0.2"}
    assert group["values"]["test/accuracy"] == pytest.approx({"0": 0.1, "1": 0.05})


def test_a_claim_without_a_place_is_about_every_one():
    values = {
        ("GN", "1"): [0.6, 0.61], ("BN", "1"): [0.4, 0.41], ("GN", "100"): [0.5, 0.51], ("BN", "100"): [0.7, 0.71],
    }  # fmt: skip
    assert judge("GN > BN", study(values)) == {
        "claim": "GN > BN",
        "verdict": "does not hold",
        "words": "1 holds; 1 does not hold",
    }
    assert verdict("GN > BN at E=1", values) == "holds"
    assert verdict("BN > GN at E=100", values) == "holds"
    assert verdict("E=100 > E=1 at method=BN", values) == "holds"
    assert verdict("E=100 > E=1 at BN", values) == "holds"
    assert judge("GN > BN at E=1", study(values))["words"] == "+0.200, +0.200 to +0.200 by 2 pairs"


def test_a_chain_is_all_of_its_pairs():
    values = {("FixBN", "1"): [0.7, 0.71], ("GN", "1"): [0.6, 0.62], ("BN", "1"): [0.4, 0.39]}
    assert verdict("FixBN > GN > BN", values) == "holds"
    assert verdict("GN > FixBN > BN", values) == "does not hold"


def test_a_chain_with_a_method_that_has_no_runs_is_undecided_and_one_of_another_scale_says_nothing():
    values = {("FixBN", "1"): [0.7], ("BN", "1"): [0.5]}
    assert judge("FixBN > BN > GN", study(values)) == {
        "claim": "FixBN > BN > GN", "verdict": "undecided", "words": "no pair of runs of BN and GN",
    }  # fmt: skip
    found = study(values)
    assert judge("FixBN > BN > GN", found | {"axes": {**found["axes"], "method": ["BN", "FixBN"]}}) is None


def test_one_pair_must_be_a_tenth_apart_and_is_nothing_against_a_smaller_margin():
    assert verdict("GN > BN", {("GN", "1"): [0.6], ("BN", "1"): [0.51]}) == "undecided"
    (words,) = [judge("GN ~ BN within 0.05", study({("GN", "1"): [0.5], ("BN", "1"): [0.5]}))["words"]]
    assert words == "+0.000 in one pair, which says nothing of so small a margin"


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
    assert found["verdict"] == "undecided"
    assert found["words"] == "method=BN E=1 lr=0.1 has no finite number with seed 1"
    failed = study({("GN", "1"): [0.6], ("BN", "1"): [0.4]})
    failed["groups"][1]["runs"].append({"phase": "failed", "directory": "runs/1-s2", "diverged": True})
    assert judge("GN > BN", failed)["words"] == "runs/1-s2 diverged"
    assert judge("GN > BN", study({("GN", "1"): [0.5]}))["words"] == "no pair of runs of GN and BN"


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
