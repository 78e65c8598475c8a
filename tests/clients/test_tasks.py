"""Segmentation: loss, metrics and what is refused; classification is tested where evaluations are."""

import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torchmetrics.classification import MulticlassJaccardIndex

from fl_lightning import Classification, ConfigurationError, FederatedModule, Segmentation, Task
from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.experiments.run_directory.predictions import write_predictions
from fl_lightning.models import SmallDeepLab
from tests.support.helpers import SGD, blobs, fit, small_cnn


def scenes(images, seed=0, classes=4, ignored=0.2):
    """Scores and labels of some images; class 3 is never there."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (images, 5, 7), generator=generator)
    scores = torch.randn(images, classes, 5, 7, generator=generator, dtype=torch.float64)
    scores[:, 3] = -9
    scores.scatter_add_(1, labels[:, None], torch.full_like(scores[:, :1], 0.7))
    labels[torch.rand(labels.shape, generator=generator) < ignored] = 255
    return scores, labels.to(torch.uint8)


def evaluated(*batches, task=None):
    task = task or Segmentation()
    evaluation = ServerEvaluation()
    for scores, labels in batches:
        evaluation.update(scores, labels, task.loss(scores, labels), task)
    evaluation.finish()
    return evaluation


def test_mean_iou_over_batches_is_torchmetrics():
    batches = [scenes(3), scenes(2, seed=1)]
    reference = MulticlassJaccardIndex(4, average="macro", ignore_index=255)
    each = MulticlassJaccardIndex(4, average=None, ignore_index=255)
    for scores, labels in batches:
        reference.update(scores, labels.long())
        each.update(scores, labels.long())
    found = evaluated(*batches)
    assert found.metrics["mean_iou"] == pytest.approx(reference.compute().item(), abs=1e-6)
    assert found.class_quality[:3] == pytest.approx(each.compute()[:3].tolist(), abs=1e-6)
    assert found.class_quality[3] is None  # it is neither there nor predicted
    labels = torch.cat([labels for _, labels in batches])
    scores = torch.cat([scores for scores, _ in batches])
    kept = labels != 255
    right = (scores.argmax(1) == labels) & kept
    assert found.metrics["pixel_accuracy"] == pytest.approx((right.sum() / kept.sum()).item(), abs=1e-6)
    assert found.class_samples == [int((labels == c).sum()) for c in range(4)]


def test_the_loss_is_the_mean_over_the_pixels_that_count():
    batches = [scenes(3), scenes(2, seed=1)]
    for scores, labels in batches:
        expected = cross_entropy(scores, labels.long(), ignore_index=255)
        torch.testing.assert_close(Segmentation().loss(scores, labels), expected)
    kept = [(labels != 255).flatten(1).double().mean(1).sum() for _, labels in batches]
    means = [cross_entropy(s, x.long(), ignore_index=255) for s, x in batches]
    expected = sum(m * k for m, k in zip(means, kept, strict=True)) / sum(kept)
    assert evaluated(*batches).metrics["loss"] == pytest.approx(expected.item())


def test_the_loss_of_sequences_does_not_depend_on_the_batches_or_their_padding():
    generator = torch.Generator().manual_seed(0)
    lengths, task = (3, 40, 5, 38), Classification()
    scores = [torch.randn(3, n, generator=generator) * (1 + 3 * (n < 9)) for n in lengths]
    labels = [torch.randint(3, (n,), generator=generator) for n in lengths]
    expected = cross_entropy(torch.cat(scores, 1).T, torch.cat(labels)).item()
    for size in (1, 2, 4):
        batches = [
            (
                pad_sequence([x.T for x in scores[start : start + size]], batch_first=True).mT,
                pad_sequence(labels[start : start + size], batch_first=True, padding_value=-100),
            )
            for start in range(0, 4, size)
        ]
        assert evaluated(*batches, task=task).metrics["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_batch_of_nothing_that_counts_has_no_loss_and_no_metrics():
    scores, labels = scenes(2, ignored=1.1)
    scores.requires_grad_()
    loss = Segmentation().loss(scores, labels)
    loss.backward()
    assert loss == 0
    assert not scores.grad.any()
    assert evaluated((scores.detach(), labels)).metrics == {}


def test_outputs_that_are_not_finite_are_right_nowhere():
    scores, labels = scenes(1, ignored=0)
    best = torch.full_like(scores, -1.0).scatter_(1, labels.long()[:, None], 1.0)
    assert evaluated((best, labels)).metrics["mean_iou"] == 1
    best[:, :, 0] = torch.nan
    found = evaluated((best, labels))
    assert found.diverged
    assert found.metrics["pixel_accuracy"] == pytest.approx(4 / 5)
    assert found.metrics["mean_iou"] < 1


def test_auxiliary_heads_have_weights_and_smaller_outputs_are_enlarged():
    scores, labels = scenes(2)
    small = scores[:, :, ::2, ::2]
    large = torch.nn.functional.interpolate(small, scores.shape[-2:], mode="bilinear", align_corners=False)
    assert evaluated((small, labels)).metrics == pytest.approx(evaluated((large, labels)).metrics)
    task, plain = Segmentation(auxiliary_weights=[0.4]), Segmentation()
    expected = plain.loss(scores, labels) + 0.4 * plain.loss(large, labels)
    for outputs in ([scores, small], {"out": scores, "aux": small}):
        torch.testing.assert_close(task.loss(outputs, labels), expected)
        assert (
            evaluated((outputs, labels), task=task).metrics["mean_iou"]
            == evaluated((scores, labels)).metrics["mean_iou"]
        )
    with pytest.raises(ConfigurationError, match="auxiliary_weights: 1 weights, but the model has 0 outputs"):
        task.loss(scores, labels)


def test_a_label_for_each_image_is_no_segmentation():
    with pytest.raises(
        ConfigurationError, match=r"model.task: .*got \[4, 10\] and \[4\]; use task: Classification"
    ):
        Segmentation().loss(torch.zeros(4, 10), torch.zeros(4))


def test_a_label_that_is_no_class_is_named():
    scores, labels = scenes(1)
    labels[0, 0, 0] = 7
    with pytest.raises(
        ConfigurationError, match="label 7 of a model with 4 classes; labels are 0 to 3, or 255"
    ):
        Segmentation().count(scores, labels)


def test_a_classifier_with_several_outputs_does_not_silently_train_on_the_first():
    with pytest.raises(TypeError):
        Classification().loss((torch.zeros(2, 3), torch.zeros(2, 3)), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("evaluated", [1.0, 0])
def test_a_segmentation_model_on_labels_of_images_is_one_line(evaluated):
    module = FederatedModule(SmallDeepLab(3, 2, width=4), SGD, local_steps=1)
    with pytest.raises(
        ConfigurationError, match=r"model.model: scores \[\d+, 3, 6, 6\] are .* such as LeNet"
    ) as caught:
        fit(module, blobs(), 1, limit_val_batches=evaluated, num_sanity_val_steps=1)
    assert "\n" not in str(caught.value)


def test_predictions_smaller_than_the_labels_are_written_in_their_size(tmp_path):
    scores, labels = scenes(2)
    said = write_predictions(
        tmp_path / "predictions", tmp_path / "p.csv", [scores[:, :, ::2, ::2]], [(None, labels)], None
    )
    assert said.startswith("2 predictions written to")
    with Image.open(tmp_path / "predictions" / "00001.png") as image:
        assert image.size == (7, 5)


def test_targets_that_are_numbers_need_a_task_but_probabilities_do_not():
    scores, task = torch.zeros(4, 3), Classification()
    with pytest.raises(
        ConfigurationError,
        match=r"^model\.task: .* targets \[4\] are torch\.float32; write labels as integers .* or set model\.task",
    ):
        task.loss(scores, torch.zeros(4))
    assert task.loss(scores, torch.full((4, 3), 1 / 3)).isfinite()


def test_a_quality_that_no_metric_has_is_refused_before_training():
    class Judged(Task):
        quality = "r2"

        def loss(self, outputs, targets):
            return cross_entropy(outputs, targets)

    module = FederatedModule(small_cnn(), SGD, local_steps=1, task=Judged())
    told = r"^model\.task: the quality 'r2' of Judged is no metric of this run; .* one of loss$"
    with pytest.raises(ConfigurationError, match=told):
        fit(module, blobs(), 2, limit_val_batches=None, num_sanity_val_steps=-1)
