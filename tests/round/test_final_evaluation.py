"""What a run ends with is one number, in its result and as the last point of its curve."""

import json
from functools import partial

import lightning as L
import pytest
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassConfusionMatrix

from fl_lightning import FederatedDataModule, FederatedModule, Run
from tests.support.command_line import rows, run, write_config
from tests.support.helpers import SGD, blobs, fit, small_cnn


@pytest.mark.parametrize(("fraction", "split"), [(0.2, "val"), (0.0, "test")])
def test_last_round_is_evaluated_however_rarely_others_are(fraction, split):
    write_config({"data.init_args.val_fraction": fraction, "trainer.check_val_every_n_epoch": 3})
    attempt = run("--trainer.max_epochs", 5).attempt
    *earlier, last = rows(attempt)
    result = json.loads(attempt.result.read_text())
    assert [row["round"] for row in earlier if f"{split}/accuracy" in row] == [0, 3]
    assert {metric: last[f"{split}/{metric}"] for metric in ("loss", "accuracy")} == {
        metric: result[f"{split}/{metric}"] for metric in ("loss", "accuracy")
    }


def test_the_trainer_keeps_how_often_it_evaluates():
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    settings = {"limit_val_batches": None, "check_val_every_n_epoch": 2}
    assert fit(module, blobs(), 3, **settings).check_val_every_n_epoch == 2
    assert "val/accuracy" in module.metrics


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


def test_final_model_is_evaluated_on_test_data_without_a_length():
    known = blobs()
    stream = L.LightningDataModule()
    stream.test_dataloader = lambda: DataLoader(Stream(known.server.dataset), 64)
    accuracies = []
    for name, server in (("stream", stream), ("known", known.server)):
        module = FederatedModule(small_cnn(), SGD, local_steps=1)
        data = FederatedDataModule(known.clients, server)
        result = Run(module, data, name, max_epochs=1, precision="64-true").fit()
        accuracies.append(result["test/accuracy"])
    assert accuracies[0] == accuracies[1]


@pytest.mark.parametrize("batches", [0, 1])
def test_a_finished_run_that_is_resumed_has_the_same_classes_and_arrays(batches):
    results = []
    for resume in (False, True):
        known = blobs()
        server = L.LightningDataModule()
        server.val_dataloader = known.server.val_dataloader
        data = FederatedDataModule(known.clients, server)
        matrix = partial(MulticlassConfusionMatrix, num_classes=3)
        module = FederatedModule(small_cnn(), SGD, local_steps=1, metrics={"matrix": matrix})
        settings = {"precision": "64-true", "num_sanity_val_steps": batches}
        results.append(Run(module, data, max_epochs=2, **settings).fit(resume))
    first, second = results
    assert sum(first["class_accuracy"]["samples"]) == len(known.server.dataset)
    for name in ("arrays", "class_accuracy", "val/accuracy"):
        assert second[name] == first[name]
