"""A study's values, choices and verdicts, computed once more from the ``metrics.jsonl`` and ``config.yaml`` of its runs."""

import json
from pathlib import Path
from statistics import mean

import pytest
import yaml
from scipy.stats import ttest_1samp

from tests.support.study_in_process import found, study, write

RATE = "model.client_optimizer.lr"
FIXBN = [{"class_path": "FixBN", "init_args": {"freeze_round": 2}}]
METHODS = {"BN": {}, "GN": {"model.model.norm": "gn"}, "FixBN": {"trainer.callbacks": FIXBN}}
HEADLINE = {"GN ~ FixBN within 0.5": ("GN", "FixBN", 0.5)}
OTHERS = {"FixBN > BN": ("FixBN", "BN", None), "GN > BN": ("GN", "BN", None)}


def runs_by_labels():
    """The validation accuracies after each round of every run, by method, rate and seed."""
    runs = {}
    for path in Path("runs").rglob("config.yaml"):
        config = yaml.safe_load(path.read_text())
        lines = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        method = (
            "FixBN"
            if config["trainer"]["callbacks"]
            else config["model"]["model"]["init_args"]["norm"].upper()
        )
        rate = config["model"]["client_optimizer"]["init_args"]["lr"]
        accuracies = [line["val/accuracy"] for line in lines if line["round"] > 0 and "val/accuracy" in line]
        runs[method, f"{rate:g}", config["seed_everything"]] = accuracies
    return runs


def two_sided(first, second, margin):
    """The p-value of a claim on runs with equal seeds: Student's t-test, or two one-sided tests for an equality."""
    differences = [one - other for one, other in zip(first, second, strict=True)]
    if margin is None:
        return ttest_1samp(differences, 0).pvalue
    below = ttest_1samp(differences, margin, alternative="less").pvalue
    above = ttest_1samp(differences, -margin, alternative="greater").pvalue
    return min(1, 2 * min(max(below, above), 1 - below, 1 - above))


@pytest.mark.slow
def test_values_choices_and_verdicts_are_those_of_a_computation_from_the_runs_files(ran):
    write(
        axes={"method": METHODS, RATE: [0.3, 0.1, 0.01]},
        choose=[{"axis": RATE, "by": ["method"], "extend": 0}],
        metrics={"val/accuracy": "validation accuracy"},
        report="mean of the last 2",
        headline=[*HEADLINE],
        claims=[*OTHERS],
        without=[],
        published=[],
        scales={"quick": {"base": "tiny.yaml", "seeds": [*range(5)]}},
        settings={"trainer.max_epochs": 4, "trainer.check_val_every_n_epoch": 1},
    )
    study()
    runs, results = runs_by_labels(), found()
    chosen = {}
    for method in METHODS:
        trials = {rate: runs[method, rate, 1000][-1] for rate in ("0.3", "0.1", "0.01")}
        chosen[method] = max(trials, key=trials.get)
        (choice,) = (choice for choice in results.choices if choice.by == {"method": method})
        assert (choice.chosen, choice.values) == (chosen[method], pytest.approx(trials))
    values = {
        method: [mean(runs[method, rate, seed][-2:]) for seed in range(5)] for method, rate in chosen.items()
    }
    shown = {row.labels["method"]: [*row.of("val/accuracy")] for row in results.rows}
    assert shown == {method: pytest.approx(numbers) for method, numbers in values.items()}

    verdicts = {verdict.claim: verdict for verdict in results.claims}
    p = {
        text: two_sided(values[a], values[b], margin) for text, (a, b, margin) in (HEADLINE | OTHERS).items()
    }
    assert {text: verdict.p for text, verdict in verdicts.items()} == pytest.approx(p)
    small, large = sorted(OTHERS, key=p.get)
    adjusted = {small: min(1, 2 * p[small])}
    adjusted[large] = max(adjusted[small], p[large])
    for text, (first, second, _) in OTHERS.items():
        assert (verdicts[text].headline, verdicts[text].family) == (False, 2)
        assert verdicts[text].adjusted == pytest.approx(adjusted[text])
        holds = "holds" if mean(values[first]) > mean(values[second]) else "does not hold"
        assert verdicts[text].verdict == (holds if adjusted[text] <= 0.05 else "undecided")
    for text in HEADLINE:
        assert (verdicts[text].headline, verdicts[text].family) == (True, 1)
        assert verdicts[text].adjusted == pytest.approx(p[text])
