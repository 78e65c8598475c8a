"""What each client has of the server's model: numbers by hand, the table, and clients of whom nothing is known."""

import csv
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningDataModule
from sklearn.calibration import calibration_curve
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fl_lightning import Classification, FederatedDataModule, callbacks
from fl_lightning.callbacks import ClientEvaluation
from tests.support.command_line import run, write_config
from tests.support.helpers import ArrayClient, blobs, federated_run
from tests.support.lightning_sites import Lit, Site, federated


def trained(data, callback):
    return federated_run(callback, data=data, rounds=2, trainer={"limit_val_batches": 1.0}).module


def test_mean_worst_tenth_and_variance_are_those_of_the_clients_own_data():
    data, callback = blobs(12, (16, 24, 40)), ClientEvaluation()
    module = trained(data, callback)
    accuracies, losses = [], []
    module.model.eval()
    with torch.no_grad():
        for client in data.clients:
            inputs, targets = client.dataset.tensors
            outputs = module.model(inputs)
            accuracies.append((outputs.argmax(1) == targets).double().mean())
            losses.append(cross_entropy(outputs, targets))
    accuracies, losses = torch.stack(accuracies), torch.stack(losses)
    for name, values, worst in (
        ("accuracy", accuracies, accuracies.sort().values[:2]),
        ("loss", losses, losses.sort(descending=True).values[:2]),
    ):
        found = [module.metrics[f"val/client_{name}{what}"] for what in ("", "_worst", "_variance")]
        expected = [values.mean(), worst.mean(), values.var(correction=0)]
        assert found == pytest.approx([x.item() for x in expected], rel=1e-6)
    assert callback.values[7]["loss"] == pytest.approx(losses[7].item())


def test_without_own_data_the_classes_of_the_servers_are_weighed_as_the_clients_have_them():
    callbacks = [{"class_path": "ClientEvaluation"}]
    write_config({"trainer.callbacks": callbacks})
    cli = run()
    (callback,) = (c for c in cli.trainer.callbacks if isinstance(c, ClientEvaluation))
    by_class, histograms = cli.model.evaluation.class_quality, cli.datamodule.class_histograms()
    expected = [
        sum(n * by_class[label] for label, n in enumerate(counts)) / sum(counts) for counts in histograms
    ]
    with (cli.attempt.path / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["client"]) for row in rows] == list(range(len(expected)))
    assert [float(row["accuracy"]) for row in rows] == pytest.approx(expected)
    assert [callback.values[client]["accuracy"] for client in range(len(expected))] == pytest.approx(expected)
    assert callback.result_lines() == {"clients": "no client has loss"}


class Words(Lit):
    """A module whose validation batches are lists of words."""

    def validation_step(self, batch, batch_idx):
        self.log("val_letters", float(sum(map(len, batch))), batch_size=len(batch))


class OfWords(Site):
    def val_dataloader(self):
        return DataLoader(["a", "bc", "def"], 2, collate_fn=list)


def test_batches_without_tensors_are_evaluated_and_not_counted():
    observer = ClientEvaluation()
    data = FederatedDataModule({"a": OfWords(0), "b": OfWords(1)}, server=OfWords(2))
    federated(Words(), observer, data=data, rounds=1)
    table = observer.tables()["clients"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["val_samples"] for row in rows] == ["", ""]
    assert [row["val_letters"] for row in rows] == [3.0, 3.0]  # batches of 3 and 3 letters


PERSONAL = {
    "FedBN": callbacks.FedBN,
    "SiloBN": callbacks.SiloBN,
    "MTFL": callbacks.MTFL,
    "FedPer": callbacks.FedPer,
    "FedRep": callbacks.FedRep,
    "FedBABU": callbacks.FedBABU,
}
NAMES = ["Oslo", "Rome", "Lima", "Bern"]


@pytest.mark.parametrize("method", [*PERSONAL, "FedAvg"])
def test_each_clients_own_model_and_the_servers_equal_a_hand_computation(method):
    whole = blobs(4, (16, 24, 40, 32))
    data = FederatedDataModule(dict(zip(NAMES, whole.clients, strict=True)), whole.server)
    personal = [PERSONAL[method]()] if method in PERSONAL else []
    observer = ClientEvaluation()
    found = federated_run(observer, *personal, data=data, rounds=2, trainer={"limit_val_batches": 1.0})
    module = found.module.eval()
    own = dict(personal[0].variants(module.trainer, module)) if personal else {}
    server = dict([*module.model.named_parameters(), *module.model.named_buffers()])
    accuracies = {"accuracy": [], "own_accuracy": []}
    for client, part in enumerate(data.clients):
        inputs, targets = part.dataset.tensors
        for name, state in (("accuracy", server), ("own_accuracy", {**server, **own.get(str(client), {})})):
            with torch.no_grad():
                outputs = torch.func.functional_call(module.model, state, (inputs,))
            accuracies[name].append(float((outputs.argmax(1) == targets).double().mean()))
    assert (accuracies["accuracy"] == accuracies["own_accuracy"]) == (not personal)
    table = observer.tables()["clients"]
    counts = ["train_samples", "val_samples", "test_samples"]
    assert table.columns == ["client", "name", *counts, "accuracy", "loss", "own_accuracy", "own_loss"]
    columns = dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))
    assert columns["name"] == tuple(NAMES)
    assert columns["train_samples"] == columns["val_samples"] == (16, 24, 40, 32)
    assert columns["test_samples"] == ("", "", "", "")  # not yet tested
    right = sum(
        share * size for share, size in zip(accuracies["own_accuracy"], (16, 24, 40, 32), strict=True)
    )
    assert module.metrics["val/pooled_accuracy"] == pytest.approx(right / 112)
    for name, column in (("accuracy", "client_accuracy"), ("own_accuracy", "own_accuracy")):
        values = torch.tensor(accuracies[name]).double()
        assert columns[name] == pytest.approx(accuracies[name])
        logged = [module.metrics[f"val/{column}{what}"] for what in ("", "_worst", "_variance")]
        assert logged == pytest.approx(
            [float(values.mean()), float(values.min()), float(values.var(correction=0))]
        )
    drawn = observer.figures([])["clients"](["title"]).axes[0]
    lowest_first = sorted(range(4), key=accuracies["own_accuracy"].__getitem__)
    assert [tick.get_text() for tick in drawn.get_yticklabels()] == [NAMES[i] for i in lowest_first]


class TrainsOnly(LightningDataModule):
    def __init__(self, client):
        super().__init__()
        self.train_dataloader = client.train_dataloader


def test_clients_of_whom_nothing_is_known_are_left_out():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 2, 6, 6, dtype=torch.float64, generator=generator)
    known, callback = ArrayClient(inputs, torch.arange(8) % 3, 4), ClientEvaluation()
    module = trained(FederatedDataModule([TrainsOnly(known), known], known), callback)
    assert callback.values[0] == {}
    assert module.metrics["val/client_accuracy"] == pytest.approx(callback.values[1]["accuracy"])
    words = "1 of 2 have no accuracy or loss, and are left out"
    assert callback.result_lines() == {"clients": words}
    nobody = ClientEvaluation()
    module = trained(FederatedDataModule([TrainsOnly(known)], known), nobody)
    assert not [name for name in module.metrics if "client" in name and name != "client/lr"]
    assert nobody.tables() == {}
    assert nobody.result_lines() == {"clients": "not evaluated: they have no evaluation data and no classes"}


class NotDefined(Classification):
    """A metric that is NaN for a client without the label 2."""

    def metrics(self, counts):
        samples, _, right = counts["by class"].double()
        return {"accuracy": float(right.sum() / samples.sum()), "recall": float(right[2] / samples[2])}

    best = MappingProxyType({"accuracy": "max", "loss": "min", "recall": "max"})


@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_client_with_nan_is_left_out_and_counted(place):
    """Wherever the client stands: NaN in a list makes the order of a sort wrong."""
    callback, data = ClientEvaluation(), blobs(12, (24,))
    for client in data.clients:
        client.dataset.tensors[1][:4] = 2
    data.clients[place].dataset.tensors[1].clamp_(max=1)
    module = federated_run(
        callback, data=data, rounds=1, task=NotDefined(), trainer={"limit_val_batches": 1.0}
    ).module
    recalls = [values["recall"] for client, values in callback.values.items() if client != place]
    assert "recall" not in callback.values[place]
    assert module.metrics["val/client_recall"] == pytest.approx(sum(recalls) / 11)
    assert module.metrics["val/client_recall_worst"] == pytest.approx(sum(sorted(recalls)[:2]) / 2)
    assert callback.result_lines() == {"clients": "1 of 12 have no recall, and are left out"}


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        (2, "2 of 7 have no recall (site 0, site 1), and are left out"),
        (5, "5 of 7 have no recall (site 0, site 1, site 2, site 3, site 4), and are left out"),
        (6, "6 of 7 have no recall (site 0, site 1, site 2, site 3, site 4, ...), and are left out"),
        (7, "no client has recall"),
    ],
)
def test_clients_without_a_metric_are_named_and_a_metric_that_only_the_server_has(lacking, words):
    whole, callback = blobs(7, (24,)), ClientEvaluation()
    for client, part in enumerate(whole.clients):
        labels = part.dataset.tensors[1]
        labels[:4] = 2
        if client < lacking:
            labels.clamp_(max=1)
    clients = {f"site {client}": part for client, part in enumerate(whole.clients)}
    data = FederatedDataModule(clients, whole.server)
    settings = {"task": NotDefined(), "trainer": {"limit_val_batches": 1.0}}
    module = federated_run(callback, data=data, rounds=1, **settings).module
    assert "val/recall" in module.metrics
    assert callback.result_lines() == {"clients": words}


def test_a_metric_that_neither_the_server_nor_a_client_has_is_no_news():
    whole, callback = blobs(3, (24,)), ClientEvaluation()
    for part in (*whole.clients, whole.server):
        part.dataset.tensors[1].clamp_(max=1)
    data = FederatedDataModule(whole.clients, whole.server)
    settings = {"task": NotDefined(), "trainer": {"limit_val_batches": 1.0}}
    federated_run(callback, data=data, rounds=1, **settings)
    assert callback.result_lines() == {}


@pytest.mark.parametrize("method", [[], ["FedBN"]])
def test_a_client_without_test_samples_or_without_both_classes_has_no_value_there(method):
    """The accuracy is no estimate from other hospitals' samples, and the AUROC of one class is no 0."""
    draws = np.random.default_rng(0)
    rows = [
        (hospital, "ill" if hospital == "one" or draws.random() < 0.5 else "well", *draws.normal(size=2))
        for hospital, size in (("big", 40), ("small", 4), ("one", 20))
        for _ in range(size)
    ]
    pd.DataFrame(rows, columns=["site", "state", "a", "b"]).to_csv("sites.csv", index=False)
    auroc = {"class_path": "torchmetrics.AUROC", "init_args": {"task": "multiclass"}}
    changes = {
        "trainer.callbacks": [*method, "ClientEvaluation"],
        "model.model": {"class_path": "TabularMLP", "init_args": {"hidden": [4], "norm": "bn"}},
        "model.metrics": {"auroc": auroc, "sensitivity": None, "specificity": None},
        "data": {
            "class_path": "TensorData",
            "init_args": {
                "features": "sites.csv", "targets": "state", "groups": "site", "test_fraction": 0.1,
                "min_examples": 1, "batch_size": 4,
            },
        },
    }  # fmt: skip
    write_config(changes)
    cli = run()
    names = [*cli.datamodule.client_names]
    sizes = dict(zip(names, map(len, cli.datamodule.distribution.own["test"]), strict=True))
    assert sizes["small"] == 0 < min(sizes["big"], sizes["one"])
    found = pd.read_csv(cli.attempt.path / "clients.csv", index_col="name")
    parts = cli.datamodule.distribution
    assert [*found["train_samples"]] == [*map(len, parts.clients)]
    assert [*found["test_samples"]] == [*map(len, parts.own["test"])]
    assert {*found["val_samples"]} == {0}
    counts = ["client", "train_samples", "val_samples", "test_samples"]
    assert found.loc["small"].drop(counts).isna().all()
    # "ill" is class 0, so that this site has no sample of the positive class
    assert found.loc["one", ["auroc", "own_auroc", "sensitivity", "own_sensitivity"]].isna().all()
    assert found.loc["one", ["accuracy", "own_accuracy", "specificity", "own_specificity"]].notna().all()
    metrics = cli.model.metrics
    assert metrics["test/own_accuracy"] == pytest.approx(found["own_accuracy"].mean())
    for name in ("own_auroc", "own_sensitivity"):
        assert (
            metrics[f"test/{name}"] == metrics[f"test/{name}_worst"] == pytest.approx(found.loc["big", name])
        )
    if not method:
        held_out = cli.datamodule.own_dataloader(names.index("big"), "test")
        ((inputs, targets),) = held_out
        scores = cli.model.model.eval()(inputs).softmax(1)[:, 1].detach()
        higher = scores[targets == 1][:, None] - scores[targets == 0][None]
        by_hand = ((higher > 0).double() + (higher == 0).double() / 2).mean().item()
        assert found.loc["big", "auroc"] == pytest.approx(by_hand)


def curve_of(scores, targets):
    """The observer's table and figure for outputs of two batches of two clients."""
    callback = ClientEvaluation()
    trained(blobs(2, (16,)), callback)
    assert "calibration" not in {**callback.tables(), **callback.figures([])}  # a validation keeps no outputs
    parts = [*zip(scores.split(3), targets.split(3), strict=True)]
    callback.predictions = lambda: {0: parts[:1], 1: parts[1:]}
    return callback.tables().get("calibration"), callback.figures([]).get("calibration")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_calibration_curve_has_the_edges_of_bins_and_leaves_ignored_labels_out(dtype):
    """A probability of 0.5 is in the bin from 0.4 to 0.5, as in scikit-learn."""
    second = torch.tensor([0.0, 0.0, 200.0, -200.0, 1.0, 1.1, 0.0, -1.0])
    scores = torch.stack([torch.zeros(8), second], 1).to(dtype)
    targets = torch.tensor([0, 1, 1, 0, 1, 0, -100, 0])
    table, draw = curve_of(scores, targets)
    kept, shares = targets >= 0, scores.float().softmax(1)[:, 1]
    observed, mean = calibration_curve(targets[kept], shares[kept], n_bins=10)
    low, high, samples, *of_bins = map(list, zip(*table.rows, strict=True))
    assert (low, high) == ([0, 0.2, 0.4, 0.7, 0.9], [0.1, 0.3, 0.5, 0.8, 1])
    assert samples == [1, 1, 2, 2, 1]
    assert of_bins == [pytest.approx(mean.tolist()), pytest.approx(observed.tolist())]
    figure = draw(["title"])
    curve, counts = figure.axes
    assert [*curve.lines[0].get_xdata(), *curve.lines[0].get_ydata()] == [0, 1, 0, 1]
    assert [[*x] for x in curve.lines[1].get_data()] == of_bins
    assert [(round(bar.get_x(), 6), bar.get_height()) for bar in counts.patches] == [
        *zip(low, samples, strict=True)
    ]
    assert [text.get_text() for text in counts.texts] == ["1", "1", "2", "2", "1"]
    assert counts.get_xlabel() == "predicted probability of class 1"
    assert "samples of all clients: 7, in 10 bins" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("scores", "targets"),
    [
        (torch.randn(6, 2), torch.ones(6, dtype=torch.long)),
        (torch.randn(6, 2), torch.tensor([1, 1, 1, 1, -100, 1])),
        (torch.randn(6, 2).index_fill(0, torch.tensor(4), torch.nan), torch.arange(6) % 2),
        (torch.randn(6, 2, 3, 3), (torch.arange(54) % 2).view(6, 3, 3)),
    ],
    ids=["one class", "one class and an ignored label", "not finite", "pixels"],
)
def test_there_is_no_calibration_curve_of(scores, targets):
    assert curve_of(scores, targets) == (None, None)
