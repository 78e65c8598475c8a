"""What each client has of the server's model: numbers by hand, the table, and clients of whom nothing is known."""

import csv
from types import MappingProxyType

import pytest
import torch
from command_line import run, write_config
from helpers import ArrayClient, blobs, federated_run
from lightning.pytorch import LightningDataModule
from torch.nn.functional import cross_entropy

from fl_lightning import Classification, FederatedDataModule
from fl_lightning.callbacks import ClientEvaluation


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
    words = "1 of 2 have no accuracy, 1 of 2 have no loss, and are left out"
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
