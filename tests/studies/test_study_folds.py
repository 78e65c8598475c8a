"""Folds and held-out clients as axes of a study: one row has the runs of all folds."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from fl_lightning import ConfigurationError, load_study
from fl_lightning.cli.study import cells_of
from fl_lightning.experiments.studies.collecting import collect
from fl_lightning.experiments.studies.reading import read_study
from fl_lightning.experiments.studies.study_frame import Chosen
from fl_lightning.experiments.studies.tables import caption, whole_table
from fl_lightning.experiments.studies.verdicts import Comparison
from tests.support.study_frames import study_frame
from tests.support.study_in_process import TINY, study

HOSPITALS = ["Bergen", "Oslo", "Tromsø"]


@pytest.fixture
def table(ran):
    """A table of three hospitals, and the configuration of a run with three folds."""
    draws = np.random.default_rng(0)
    rows = [
        f"{draws.normal():.3f},{draws.normal():.3f},{HOSPITALS[x % 3]},{'yes' if draws.random() < 0.5 else 'no'}"
        for x in range(90)
    ]
    Path("table.csv").write_text("\n".join(["a,b,site,outcome", *rows]) + "\n", encoding="utf-8")
    data = {"features": "table.csv", "targets": "outcome", "groups": "site", "batch_size": 8, "folds": 3}
    config = {
        **TINY,
        "model": {**TINY["model"], "model": {"class_path": "TabularMLP", "init_args": {"hidden": [4]}}},
        "data": {"class_path": "TensorData", "init_args": data},
        "trainer": {**TINY["trainer"], "max_epochs": 2, "check_val_every_n_epoch": 1},
    }
    Path("folds.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return ran


def write_study(**changes):
    content = {
        "title": "Folds",
        "axes": {"method": {"BN": {}, "GN": {"model.model.norm": "gn"}}, "data.fold": "all"},
        "scales": {"quick": {"base": "folds.yaml", "seeds": [0, 1]}},
    }
    Path("s.yaml").write_text(yaml.safe_dump(content | changes, sort_keys=False), encoding="utf-8")


def cells():
    return cells_of(read_study(Path("s.yaml"), "quick"), [])


@pytest.mark.slow
def test_a_row_has_all_folds_and_a_claim_is_judged_on_the_folds(table, capsys):
    write_study(claims=["BN > GN"])
    study()
    assert len(table) == 12
    frame = load_study("runs/studies/s-quick")
    assert [row.labels for row in frame.rows] == [{"method": "BN"}, {"method": "GN"}]
    values = {}
    for row in frame.rows:
        assert [*zip(row.cells["seed"], row.cells["fold"], strict=True)] == [
            (seed, fold) for fold in range(3) for seed in range(2)
        ]
        for run in row.runs:
            config = yaml.safe_load(Path(run["directory"], "config.yaml").read_text(encoding="utf-8"))
            assert (config["data"]["init_args"]["fold"], config["seed_everything"]) == (
                run["fold"],
                run["seed"],
            )
            result = json.loads(Path(run["directory"], "result.json").read_text(encoding="utf-8"))
            values[row.labels["method"], run["seed"], run["fold"]] = result["test/accuracy"]
    bn = [values["BN", seed, fold] for seed in range(2) for fold in range(3)]
    text = f"{statistics.mean(bn):.3f} ± {statistics.stdev(bn):.3f}"
    assert whole_table(frame)["test accuracy"][0] == text
    assert "seeds 0, 1, 3 of 3 folds" in caption(frame)
    assert "mean ± standard deviation over folds and seeds" in caption(frame)

    by_fold = [
        statistics.mean(values["BN", seed, fold] - values["GN", seed, fold] for seed in range(2))
        for fold in range(3)
    ]
    error = (np.var(by_fold, ddof=1) * (1 / 3 + 1 / 2)) ** 0.5
    p = 2 * min(stats.t.sf(np.mean(by_fold) / error, 2), stats.t.cdf(np.mean(by_fold) / error, 2))
    (claim,) = frame.claims
    assert claim.p == pytest.approx(p, abs=1e-9)
    assert "3 folds, which share training samples" in claim.words
    lines = Path("runs/studies/s-quick/cells.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("method,seed,fold,phase,test/accuracy")
    assert lines[3].startswith("BN,0,1,done,")
    assert "seeds 0, 1, 3 of 3 folds" in capsys.readouterr().out


@pytest.mark.slow
def test_a_label_is_chosen_in_each_fold_without_its_test_data(table):
    axes = {"data.fold": "all", "model.client_optimizer.lr": [0.001, 0.1]}
    write_study(
        axes=axes,
        settings={"data.val_fraction": 0.25},
        choose=[{"axis": "model.client_optimizer.lr", "metric": "val/loss", "extend": 0}],
        scales={"quick": {"base": "folds.yaml", "seeds": [0]}},
    )
    study()
    frame = load_study("runs/studies/s-quick")
    assert [choice.by for choice in frame.choices] == [{"data.fold": str(fold)} for fold in range(3)]
    (row,) = frame.rows
    assert [*row.cells["fold"]] == [0, 1, 2]
    for run, choice in zip(row.runs, frame.choices, strict=True):
        assert run["learning_rate"] == float(choice.chosen)
        assert choice.chosen == min(choice.values, key=choice.values.__getitem__)
    used = ", ".join(f"{x:g}" for x in sorted({*row.cells["learning_rate"]}))
    assert whole_table(frame, ["learning rate"])["learning rate"][0] == f"{used}, by validation in each fold"


def test_folds_with_different_choices_are_one_row(table):
    rate = "model.client_optimizer.lr"
    write_study(
        axes={"data.fold": "all", rate: [0.001, 0.1]},
        settings={"data.val_fraction": 0.25},
        choose=[{"axis": rate, "metric": "val/loss", "extend": 0}],
    )
    made = cells()
    values = {
        "axis": rate,
        "at": {},
        "metric": "val/loss",
        "values": {},
        "seed": 1000,
        "settings": [rate],
        "extended": [],
    }
    choices = [
        Chosen(by={"data.fold": str(fold)}, chosen=chosen, **values)
        for fold, chosen in enumerate(("0.001", "0.1", "0.1"))
    ]
    frame = collect(made.study, made.table(choices), choices, {})
    (row,) = frame.rows
    runs = [*zip(row.cells["fold"], row.cells["seed"], row.cells["learning_rate"], strict=True)]
    assert runs == [(fold, seed, (0.001, 0.1, 0.1)[fold]) for fold in range(3) for seed in range(2)]
    shown = whole_table(frame, ["learning rate"])
    assert shown.to_numpy().tolist() == [["0.001, 0.1, by validation in each fold"]]


def test_the_corrected_error_is_that_of_nadeau_and_bengio():
    differences = [0.02, 0.05, -0.01, 0.04, 0.03]
    of_folds = Comparison.of(differences, folds=5)
    error = statistics.stdev(differences) * (1 / 5 + (1 / 5) / (4 / 5)) ** 0.5
    assert of_folds.error == pytest.approx(error, abs=1e-12)
    assert of_folds.half_width(0.05) == pytest.approx(error * stats.t.ppf(0.975, 4), abs=1e-12)
    assert Comparison.of(differences).error == pytest.approx(stats.sem(differences), abs=1e-12)


def test_each_client_is_held_out_in_turn(table):
    write_study(axes={"data.held_out": "each"}, settings={"data.folds": None})
    made = cells()
    held_out = [cell.config["data"]["init_args"]["held_out"] for cell in made.table([])]
    assert held_out == [[name] for name in HOSPITALS for _ in range(2)]
    assert [*made.study.axes["data.held_out"]] == HOSPITALS


def test_folds_by_their_numbers(table):
    write_study(axes={"data.fold": [0, 2]})
    made = cells()
    assert [cell.config["data"]["init_args"]["fold"] for cell in made.table([])] == [0, 0, 2, 2]
    assert made.study.folds == 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"settings": {"data.folds": None}}, "axes.data.fold needs the number of folds; set data.folds"),
        ({"spread": "data.fold"}, "spread: data.fold has no rows of its own"),
        ({"claims": ["BN > GN at data.fold=1"]}, "of data.fold, but a value is the mean over all folds"),
        ({"published": [{"data.fold": 1, "value": 0.5}]}, "published: data.fold has no rows of its own"),
        (
            {
                "axes": {"method": {"BN": {}, "few": {"data.folds": 2}}, "data.fold": "all"},
            },
            "data.folds: 2 in one cell and 3 in another",
        ),
    ],
)
def test_what_folds_exclude_is_refused(table, changes, told):
    axes = {"method": {"BN": {}, "GN": {"model.model.norm": "gn"}}, "data.fold": [0, 1, 2]}
    write_study(**({"axes": axes} | changes))
    with pytest.raises(ConfigurationError, match=told):
        cells().table([])


def test_each_needs_clients_with_names(table):
    write_study(axes={"data.held_out": "each"}, settings={"data.folds": None, "data.groups": None})
    with pytest.raises(ConfigurationError, match=r"each needs clients with names; set data\.groups"):
        cells()


def test_unfinished_folds_are_named():
    runs = [
        {"seed": 0, "fold": 0, "phase": "done", "why": ""},
        {"seed": 0, "fold": 1, "phase": "failed", "why": "x"},
    ]
    frame = study_frame(
        [{"labels": {"m": "BN"}, "values": {"acc": {0: 0.5}}, "runs": runs}],
        {"m": ["BN"]},
        {"acc": "acc"},
        folds=2,
    )
    assert whole_table(frame, ["remarks"])["remarks"][0] == "failed: seed 0 in fold 1"


@pytest.mark.parametrize("source", ["server", "fine_tuned"])
def test_the_caption_says_which_model_a_held_out_client_uses(source):
    metrics = {f"test/held_out_accuracy_{source}": "new hospitals"}
    frame = study_frame([{"labels": {"m": "BN"}, "values": {}, "runs": []}], {"m": ["BN"]}, metrics)
    words = f"new hospitals: clients that never train, with the model of the source {source}."
    assert words in caption(frame)
