"""Tables with a row for each client: values, means and intervals equal a computation by scikit-learn and SciPy."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics import accuracy_score, recall_score, roc_auc_score

from fl_lightning.experiments.studies.client_scores import SCORES, Predictions, resamples, score, score_within
from fl_lightning.experiments.studies.client_tables import (
    RESAMPLES,
    client_tables,
    write_client_tables,
)
from fl_lightning.experiments.studies.figures import clients_figure, pictures
from tests.support.study_frames import study_frame

GAP = "FedBN \N{MINUS SIGN} BN"
NAMED = '{"clients": ["named"]}'
CLIENTS = {"Bergen": 30, "Oslo": 21, "Tromsø": 12, "Vadsø": 3}


def predictions(seed, classes=("no", "yes"), subjects=True, shift=0.0):
    """Predictions of 66 patients in four hospitals; those of the last hospital have one class."""
    of_patients, draws = np.random.default_rng(99), np.random.default_rng(seed)
    client = np.repeat([*CLIENTS], [*CLIENTS.values()])
    target = of_patients.integers(0, len(classes), len(client))
    target[client == "Vadsø"] = 1
    scores = draws.normal(size=(len(client), len(classes)))
    scores[np.arange(len(client)), target] += 0.7 + shift
    share = (np.exp(scores) / np.exp(scores).sum(1, keepdims=True)).round(2)
    frame = pd.DataFrame({"line": np.arange(len(client)) + 2})
    if subjects:
        frame["subject"] = [f"P{x // 3:02}" for x in range(len(client))]
    frame["client"], frame["target"] = client, np.array(classes)[target]
    frame["prediction"] = np.array(classes)[share.argmax(1)]
    frame[[f"probability_{name}" for name in classes]] = share
    return frame


METRICS = {"test/accuracy": "accuracy", "test/own_auroc": "AUROC", "test/sensitivity": "sensitivity"}


def written(folder, frames, metrics=METRICS, **more):
    """Results of a study of methods, whose runs have these predictions."""
    rows = []
    for method, of_seeds in frames.items():
        runs = []
        for number, frame in enumerate(of_seeds):
            place = folder / f"{method}-{number}"
            place.mkdir(parents=True)
            frame.to_csv(place / "test_predictions.csv", index=False)
            (place / "partition.json").write_text(NAMED)
            runs.append({"seed": number, "phase": "done", "why": "", "directory": str(place)})
        rows.append({"labels": {"method": method}, "values": {}, "runs": runs})
    return study_frame(rows, {"method": [*frames]}, metrics, **more)


BY_SCIKIT_LEARN = {
    "accuracy": lambda x: accuracy_score(x["target"], x["prediction"]),
    "auroc": lambda x: (
        roc_auc_score(x["target"] == "yes", x["probability_yes"]) if x["target"].nunique() > 1 else np.nan
    ),
    "sensitivity": lambda x: recall_score(x["target"], x["prediction"], pos_label="yes"),
    "specificity": lambda x: (
        recall_score(x["target"], x["prediction"], pos_label="no") if (x["target"] == "no").any() else np.nan
    ),
}


@pytest.mark.parametrize("metric", SCORES)
def test_values_are_those_of_scikit_learn(tmp_path, metric):
    frames = {"BN": [predictions(0), predictions(1)], "FedBN": [predictions(2), predictions(3)]}
    results = written(tmp_path, frames, metrics={f"test/{metric}": metric})
    (table,) = client_tables(results)
    compute = BY_SCIKIT_LEARN[metric]
    assert table.samples == CLIENTS
    # three visits of each patient, but for patients at the borders of two hospitals
    of = {client: frames["BN"][0].query("client == @client")["subject"].nunique() for client in CLIENTS}
    assert [*table.rows.values()][:4] == [
        f"{x} ({n} of {of[x]} subjects)" for x, n in sorted(CLIENTS.items())
    ]
    for method, of_seeds in frames.items():
        values = table.values[method]
        for number, frame in enumerate(of_seeds):
            by_client = {client: compute(x) for client, x in frame.groupby("client")}
            for client, value in by_client.items():
                assert values[client][number] == pytest.approx(value, abs=1e-9, nan_ok=True)
            assert values["all samples"][number] == pytest.approx(compute(frame), abs=1e-9)
            mean, worst = np.nanmean([*by_client.values()]), np.nanmin([*by_client.values()])
            assert values["mean over clients"][number] == pytest.approx(mean, abs=1e-9)
            assert values["worst client"][number] == pytest.approx(worst, abs=1e-9)
    assert ("pairs within clients" in table.values["BN"]) == (metric == "auroc")


def test_an_auroc_of_pairs_within_clients_counts_no_pair_between_two_clients(tmp_path):
    frame = predictions(0)
    table = client_tables(written(tmp_path, {"BN": [frame]}, metrics={"test/auroc": "AUROC"}))[0]
    right, pairs = 0.0, 0
    for _, x in frame.groupby("client"):
        yes, no = (x[x["target"] == name]["probability_yes"].to_numpy() for name in ("yes", "no"))
        if len(yes) and len(no):
            right += stats.mannwhitneyu(yes, no).statistic
            pairs += len(yes) * len(no)
    assert table.values["BN"]["pairs within clients"] == pytest.approx([right / pairs], abs=1e-9)
    assert table.values["BN"]["all samples"] != pytest.approx([right / pairs], abs=1e-3)


def test_several_classes_are_scored_one_against_the_rest():
    frame = predictions(0, ("a", "b", "c")).query("client != 'Vadsø'").astype({"target": str})
    of = Predictions.of(frame)
    ones = np.ones((1, len(frame)))
    columns = [f"probability_{name}" for name in "abc"]
    shares = frame[columns].to_numpy() / frame[columns].to_numpy().sum(1, keepdims=True)
    each = [
        roc_auc_score(frame["target"] == name, frame[column])
        for name, column in zip("abc", columns, strict=True)
    ]
    assert np.allclose(shares.sum(1), 1)
    assert score("auroc", [(of, ones)])[0] == pytest.approx(np.mean(each), abs=1e-9)
    assert score_within("auroc", [(of, ones)])[0] == pytest.approx(np.mean(each), abs=1e-9)
    recall = recall_score(frame["target"], frame["prediction"], average="macro")
    assert score("sensitivity", [(of, ones)])[0] == pytest.approx(recall, abs=1e-9)


@pytest.mark.parametrize("subjects", [True, False])
@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_intervals_are_those_of_a_paired_bootstrap(tmp_path, metric, subjects):
    """Each resample is a table of drawn patients, which scikit-learn scores."""
    frames = {
        name: [predictions(2 * k + s, subjects=subjects, shift=k) for s in range(2)]
        for k, name in enumerate(("BN", "FedBN"))
    }
    results = written(tmp_path, frames, metrics={f"test/{metric}": metric})
    (table,) = client_tables(results)
    draws, compute = np.random.default_rng(0), BY_SCIKIT_LEARN[metric]
    gaps = {client: [] for client in [*CLIENTS, "all samples"]}
    counts = {}
    for client in CLIENTS:
        here = frames["BN"][0]["client"] == client
        units = frames["BN"][0]["subject"][here] if subjects else pd.Series(np.flatnonzero(here))
        names = sorted(units.unique())
        counts[client] = units, names, draws.multinomial(len(names), [1 / len(names)] * len(names), RESAMPLES)
    some = range(0, RESAMPLES, 40)
    for draw in some:
        drawn = {}
        for client, (units, names, count) in counts.items():
            times = dict(zip(names, count[draw], strict=True))
            rows = np.flatnonzero(frames["BN"][0]["client"] == client)
            drawn[client] = np.repeat(rows, [times[unit] for unit in units])
        drawn["all samples"] = np.concatenate([*drawn.values()])
        for row, places in drawn.items():
            of_seeds = [
                compute(frames["FedBN"][s].iloc[places]) - compute(frames["BN"][s].iloc[places])
                for s in range(2)
            ]
            gaps[row].append(np.mean(of_seeds))
    weights = {client: resamples_of(counts[client]) for client in CLIENTS}
    for row, of_scikit_learn in gaps.items():
        parts = [row] if row in CLIENTS else [*CLIENTS]
        ours = [
            np.mean(
                [
                    score(metric, part_of(frames["FedBN"][s], parts, weights))
                    - score(metric, part_of(frames["BN"][s], parts, weights))
                    for s in range(2)
                ],
                axis=0,
            )
        ][0]
        np.testing.assert_allclose(ours[some], of_scikit_learn, atol=1e-9)
        if not np.isnan(ours).all():
            mean, low, high = table.differences[GAP][row]
            assert (low, high) == pytest.approx([*np.nanquantile(ours, [0.025, 0.975])], abs=1e-9)
            at_once = [compute(select(frames[x][s], parts)) for x in ("FedBN", "BN") for s in range(2)]
            assert mean == pytest.approx(np.mean(at_once[:2]) - np.mean(at_once[2:]), abs=1e-9)
    assert table.units == ("subjects" if subjects else "samples")
    assert f"2,000 resamples of {table.units} within each client" in table.caption
    for name, of_seeds in frames.items():
        for row, (low, high) in table.intervals[name].items():
            if row in gaps:  # clients and all samples
                clients = [row] if row in CLIENTS else [*CLIENTS]
                each = [score(metric, part_of(frame, clients, weights)) for frame in of_seeds]
                ends = np.nanquantile(np.mean(each, axis=0), [0.025, 0.975])
                assert (low, high) == pytest.approx([*ends], abs=1e-9)
                assert f"({low:.3f} to {high:.3f})" in cell(table, row, name)
    narrow = table.frame(narrow=True)
    assert not any("(" in text for name in frames for text in narrow[name])
    assert [*narrow[GAP]] == [*table.frame()[GAP]]
    table.differences, gap = {}, table.differences
    assert table.frame(narrow=True).equals(table.frame())  # nothing else is in parentheses
    table.differences = gap
    assert "all samples" in table.intervals["BN"]
    assert "worst client" not in table.differences[GAP]
    assert "worst client" not in table.intervals["BN"]


def cell(table, row, column):
    frame = table.frame().set_index("client (test samples)")
    return frame.loc[table.rows[row], column]


def select(frame, clients):
    return frame[frame["client"].isin(clients)]


def part_of(frame, clients, weights):
    return [(Predictions.of(frame[frame["client"] == client]), weights[client]) for client in clients]


def resamples_of(counts):
    units, names, drawn = counts
    return drawn[:, [names.index(unit) for unit in units]].astype(float)


def test_all_samples_of_a_subject_are_drawn_together():
    weights = resamples(np.array(["b", "a", "b", "c"]), 500, np.random.default_rng(3))
    assert (weights[:, 0] == weights[:, 2]).all()
    assert (weights[:, [0, 1, 3]].sum(1) == 3).all()
    assert len(np.unique(weights, axis=0)) == 10


def test_the_compared_columns_are_those_of_claims_else_all_with_the_first(tmp_path):
    frames = {name: [predictions(k)] for k, name in enumerate(("BN", "FixBN", "FedBN"))}
    results = written(tmp_path, frames)
    assert [*client_tables(results)[0].differences] == ["FixBN \N{MINUS SIGN} BN", GAP]
    (tmp_path / "second").mkdir()
    claimed = written(tmp_path / "second", frames, difference="FedBN - FixBN")
    assert [*client_tables(claimed)[0].differences] == ["FedBN \N{MINUS SIGN} FixBN"]


def test_other_test_samples_are_not_compared(tmp_path):
    other = predictions(1)
    other.loc[0, "line"] = 500
    (table, *_) = client_tables(written(tmp_path, {"BN": [predictions(0)], "FedBN": [other]}))
    assert not table.differences
    assert not table.intervals
    assert "No intervals and differences, because the runs have different test samples." in table.caption


def test_all_folds_are_scored_together(tmp_path):
    frame = predictions(0, subjects=False)
    frame["fold"] = np.arange(len(frame)) % 2
    rows, runs = [], []
    for fold, part in frame.groupby("fold"):
        place = tmp_path / f"{fold}"
        place.mkdir()
        part.drop(columns="fold").to_csv(place / "test_predictions.csv", index=False)
        (place / "partition.json").write_text(NAMED)
        runs.append({"seed": 0, "fold": fold, "phase": "done", "why": "", "directory": str(place)})
    rows = [{"labels": {"method": "BN"}, "values": {}, "runs": runs}]
    metrics = {"test/auroc": "AUROC"}
    (table,) = client_tables(study_frame(rows, {"method": ["BN"]}, metrics, folds=2))
    assert table.samples == CLIENTS
    for client, part in frame.groupby("client"):
        value = BY_SCIKIT_LEARN["auroc"](part)
        assert table.values["BN"][client] == pytest.approx([value], abs=1e-9, nan_ok=True)
    runs[1]["phase"] = "failed"
    unfinished = study_frame(rows, {"method": ["BN"]}, metrics, folds=2)
    assert client_tables(unfinished) == []


def test_names_of_classes_and_clients_stay_text(tmp_path):
    frame = predictions(0, ("01", "1"))
    frame["client"] = frame["client"].replace({"Oslo": "007", "Bergen": "NA"})
    table = client_tables(written(tmp_path, {"BN": [frame]}))[0]
    assert [*table.samples] == ["007", "NA", "Tromsø", "Vadsø"]
    right = (frame["target"] == frame["prediction"]).mean()
    assert table.values["BN"]["all samples"] == pytest.approx([right], abs=1e-9)


def test_without_predictions_the_values_are_those_of_the_runs(tmp_path):
    """A LightningModule logs its own metrics."""
    rows = []
    for method, shift in (("A", 0.0), ("B", 0.1)):
        place = tmp_path / method
        place.mkdir()
        clients = {"client": [0, 1], "name": ["x", "y"], "own_test/acc": [0.5 + shift, ""]}
        pd.DataFrame(clients | {"own_auc": ["", 0.25]}).to_csv(place / "clients.csv", index=False)
        (place / "partition.json").write_text(NAMED)
        runs = [{"seed": 0, "phase": "done", "why": "", "directory": str(place)}]
        rows.append({"labels": {"m": method}, "values": {}, "runs": runs})
    tables = client_tables(study_frame(rows, {"m": ["A", "B"]}, {"auc": "AUC", "test/acc": "accuracy"}))
    assert [table.metric for table in tables] == ["auc", "acc"]
    assert tables[0].frame().to_numpy().tolist() == [
        ["x", "", ""],
        ["y", "0.250", "0.250"],
        ["mean over clients", "0.250", "0.250"],
        ["worst client", "0.250", "0.250"],
    ]
    assert [*tables[1].frame()["B"]] == ["0.600", "", "0.600", "0.600"]


def test_files(tmp_path):
    frames = {"BN": [predictions(0), predictions(1)], "FedBN": [predictions(2), predictions(3)]}
    results = written(tmp_path, frames)
    write_client_tables(tmp_path, results)
    text = Path(tmp_path, "clients.md").read_text(encoding="utf-8")
    assert "auroc of the model that each client uses, on its own test samples." in text
    table = pd.read_csv(tmp_path / "clients_auroc.csv", keep_default_na=False)
    assert [*table] == ["client (test samples)", "BN", "FedBN", GAP]
    assert table["client (test samples)"][0] == "Bergen (30 of 10 subjects)"
    assert [*table.loc[3]][1:] == ["", "", ""]  # Vadsø has one class


def test_the_picture_has_a_point_for_each_client_and_method(tmp_path):
    frames = {"BN": [predictions(0), predictions(1)], "FedBN": [predictions(2), predictions(3)]}
    (picture,) = (x for x in pictures(written(tmp_path, frames, METRICS)) if x.name == "clients")
    (axes,) = picture.draw().axes
    (table, *_) = client_tables(written(tmp_path / "again", frames, METRICS))
    assert [x.get_text() for x in axes.get_yticklabels()] == [*table.rows.values()]
    assert [x.get_text() for x in axes.get_legend().get_texts()] == ["BN", "FedBN"]
    points = [line for line in axes.lines if line.get_label() in frames]
    for line in points:
        values = [np.mean(x) for x in table.values[line.get_label()].values()]
        np.testing.assert_allclose(line.get_xdata(), values)


def test_runs_of_different_clients_have_a_row_for_each_and_no_differences(tmp_path):
    """A small client may be left out with one seed, or held out."""
    whole = predictions(0)
    frames = {"BN": [select(whole, ["Oslo", "Tromsø"]), predictions(1)], "FedBN": [select(whole, ["Bergen"])]}
    (table,) = client_tables(written(tmp_path, frames, {"test/accuracy": "accuracy"}))
    assert table.samples == CLIENTS
    assert {row: len(values) for row, values in table.values["BN"].items()} == {
        "Bergen": 1,
        "Oslo": 2,
        "Tromsø": 2,
        "Vadsø": 1,
        **dict.fromkeys(["all samples", "mean over clients", "worst client"], 2),
    }
    assert table.values["FedBN"]["Oslo"] == []
    assert not table.differences
    assert "the runs have different test samples." in table.caption
    figure = clients_figure(table)
    assert len(figure.axes) == 1


@pytest.mark.parametrize("name", ["all samples", "pairs within clients", "mean over clients", "worst client"])
def test_a_client_may_have_the_name_of_a_mean(tmp_path, name):
    frame = predictions(0)
    named = frame.assign(client=frame["client"].replace("Oslo", name))
    (table,) = client_tables(written(tmp_path, {"BN": [named]}, {"test/auroc": "AUROC"}))
    (expected,) = client_tables(written(tmp_path / "plain", {"BN": [frame]}, {"test/auroc": "AUROC"}))
    assert table.values["BN"][f'"{name}"'] == expected.values["BN"]["Oslo"]
    for row in ("all samples", "pairs within clients", "mean over clients", "worst client"):
        assert table.values["BN"][row] == expected.values["BN"][row]


def test_values_of_incomplete_folds_are_not_shown(tmp_path):
    runs = []
    for fold in range(2):
        place = tmp_path / f"{fold}"
        place.mkdir()
        clients = {"client": [0, 1], "name": ["x", "y"], "own_loss": [0.5 + fold, 1.5]}
        pd.DataFrame(clients).to_csv(place / "clients.csv", index=False)
        (place / "partition.json").write_text(NAMED)
        runs.append({"seed": 0, "fold": fold, "phase": "done", "why": "", "directory": str(place)})
    rows = [{"labels": {"m": "A"}, "values": {}, "runs": runs}]
    (table,) = client_tables(study_frame(rows, {"m": ["A"]}, {"test/loss": "loss"}, folds=2))
    assert table.values["A"] == {
        "x": [1.0],
        "y": [1.5],
        "mean over clients": [1.25],
        "worst client": [1.5],
    }
    assert "Mean over folds." in table.caption
    runs[1]["phase"] = "failed"
    assert client_tables(study_frame(rows, {"m": ["A"]}, {"test/loss": "loss"}, folds=2)) == []


def test_unfinished_runs_are_named(tmp_path):
    results = written(tmp_path, {"BN": [predictions(0)], "FedBN": [predictions(1)]})
    results.cells.iloc[1, results.cells.columns.get_loc("phase")] = "failed"
    (table, *_) = client_tables(replace(results))
    assert [*table.values["FedBN"].values()] == [[]] * 7
    assert table.caption.endswith("Some runs are not finished: FedBN.")


def test_a_caption_says_what_an_interval_is_about(tmp_path):
    frames = {"BN": [predictions(0), predictions(1)], "FedBN": [predictions(2), predictions(3)]}
    table = client_tables(written(tmp_path, frames, {"test/auroc": "AUROC"}))[0]
    for words in (
        "± is the standard deviation over seeds.",
        "An AUROC over several models also measures differences in level between models of different clients.",
        "these trained models and other test samples, not about other seeds.",
    ):
        assert words in table.caption


def test_clients_without_names_have_no_table_but_names_may_be_numbers(tmp_path):
    clients = {"client": [0, 1], "name": ["0", "1"], "own_loss": [0.5, 1.5]}
    pd.DataFrame(clients).to_csv(tmp_path / "clients.csv", index=False)
    runs = [{"seed": 0, "phase": "done", "why": "", "directory": str(tmp_path)}]
    rows = [{"labels": {"m": "A"}, "values": {}, "runs": runs}]
    for content, count in (('{"clients": ["0", "1"]}', 1), ("{}", 0)):
        (tmp_path / "partition.json").write_text(content)
        frame = study_frame(rows, {"m": ["A"]}, {"test/loss": "loss"})
        assert len(client_tables(frame)) == count
