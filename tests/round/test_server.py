"""The server between and around the rounds: evaluation, modes, learning rates of groups."""

import lightning as L
import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedModule
from fl_lightning.callbacks import FixBN
from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.experiments.run_directory.predictions import write_predictions
from fl_lightning.optimizers.client_lr import MultiStep
from tests.support.helpers import SGD, blobs, distance, federated_run, fit, small_cnn, train


def test_validate_fit_validate_work_one_after_the_other():
    module, data = FederatedModule(small_cnn(), SGD, local_steps=2), blobs()
    settings = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    trainer = L.Trainer(max_epochs=3, precision="64-true", enable_model_summary=False, **settings)
    (before,) = trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    inside = float(trainer.callback_metrics["val/loss"])
    (after,) = trainer.validate(module, datamodule=data, verbose=False)
    assert after["val/loss"] == inside != before["val/loss"]


@pytest.mark.filterwarnings("ignore:Found 1 module")  # Lightning points out what this test does on purpose
def test_a_bn_layer_that_the_user_put_in_eval_mode_stays_there():
    model = small_cnn()
    model[1].eval()
    module = federated_run(FixBN(freeze_round=2), model=model).module
    state = module.state_dict()
    assert torch.equal(state["1.running_mean"], torch.zeros(4, dtype=torch.float64))
    assert not torch.equal(state["4.running_mean"], torch.zeros(6, dtype=torch.float64))
    assert (model[1].training, model[4].training) == (False, True)


def test_the_learning_rate_schedule_reaches_groups_with_a_rate_of_their_own():
    settings = {"client_optimizer": SGD, "parameter_groups": {"bias": {"lr": 0.2}}}
    start = small_cnn("gn").double().state_dict()
    still = MultiStep([1], gamma=1e-12)
    once = train(small_cnn("gn"), blobs(), 1, **settings)
    assert distance(train(small_cnn("gn"), blobs(), 3, client_lr_schedule=still, **settings), once) < 1e-10
    assert (once["8.bias"] - start["8.bias"]).abs().max() > 0.01


def test_fixbn_refuses_layers_without_running_statistics():
    model = small_cnn()
    model[1] = nn.BatchNorm2d(4, track_running_stats=False)
    with pytest.raises(ConfigurationError, match=r"BN layer '1' .* track_running_stats=True"):
        train(model, blobs(), 1, [FixBN()])
    train(model, blobs(), 1, [FixBN(freeze="affine", freeze_round=0)])


def test_fixbn_says_when_it_never_freezes(capsys):
    train(small_cnn(), blobs(), 2, [FixBN(freeze_round=5)])
    assert (
        "FixBN: T* = 5, and training ends with round 2: nothing is frozen in this run."
        in capsys.readouterr().out
    )
    budget = {"budget_epochs": 1.0, "weighting": "uniform"}  # five rounds, of which two are trained
    train(small_cnn(), blobs(), 2, [FixBN(freeze_round=0.8)], **budget)
    assert "FixBN: T* = 4, and training ends with round 2: nothing is frozen" in capsys.readouterr().out
    train(small_cnn(), blobs(), 2, [FixBN(freeze_round=1)])
    assert capsys.readouterr().out == ""


def test_predictions_of_a_regression_are_values(tmp_path):
    outputs, targets = [torch.tensor([[0.5], [1.5]])], [(None, torch.tensor([0.0, 2.0]))]
    write_predictions(tmp_path, tmp_path / "predictions.csv", outputs, targets, blobs())
    assert (tmp_path / "predictions.csv").read_text() == "index,target,value_0\n0,0.0,0.5\n1,2.0,1.5\n"


def test_a_second_fit_without_a_checkpoint_is_a_run_of_its_own():
    module = federated_run(FixBN(), rounds=2).module
    samples = module.record.samples
    fit(module, blobs(), 6, [FixBN()])
    assert module.planned_rounds == 6
    assert module.record.samples == 3 * samples
    assert module.metrics["fixbn/freeze_round"] == 3.0


def evaluate(evaluation, *batches):
    """An evaluation of batches (outputs, targets)."""
    evaluation.start()
    for outputs, targets in batches:
        evaluation.update(outputs, targets, torch.zeros(()))
    return evaluation.finish()


@pytest.mark.parametrize("place", [(), (3, 2)], ids=["images", "pixels"])
def test_accuracy_by_class_equals_a_count_sample_by_sample(place):
    torch.manual_seed(0)
    outputs, targets = torch.randn(50, 5, *place), torch.randint(4, (50, *place))  # class 4 has no samples
    outputs[::7, 2] = torch.nan
    outputs[3, 0] = torch.inf
    evaluation = ServerEvaluation()
    metrics = evaluate(evaluation, *zip(outputs.split(8), targets.split(8), strict=True))
    right, samples = [0] * 5, [0] * 5
    for scores, label in zip(outputs.movedim(1, -1).reshape(-1, 5), targets.flatten().tolist(), strict=True):
        samples[label] += 1
        right[label] += bool(scores.isfinite().all()) and int(scores.argmax()) == label
    assert evaluation.class_samples == samples
    assert evaluation.class_quality == [r / n for r, n in zip(right[:4], samples[:4], strict=True)] + [None]
    assert sum(right) / sum(samples) == pytest.approx(metrics["accuracy"], abs=1e-6)
    assert 0 < sum(right) < sum(samples)


def test_accuracy_by_class_starts_anew_with_each_evaluation():
    evaluation = ServerEvaluation()
    evaluate(evaluation, (torch.eye(3), torch.tensor([0, 0, 2])))
    assert (evaluation.class_quality, evaluation.class_samples) == ([0.5, None, 1.0], [2, 0, 1])
    evaluate(evaluation, (torch.eye(2), torch.tensor([1, 1])))
    assert (evaluation.class_quality, evaluation.class_samples) == ([None, 0.5], [0, 2])
    evaluate(evaluation, (torch.zeros(2, 1), torch.zeros(2, 1)))
    assert (evaluation.class_quality, evaluation.class_samples) == ([], [])


def test_bytes_name_no_more_than_256_classes():
    evaluation = ServerEvaluation()
    evaluation.start()
    evaluation.update(torch.eye(300)[:2], torch.tensor([0, 7], dtype=torch.uint8), torch.tensor(1.0))
    evaluation.update(torch.eye(300)[156:157], torch.tensor([156], dtype=torch.uint8), torch.tensor(1.0))
    assert evaluation.finish()["accuracy"] == pytest.approx(2 / 3)
    assert (evaluation.class_samples[7], evaluation.class_samples[156]) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_unlabelled_pixels_belong_to_no_class(dtype):
    outputs = torch.eye(2)[:, :, None].expand(2, 2, 3)
    targets = torch.tensor([[0, 1, 255], [1, 1, 255]], dtype=dtype)
    evaluation = ServerEvaluation()
    evaluate(evaluation, (outputs, targets))
    assert evaluation.class_samples == [1, 3]
    assert evaluation.class_quality == [1.0, 2 / 3]


def test_counts_by_class_are_exact_beyond_the_integers_of_float32():
    evaluation = ServerEvaluation()
    outputs, targets = torch.tensor([[0.0, 1.0]]).expand(2**20, 2), torch.ones(2**20, dtype=torch.int64)
    evaluate(evaluation, *[(outputs, targets)] * 17, (outputs[:1], targets[:1]))
    assert evaluation.class_samples == [0, 17 * 2**20 + 1]


@pytest.mark.parametrize("ignored", [255, 0])
def test_targets_that_the_loss_ignores_count_neither_as_wrong_nor_as_right(ignored):
    torch.manual_seed(0)
    outputs = torch.randn(12, 3, 4, 5, dtype=torch.float64)
    targets = torch.randint(3, (12, 4, 5))
    targets[torch.rand(12, 4, 5) < 0.4] = ignored
    targets[8:] = ignored  # a whole batch of none
    module = FederatedModule(small_cnn(), SGD, local_steps=1, loss=nn.CrossEntropyLoss(ignore_index=ignored))
    module.client.model = nn.Identity()
    for batch in zip(outputs.split(4), targets.split(4), strict=True):
        module.client.evaluate_batch(batch, module.evaluation)
    metrics = module.evaluation.finish()
    kept = targets != ignored
    scores = outputs.movedim(1, -1)[kept]
    assert metrics["loss"] == pytest.approx(
        float(nn.functional.cross_entropy(scores, targets[kept])), abs=1e-12
    )
    assert metrics["accuracy"] == pytest.approx(float((scores.argmax(1) == targets[kept]).float().mean()))
    assert module.evaluation.class_samples == [int((targets[kept] == label).sum()) for label in range(3)]


def test_nothing_but_ignored_targets_has_no_metrics():
    evaluation = ServerEvaluation()
    evaluation.update(torch.eye(2), torch.tensor([-100, -100]), torch.tensor(torch.nan))
    assert evaluation.finish() == {}
    assert not evaluation.diverged


def test_loss_of_a_run_in_float64_is_a_mean_in_float64():
    losses = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    evaluation = ServerEvaluation()
    for loss in losses:
        evaluation.update(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), loss)
    assert evaluation.finish()["loss"] == pytest.approx(float(losses.mean()), rel=1e-14)
