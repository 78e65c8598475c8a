"""The metrics that need no settings: equal to scikit-learn and to sums by hand, and undefined without a class."""

import json
from functools import cache

import numpy as np
import pytest
import torch
import yaml
from sklearn.metrics import confusion_matrix, recall_score, roc_auc_score

from fl_lightning import ConfigurationError, FederatedModule
from fl_lightning.clients.metrics import make_metrics
from fl_lightning.round import Classification, ServerEvaluation
from tests.support.command_line import run
from tests.support.helpers import SGD, blobs, fit, small_cnn

NAMES = ("sensitivity", "specificity", "calibration", "auroc")


def measured(scores, labels, sizes=(40, 7, 1)):
    """The metrics of batches of these sizes, and of the rest."""
    task, evaluation = Classification(), ServerEvaluation()
    task.measured = make_metrics(dict.fromkeys(NAMES), scores.shape[1])
    rest = len(labels) - sum(sizes)
    for batch, targets in zip(scores.split([*sizes, rest]), labels.split([*sizes, rest]), strict=True):
        evaluation.update(batch, targets, torch.tensor(1.0), task)
    return evaluation.finish()


@cache
def samples(classes):
    generator = torch.Generator().manual_seed(classes)
    labels = torch.randint(classes, (300,), generator=generator)
    scores = torch.randn(300, classes, generator=generator, dtype=torch.float64)
    scores[torch.arange(300), labels] += 1
    return scores, labels


def calibration_error(probabilities, right, bins=15):
    """The expected calibration error: the mean over bins, weighted by their samples."""
    bin_of = np.minimum((probabilities * bins).astype(int), bins - 1)
    parts = [(probabilities[bin_of == i], right[bin_of == i]) for i in range(bins) if (bin_of == i).any()]
    return sum(len(p) / len(right) * abs(p.mean() - r.mean()) for p, r in parts)


def test_of_two_classes_the_second_is_positive():
    scores, labels = samples(2)
    found, guesses, positive = measured(scores, labels), scores.argmax(1), scores.softmax(1)[:, 1].numpy()
    expected = {
        "sensitivity": recall_score(labels, guesses),
        "specificity": recall_score(labels, guesses, pos_label=0),
        "calibration": calibration_error(positive, labels.numpy()),
        "auroc": roc_auc_score(labels, positive),
    }
    assert len({round(value, 3) for value in expected.values()}) == 4
    assert {name: found[name] for name in NAMES} == pytest.approx(expected, abs=1e-7)


def test_of_more_classes_each_is_positive_once():
    scores, labels = samples(4)
    found, guesses, probabilities = measured(scores, labels), scores.argmax(1), scores.softmax(1).numpy()
    counts = confusion_matrix(labels, guesses)
    others = [np.delete(np.delete(counts, label, 0), label, 1).sum() for label in range(4)]
    expected = {
        "sensitivity": recall_score(labels, guesses, average="macro"),
        "specificity": np.mean([n / np.delete(counts, i, 0).sum() for i, n in enumerate(others)]),
        "calibration": calibration_error(probabilities.max(1), (guesses == labels).double().numpy()),
        "auroc": roc_auc_score(labels, probabilities, multi_class="ovr"),
    }
    assert {name: found[name] for name in NAMES} == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("label", "undefined"), [(0, "sensitivity"), (1, "specificity")])
def test_without_samples_of_a_class_there_is_no_value(label, undefined):
    scores, labels = samples(2)
    found = measured(scores, torch.full_like(labels, label))
    assert {name for name in NAMES if np.isnan(found[name])} == {undefined, "auroc"}
    defined = ({"sensitivity", "specificity"} - {undefined}).pop()
    assert found[defined] == pytest.approx(found["accuracy"])


def test_of_more_classes_the_sensitivity_is_of_those_with_samples():
    scores, labels = samples(4)
    labels = labels.clamp(max=2)
    found = measured(scores, labels)
    assert found["sensitivity"] == pytest.approx(
        recall_score(labels, scores.argmax(1), average="macro", labels=[0, 1, 2])
    )


def test_an_unknown_name_needs_a_metric_and_all_need_classes():
    names = "sensitivity, specificity, calibration, auroc"
    with pytest.raises(ConfigurationError) as refused:
        FederatedModule(small_cnn(), SGD, local_steps=1, metrics={"recall": None})
    assert str(refused.value) == (
        f"model.metrics.recall: a name without a metric; give a class of torchmetrics, or one of the names {names}"
    )
    with pytest.raises(ConfigurationError, match=r"^model\.metrics\.auroc: the data have no classes .*leave"):
        make_metrics({"auroc": None}, None)


@pytest.mark.parametrize(
    ("names", "shown"), [(None, "class 1"), (["alive", "dead"], "class 1 (dead)")], ids=["numbers", "names"]
)
def test_a_run_says_which_class_is_positive(names, shown, capsys):
    data = blobs(2)
    data.num_classes, data.class_names = 2, names
    for client in (*data.clients, data.server):
        client.dataset.tensors[1].clamp_(max=1)
    module = FederatedModule(small_cnn(classes=2), SGD, local_steps=1, metrics=dict.fromkeys(NAMES[:2]))
    fit(module, data, 1)
    assert f"positive class of sensitivity, specificity: {shown}\n" in capsys.readouterr().out


def test_a_configuration_lists_the_names_alone():
    given = ("--model.metrics", "{sensitivity, specificity, calibration, auroc}")
    folder = run(*given).attempt.path
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["metrics"] == dict.fromkeys(NAMES)
    result = json.loads((folder / "result.json").read_text())
    again = run("--ckpt_path", "last", *given, command="test").trainer.callback_metrics
    assert [again[f"test/{name}"].item() for name in NAMES] == [result[f"test/{name}"] for name in NAMES]
    assert run("--model.metrics", "{sensitivity}").attempt.path != folder
