"""The classifier's bias and the features: golden values on logits by hand, and a run against plain PyTorch."""

import sys
from functools import partial
from math import log

import lightning as L
import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning import ClientFailures, ConfigurationError, FederatedModule
from fl_lightning.callbacks import ClassifierBias, StatisticsSources
from fl_lightning.callbacks.observers import calibration
from fl_lightning.callbacks.observers.calibration import (
    accuracy,
    accuracy_between,
    accuracy_within,
    client_classes,
    predicted_shares,
    shared_class,
    uniform_bias,
)
from fl_lightning.datamodules import Digits, Shards
from fl_lightning.models import LeNet
from tests.support.command_line import run, write_config
from tests.support.helpers import SGD, SaveRounds, blobs, federated_run, small_cnn

EVALUATED = {"limit_val_batches": None, "limit_test_batches": None}


def logits(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_two_classes_are_shifted_to_the_middle_of_two_samples():
    # sigmoid(5 + b) + sigmoid(1 + b) = 1 at b = -3, shared by both logits
    scores, labels = logits([5, 0], [1, 0]), torch.tensor([0, 1])
    assert uniform_bias(scores).tolist() == pytest.approx([-1.5, 1.5], abs=1e-9)
    assert accuracy(scores, labels) == 0.5
    assert predicted_shares(scores).tolist() == [1, 0]
    assert accuracy(scores + uniform_bias(scores), labels) == 1


@pytest.mark.parametrize("scale", [0.1, 3.0, 400.0])
def test_an_offset_of_symmetric_logits_is_found_also_of_a_class_that_is_never_predicted(scale):
    # every cyclic shift of a row: without the offset the mean probability of every class is 1 / 4
    row = scale * torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    symmetric = torch.stack([row.roll(shift) for shift in range(4)])
    offset = 2 * scale * logits([1, -2, 50, -49])[0]
    assert predicted_shares(symmetric + offset).tolist() == [0, 0, 1, 0]
    bias = uniform_bias(symmetric + offset)
    assert torch.allclose(bias, -offset, rtol=0, atol=1e-7 * scale)
    means = (symmetric + offset + bias).softmax(1).mean(0)
    assert (4 * means - 1).abs().max() <= 1e-9


@pytest.mark.parametrize(
    "observers",
    [
        lambda: [ClassifierBias(mean_of=5, train_samples=30)],
        lambda: [StatisticsSources(["moment_matching", "silobn"])],
    ],
)
def test_an_observer_of_an_earlier_run_gives_the_numbers_of_a_new_one(observers):
    def measured(used, rate=0.1):
        settings = {"client_optimizer": partial(torch.optim.SGD, lr=rate), "trainer": EVALUATED}
        rows = federated_run(*used, rounds=2, **settings).rows
        return {
            name: x for row in rows.values() for name, x in row.items() if name.startswith(("val", "test"))
        }

    used = observers()
    measured(used, 0.5)
    assert measured(used) == measured(observers())


def test_checkpoints_do_not_replace_the_mean_model_in_fit(tmp_path):
    torch.save(small_cnn().state_dict(), tmp_path / "other.pt")
    first, second = (
        federated_run(ClassifierBias(mean_of=2, train_samples=30, **files), rounds=2, trainer=EVALUATED).rows
        for files in ({}, {"checkpoints": [str(tmp_path / "other.pt")]})
    )
    names = [name for row in first.values() for name in row if name.endswith("_mean_model")]
    assert names
    assert all(first[key].get(name) == second[key].get(name) for key in first for name in names)


def test_without_convergence_there_is_no_bias(monkeypatch):
    scores = torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert uniform_bias(scores) is not None
    monkeypatch.setattr(calibration, "TOLERANCE", -1.0)
    assert uniform_bias(scores) is None


def test_accuracy_within_and_between_clients_by_hand():
    groups = [[0, 1], [2, 3]]
    scores = logits([3, 2, 9, 0], [3, 2, 9, 0], [0, 8, 5, 4], [log(4), log(4), log(7), log(0.1)])
    labels = torch.tensor([0, 1, 2, 0])
    # client 0: samples 0, 1, 3 of which 0 and 3 are right; client 1: sample 2 is right
    assert accuracy_within(scores, labels, groups) == (2 / 3 + 1) / 2
    # the last sample has 8 of 15.1 in client 0's classes, though class 2 is the most probable
    assert accuracy_between(scores, labels, groups) == 1 / 4
    assert accuracy_between(scores[3:], labels[3:], groups) == 1
    # a class without a client is left out, a client without samples too
    assert accuracy_within(scores, labels, [[0, 1], [3]]) == 2 / 3
    assert accuracy_between(scores, labels, [[0, 1], [3]]) == 3 / 3
    assert accuracy_within(scores, labels, []) is None
    assert accuracy_between(scores, labels, []) is None


def test_a_clients_classes_are_at_least_a_tenth_of_its_most_frequent():
    assert client_classes([[100, 10, 9, 0], [0, 0, 1, 0]]) == [[0, 1], [2]]
    assert shared_class([[0, 1], [2], [3, 1]]) == (0, 2, 1)
    assert shared_class([[0, 1], [2], [3]]) is None


def measures(model, data, train, suffix=""):
    """All measures of a model in eval mode, in plain PyTorch."""
    model.eval()
    with torch.no_grad():
        batches = [tuple(data.cohort_batch([c], [s]).batches()[0]) for c, s in train]
        outputs, targets = zip(*((model(x.double()), y) for x, y in batches), strict=True)
        outputs, targets = torch.cat(outputs), torch.cat(targets)
        inputs, labels = zip(*data.test_dataloader(), strict=True)
        scores, labels = model(torch.cat(inputs).double()), torch.cat(labels)
    bias = torch.zeros(10, dtype=torch.float64)
    for _ in range(3000):
        bias -= (scores + bias).softmax(1).mean(0).log() + log(10)
    within, between = [], []
    owned = [{c for c, count in enumerate(counts) if count} for counts in data.class_histograms()]
    for score, label in zip(scores, labels.tolist(), strict=True):
        between.append(label in max(owned, key=lambda own: sum(score.softmax(0)[list(own)])))
    for own in owned:
        samples = [(s, y) for s, y in zip(scores, labels.tolist(), strict=True) if y in own]
        within.append(sum(max(own, key=lambda c: s[c]) == y for s, y in samples) / len(samples))
    expected = {
        "train_loss": cross_entropy(outputs, targets),
        "train_accuracy": (outputs.argmax(1) == targets).double().mean(),
        "accuracy_calibrated": ((scores + bias).argmax(1) == labels).double().mean(),
        "accuracy_within_clients": sum(within) / len(within),
        "accuracy_between_clients": sum(between) / len(between),
    }
    for label in range(10):
        expected[f"predicted_share_{label}"] = (scores.argmax(1) == label).double().mean()
    if suffix:
        expected["accuracy"] = (scores.argmax(1) == labels).double().mean()
        expected["loss"] = cross_entropy(scores, labels)
    return {f"test/{name}{suffix}": float(value) for name, value in expected.items()}


def digits():
    return Digits(num_clients=5, batch_size=10, partition=Shards(0.2), max_examples=400)


@pytest.mark.slow
def test_a_run_measures_the_server_and_the_mean_of_its_newest_models(tmp_path):
    torch.manual_seed(0)
    data, settings = digits(), {"trainer": EVALUATED, "local_steps": 4}
    observer = ClassifierBias(mean_of=2, train_samples=150)
    result = federated_run(
        observer,
        SaveRounds(tmp_path),
        data=data,
        rounds=3,
        model=LeNet(in_channels=1, image_size=8),
        **settings,
    )
    batches = [(client, step) for client in range(5) for step in range(data.steps_per_epoch(client))]
    train = [batches[index * len(batches) // 15] for index in range(15)]
    assert {client for client, _ in train} == set(range(5))
    model = result.module.model
    kept = [torch.load(tmp_path / f"{r}.ckpt", weights_only=True)["state_dict"] for r in (2, 3)]
    expected = measures(model, data, train)
    model.load_state_dict({name: (kept[0][name] + kept[1][name]) / 2 for name in kept[0]})
    expected |= measures(model, data, train, "_mean_model")
    found = {name: value for name, value in result.rows[3].items() if name in expected}
    assert found == pytest.approx(expected, rel=1e-6)
    assert 0.1 < expected["test/accuracy_within_clients"] < 1
    assert expected["test/accuracy_calibrated"] != found["test/accuracy_mean_model"]
    # and of kept weights, in another process that has trained nothing
    files = [str(tmp_path / f"{r}.ckpt") for r in (2, 3)]
    again = FederatedModule(LeNet(in_channels=1, image_size=8), SGD, local_steps=4)
    again.load_state_dict(kept[1])
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    callbacks = [ClassifierBias(5, 150, files)]
    trainer = L.Trainer(accelerator="cpu", precision="64-true", callbacks=callbacks, **quiet)
    (tested,) = trainer.test(again, datamodule=digits(), verbose=False)
    assert {name: tested[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_the_newest_models_are_resumed_and_a_skipped_round_counts(tmp_path):
    def models(ckpt_path=None):
        observer = ClassifierBias(mean_of=3)
        federated_run(
            observer,
            SaveRounds(tmp_path),
            data=blobs(2),
            rounds=5,
            ckpt_path=ckpt_path,
            failures=ClientFailures(dropout=0.6),
        )
        return observer.models

    whole = models()
    assert len(whole) == 3
    resumed = models(tmp_path / "3.ckpt")
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_clients_that_share_classes_are_not_told_apart(capsys):
    data = Digits(num_clients=5, batch_size=10, partition=Shards(0.4), max_examples=400)
    model = LeNet(in_channels=1, image_size=8)
    result = federated_run(ClassifierBias(), data=data, rounds=1, model=model, trainer=EVALUATED)
    assert "test/accuracy_within_clients" in result.rows[1]
    assert "test/accuracy_between_clients" not in result.rows[1]
    assert capsys.readouterr().out.count("accuracy_between_clients is left out, as clients ") == 1


def test_clients_that_never_train_are_no_clients_of_the_measure(monkeypatch):
    seen = []
    module = sys.modules[ClassifierBias.__module__]
    monkeypatch.setattr(module, "client_classes", lambda rows: seen.append(rows) or client_classes(rows))
    data = Digits(5, batch_size=10, partition=Shards(0.2), max_examples=400, held_out=2)
    model = LeNet(in_channels=1, image_size=8)
    federated_run(ClassifierBias(), data=data, rounds=1, model=model, trainer=EVALUATED)
    assert seen[-1] == data.class_histograms()[:3]


def test_the_command_test_measures_a_kept_round(tmp_path):
    write_config({"trainer.callbacks": None, "checkpoint": {"keep_rounds": [2, 3]}})
    folder = run().attempt.path / "checkpoints"
    files = [str(folder / f"round_{number}.ckpt") for number in (2, 3)]
    observer = {"class_path": "ClassifierBias", "init_args": {"checkpoints": files}}
    write_config({"trainer.callbacks": [observer]}, "measured.yaml")
    metrics = run("--ckpt_path", files[1], command="test", config="measured.yaml").trainer.callback_metrics
    assert {"test/accuracy_calibrated", "test/accuracy_calibrated_mean_model"} <= metrics.keys()
    assert sum(float(metrics[f"test/predicted_share_{label}"]) for label in range(10)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean_of": 0}, "mean_of must be at least 1, found 0"),
        ({"train_samples": 0}, "train_samples must be at least 1, found 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        ClassifierBias(**settings)


def test_a_file_of_another_model_and_labels_of_pixels_are_refused(tmp_path):
    path = str(tmp_path / "other.pt")
    torch.save(small_cnn("gn").state_dict(), path)
    with pytest.raises(ConfigurationError, match=r"^ClassifierBias.checkpoints: .* does not fit model.model"):
        federated_run(ClassifierBias(checkpoints=[path]), rounds=1, trainer=EVALUATED)
    pixels = torch.nn.Conv2d(2, 3, 1)
    data = blobs(2)
    for client in (*data.clients, data.server):
        inputs, labels = client.dataset.tensors
        client.dataset.tensors = inputs, labels.view(-1, 1, 1).expand(-1, 6, 6)
    with pytest.raises(
        ConfigurationError, match=r"ClassifierBias needs a label of each sample, but outputs are"
    ):
        federated_run(ClassifierBias(), data=data, model=pixels, rounds=1, trainer=EVALUATED)
