"""``test_predictions.csv``: the clients' own test samples, each predicted by the model that its client uses."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, roc_auc_score

from fl_lightning import load_model
from fl_lightning.callbacks import ClientEvaluation
from tests.support.command_line import run, write_config

HOSPITALS = ["Bergen", "Oslo", "Tromsø"]


def write_visits(path, values=None):
    """A table of 40 patients with three visits each, in three hospitals."""
    draws = np.random.default_rng(0)
    patient = np.repeat(np.arange(40), 3)
    frame = pd.DataFrame(draws.normal(size=(120, 3)).round(3), columns=["a", "b", "c"])
    frame.insert(0, "patient", [f"P{x:02}" for x in patient])
    frame["site"] = np.array(HOSPITALS)[patient % 3]
    frame["outcome"] = (
        np.array(["no", "yes"])[draws.integers(0, 2, 40)[patient]] if values is None else values
    )
    frame.to_csv(path, index=False)
    return frame


def fitted(tmp_path, *callbacks, **settings):
    frame = write_visits(tmp_path / "visits.csv", settings.pop("values", None))
    data = {
        "features": "visits.csv",
        "targets": "outcome",
        "groups": "site",
        "subjects": "patient",
        "test_fraction": 0.4,
        "batch_size": 8,
        "standardize": True,
    }
    auroc = {"class_path": "torchmetrics.AUROC", "init_args": {"task": "multiclass"}}
    changes = {
        "trainer.max_epochs": 2,
        "trainer.callbacks": ["ClientEvaluation", *callbacks],
        "model.model": {
            "class_path": "TabularMLP",
            "init_args": {"hidden": [4], **settings.pop("model", {})},
        },
        "model.metrics": settings.pop("metrics", {"auroc": auroc}),
        "data": {"class_path": "TensorData", "init_args": data | settings.pop("data", {})},
        **settings,
    }
    write_config(changes)
    cli = run()
    return frame, cli, pd.read_csv(cli.attempt.path / "test_predictions.csv")


@pytest.mark.parametrize("method", ["FedBN", None])
def test_each_line_is_a_test_sample_with_the_prediction_of_its_hospitals_model(tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    frame, cli, found = fitted(tmp_path, *([method] if method else []))
    assert [*found][:4] == ["line", "subject", "client", "target"]
    rows = frame.iloc[found["line"] - 2]
    for column, name in (("subject", "patient"), ("client", "site"), ("target", "outcome")):
        assert [*found[column]] == [*rows[name]]
    tested = {*rows["patient"]}
    assert len(tested) == 16
    assert len(found) == 48
    names = cli.datamodule.class_names
    for hospital, of_hospital in found.groupby("client"):
        model = load_model(cli.attempt.path, checkpoint="last", client=hospital if method else None)
        inputs = torch.tensor(frame.iloc[of_hospital["line"] - 2][["a", "b", "c"]].to_numpy())
        with torch.no_grad():
            shares = model(inputs).softmax(1)
        written = of_hospital[[f"probability_{name}" for name in names]].to_numpy()
        np.testing.assert_allclose(written, shares.numpy(), atol=1e-6)
        assert [*of_hospital["prediction"]] == [names[x] for x in written.argmax(1)]


def test_pooled_metrics_are_of_all_predictions_and_no_mean_of_hospitals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, cli, found = fitted(tmp_path, "FedBN")
    metrics = cli.model.metrics
    accuracy = accuracy_score(found["target"], found["prediction"])
    assert metrics["test/pooled_accuracy"] == pytest.approx(accuracy, abs=1e-7)
    auroc = roc_auc_score(found["target"] == "yes", found["probability_yes"])
    assert metrics["test/pooled_auroc"] == pytest.approx(auroc, abs=1e-7)
    of_each = [roc_auc_score(x["target"] == "yes", x["probability_yes"]) for _, x in found.groupby("client")]
    assert metrics["test/own_auroc"] == pytest.approx(np.mean(of_each), abs=1e-7)
    assert metrics["test/own_auroc"] != pytest.approx(auroc, abs=1e-3)


@pytest.mark.parametrize(("classes", "method"), [(2, "FedBN"), (2, None), (3, "FedBN")])
def test_the_calibration_curve_is_that_of_all_predictions(tmp_path, monkeypatch, method, classes):
    monkeypatch.chdir(tmp_path)
    names = np.array(["no", "perhaps", "yes"])[[0, 2] if classes == 2 else [0, 1, 2]]
    values = names[np.random.default_rng(2).integers(0, classes, 40).repeat(3)]
    # after some rounds with a large learning rate, the probabilities are in several bins
    steps = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}
    settings = {"values": values, "model.client_optimizer": steps, "trainer.max_epochs": 6}
    settings["metrics"] = {"calibration": None}
    _, cli, found = fitted(tmp_path, *([method] if method else []), **settings)
    right = found["target"] == (found["prediction"] if classes == 3 else "yes")
    probabilities = found[[f"probability_{name}" for name in names]]
    predicted = probabilities.max(axis=1) if classes == 3 else found["probability_yes"]
    observed, mean = calibration_curve(right, predicted, n_bins=10, strategy="uniform")
    assert len(mean) >= 3
    table = pd.read_csv(cli.attempt.path / "calibration.csv")
    assert [*table] == ["low", "high", "samples", "mean_predicted", "observed_share"]
    np.testing.assert_allclose(table["mean_predicted"], mean, atol=1e-6)
    np.testing.assert_allclose(table["observed_share"], observed, atol=1e-6)
    for _, row in table.iterrows():
        assert row["samples"] == ((predicted > row["low"]) & (predicted <= row["high"])).sum()
        assert row["high"] - row["low"] == pytest.approx(0.1)
    assert table["samples"].sum() == len(found)
    of_bins = np.ceil(predicted * 15)  # the metric has 15 bins
    error = (right - predicted).groupby(of_bins).sum().abs().sum() / len(found)
    assert cli.model.metrics["test/pooled_calibration"] == pytest.approx(error, abs=1e-6)
    (observer,) = [x for x in cli.trainer.callbacks if isinstance(x, ClientEvaluation)]
    curve, counts = observer.figures([])["calibration"](["title"]).axes
    what = "predicted probability of yes", "observed share"
    if classes == 3:
        what = "probability of the predicted class", "share of correct predictions"
    assert (counts.get_xlabel(), curve.get_ylabel()) == what


REGRESSION = """
from torch.nn.functional import mse_loss
from fl_lightning import Task

class Regression(Task):
    def loss(self, outputs, targets):
        return mse_loss(outputs.squeeze(1), targets)
"""


def test_numbers_are_predicted_as_values(tmp_path, monkeypatch, methods):
    monkeypatch.chdir(tmp_path)
    methods(REGRESSION)
    values = np.random.default_rng(1).normal(size=120).round(3)
    settings = {
        "values": values,
        "metrics": {},
        "model": {"num_classes": 1},
        "model.task": "methods.Regression",
    }
    frame, cli, found = fitted(tmp_path, **settings)
    assert not [*cli.attempt.path.glob("calibration*")]
    assert [*found] == ["line", "subject", "client", "target", "value_0"]
    np.testing.assert_allclose(found["target"], frame.iloc[found["line"] - 2]["outcome"], atol=1e-6)


def test_a_pooled_auroc_of_one_class_is_no_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = np.array(["no", "yes"])[np.repeat(np.arange(40) == 0, 3).astype(int)]
    _, cli, found = fitted(tmp_path, values=values)
    assert {*found["target"]} == {"no"}
    assert "test/pooled_accuracy" in cli.model.metrics
    assert "test/pooled_auroc" not in cli.model.metrics


def test_patients_do_not_leave_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, cli, _ = fitted(tmp_path, wandb={"mode": "offline"})
    patients = b"P0"
    sent = [path for path in Path(cli.attempt.path, "wandb").rglob("*") if path.is_file()]
    assert sent
    assert not any("test_predictions" in path.name for path in sent)
    assert not any(patients in path.read_bytes() for path in sent)


def test_clients_without_names_have_no_such_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        fitted(tmp_path, data={"groups": None, "partition": "IID", "num_clients": 2})


@pytest.mark.parametrize("method", ["FedBN", None])
def test_a_fold_is_the_same_after_a_resume_and_on_two_ranks(tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    settings = {"data": {"folds": 3, "fold": 1, "val_fraction": 0.2}, "checkpoint": {"keep_rounds": [1]}}
    _, whole, _ = fitted(tmp_path, *([method] if method else []), **settings)
    checkpoint = whole.attempt.checkpoints / "round_1.ckpt"
    files = {
        name: (whole.attempt.path / name).read_bytes() for name in ("test_predictions.csv", "clients.csv")
    }
    for arguments in (["--ckpt_path", checkpoint], ["--trainer.devices", 2]):
        again = run("--name", arguments[0].strip("-"), *arguments)
        assert {name: (again.attempt.path / name).read_bytes() for name in files} == files
