"""A loss that weighs labels, or ignores some, has the same mean in batches of any size, whatever the loss is made of."""

from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from fl_lightning import Classification, ConfigurationError, FederatedDataModule, FederatedModule
from tests.support.helpers import SGD, ArrayClient, blobs, fit, small_cnn

WEIGHTS = torch.tensor([0.2, 1.0, 7.0], dtype=torch.float64)


class Wrapped(nn.Module):
    """A loss of one's own around torch's."""

    def __init__(self, **settings):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(**settings)

    def forward(self, outputs, targets):
        return self.inner(outputs, targets)


class Counted(Wrapped):
    """Remembers its calls."""

    calls = 0

    def forward(self, outputs, targets):
        self.calls += 1
        return super().forward(outputs, targets)


def closure(**settings):
    return lambda outputs, targets: cross_entropy(outputs, targets, **settings)


KINDS = [
    nn.CrossEntropyLoss,
    Wrapped,
    Counted,
    lambda **settings: partial(cross_entropy, **settings),
    lambda weight=None, **settings: partial(partial(cross_entropy, weight=weight), **settings),
]
OF_EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=["torch", "own", "counted", "partial", "twice"])


def scores_and_labels(place=(), ignored=None):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(30, 3, *place, generator=generator, dtype=torch.float64)
    labels = (
        torch.randint(3, (30, *place), generator=generator).sort(0).values
    )  # batches have labels of their own
    if ignored is not None:
        labels[torch.rand(labels.shape, generator=generator) < 0.4] = ignored
    return outputs, labels


def evaluated(loss, outputs, labels, size, **settings):
    module = FederatedModule(small_cnn(), SGD, local_steps=1, loss=loss, **settings)
    module.client.model = nn.Identity()
    for batch in zip(outputs.split(size), labels.split(size), strict=True):
        module.client.evaluate_batch(batch, module.evaluation)
    return module.evaluation.finish()


@OF_EACH_KIND
@pytest.mark.parametrize(
    "settings",
    [{}, {"label_smoothing": 0.1}, {"ignore_index": 255}, {"ignore_index": 1}, {"reduction": "sum"}],
    ids=["", "smoothed", "ignored", "ignored class", "sum"],
)
@pytest.mark.parametrize("place", [(), (2, 2)], ids=["images", "pixels"])
def test_the_loss_does_not_depend_on_the_size_of_batches(kind, settings, place):
    outputs, labels = scores_and_labels(place, settings.get("ignore_index"))
    loss = kind(weight=WEIGHTS, **settings)
    found = [evaluated(loss, outputs, labels, size) for size in (1, 4, 7, 30)]
    if settings.get("reduction") == "sum":  # no mean: as it was
        assert found[3]["loss"] == pytest.approx(float(loss(outputs, labels)))
        batches = zip(outputs.split(7), labels.split(7), strict=True)
        sums = [(float(loss(*batch)), batch[1].numel()) for batch in batches]
        mean = sum(value * size for value, size in sums) / labels.numel()
        assert found[2]["loss"] == pytest.approx(mean)
        return
    if place:  # images whose pixels weigh unlike are one batch
        whole = float(loss(outputs, labels))
    else:
        whole = float(cross_entropy(outputs, labels, weight=WEIGHTS, **settings))
    kept = labels != settings.get("ignore_index", -100)
    right = float((outputs.argmax(1) == labels)[kept].double().mean())
    for metrics in found:
        assert metrics["loss"] == pytest.approx(whole, abs=1e-12)
        assert metrics["accuracy"] == pytest.approx(right, abs=1e-6)
    if kind is Counted and not place:
        assert loss.calls == sum(-(-30 // size) for size in (1, 4, 7, 30))  # no more than batches


@pytest.mark.parametrize("ignored", [255, -1, 0])
def test_of_a_function_the_task_names_the_ignored_label(ignored):
    outputs, labels = scores_and_labels(ignored=ignored)
    task = Classification(ignored=ignored)
    found = evaluated(closure(ignore_index=ignored), outputs, labels, 7, task=task)
    told = evaluated(nn.CrossEntropyLoss(ignore_index=ignored), outputs, labels, 7)
    assert found == pytest.approx(told)


@OF_EACH_KIND
@pytest.mark.parametrize("ignored", [255, -1, 0])
def test_labels_that_a_loss_ignores_count_neither_as_wrong_nor_as_right(kind, ignored):
    outputs, labels = scores_and_labels(ignored=ignored)
    metrics = evaluated(kind(ignore_index=ignored), outputs, labels, 7)
    kept = labels != ignored
    assert metrics["loss"] == pytest.approx(float(cross_entropy(outputs[kept], labels[kept])), abs=1e-12)
    assert metrics["accuracy"] == pytest.approx(float((outputs.argmax(1) == labels)[kept].double().mean()))


def focal(outputs, targets):
    """A mean over samples, whatever its classes weigh."""
    chosen = outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return -(WEIGHTS[targets] * (1 - chosen.exp()) ** 2 * chosen).mean()


def hardest(outputs, targets):
    """The mean over the hardest third of a batch."""
    return cross_entropy(outputs, targets, reduction="none").topk(max(len(outputs) // 3, 1)).values.mean()


def binary(outputs, targets):
    """A loss of its own for each class."""
    return nn.functional.binary_cross_entropy_with_logits(
        outputs, one_hot(targets, 3).double(), pos_weight=WEIGHTS
    )


class Focal(nn.CrossEntropyLoss):
    """Has torch's settings, but weighs otherwise."""

    def forward(self, outputs, targets):
        return focal(outputs, targets)


class Sum(nn.Module):
    """Torch's weighted mean, and a second loss that is not weighted."""

    def __init__(self):
        super().__init__()
        self.entropy, self.margin = nn.CrossEntropyLoss(weight=WEIGHTS), nn.MultiMarginLoss()

    def forward(self, outputs, targets):
        return self.entropy(outputs, targets) + self.margin(outputs, targets)


class Named:
    """A loss of one's own whose attributes have torch's names, but another meaning."""

    ignore_index, weight, reduction = -100, torch.tensor([0.5, 0.25, 0.0]), "mean"

    def __call__(self, outputs, targets):
        return focal(outputs, targets) * self.weight.sum()


OTHERS = {
    "function": closure(weight=WEIGHTS),
    "focal": focal,
    "focal of torch's class": Focal(WEIGHTS),
    "attributes": Named(),
    "hardest": hardest,
    "binary": binary,
    "sum": Sum(),
    "margin": nn.MultiMarginLoss(weight=WEIGHTS),
    "partial": partial(lambda outputs, targets, weight: focal(outputs, targets), weight=WEIGHTS),
}


@pytest.mark.parametrize("loss", OTHERS.values(), ids=OTHERS)
def test_any_other_loss_weighs_the_samples_of_batches_alike(loss):
    outputs, labels = scores_and_labels()
    batches = zip(outputs.split(7), labels.split(7), strict=True)
    means = [(float(loss(*batch)), len(batch[1])) for batch in batches]
    metrics = evaluated(loss, outputs, labels, 7)
    assert metrics["loss"] == pytest.approx(sum(mean * size for mean, size in means) / 30, abs=1e-12)
    assert metrics["accuracy"] == pytest.approx(
        float((outputs.argmax(1) == labels).double().mean()), abs=1e-6
    )


def test_a_run_and_a_test_log_the_mean_over_all_data():
    def run(batch_size):
        data = blobs()
        inputs, targets = data.server.dataset.tensors
        order = targets.argsort()
        server = ArrayClient(inputs[order], targets[order], 8)
        server.val_dataloader = server.test_dataloader = lambda: torch.utils.data.DataLoader(
            server.dataset, batch_size
        )
        data = FederatedDataModule(data.clients, server)
        module = FederatedModule(small_cnn(), SGD, local_steps=1, loss=nn.CrossEntropyLoss(weight=WEIGHTS))
        trainer = fit(module, data, 1, limit_val_batches=1.0)
        val = float(trainer.callback_metrics["val/loss"])
        (test,) = trainer.test(module, datamodule=data, verbose=False)
        with torch.no_grad():
            model = module.model.double().eval()
            whole = float(cross_entropy(model(inputs), targets, weight=WEIGHTS))
        return val, test["test/loss"], whole

    for size in (8, 50, 200):
        val, test, whole = run(size)
        assert val == pytest.approx(whole, rel=1e-6)
        assert test == pytest.approx(whole, rel=1e-6)


def test_one_output_for_integer_labels_is_refused():
    def loss(outputs, targets):
        return nn.functional.binary_cross_entropy_with_logits(outputs.flatten(), targets.double())

    client = ArrayClient(torch.randn(24, 2, 6, 6, dtype=torch.float64), torch.arange(24) % 2, 8)
    data = FederatedDataModule([client], client)
    module = FederatedModule(small_cnn(classes=1), SGD, local_steps=1, loss=loss)
    with pytest.raises(ConfigurationError, match=r"outputs \[24, 1\] for labels \[24\].*with 2 outputs, or"):
        fit(module, data, 1, limit_val_batches=1.0)
    with pytest.raises(ConfigurationError, match=r"outputs \[4\] for labels \[4\]"):
        evaluated(loss, torch.randn(4), torch.arange(4) % 2, 4)

    class Floats(L.LightningDataModule):
        def train_dataloader(self):
            inputs, targets = client.dataset.tensors
            return torch.utils.data.DataLoader([*zip(inputs, targets.double(), strict=True)], 8)

        val_dataloader = train_dataloader

    module = FederatedModule(small_cnn(classes=1), SGD, local_steps=1, loss=loss)
    metrics = fit(
        module, FederatedDataModule([Floats()], Floats()), 1, limit_val_batches=1.0
    ).callback_metrics
    assert metrics["val/loss"].isfinite()
    assert "val/accuracy" not in metrics


class Margin(nn.Module):
    """A loss with a scale of its own."""

    def __init__(self, trained):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, outputs, targets):
        return cross_entropy(outputs * self.scale, targets)


class OfFeatures(Margin):
    """A loss that contains the model."""

    def __init__(self, model):
        super().__init__(trained=False)
        self.model = model


def test_a_loss_with_parameters_that_nothing_trains_is_refused():
    with pytest.raises(ConfigurationError) as refused:
        FederatedModule(small_cnn(), SGD, local_steps=1, loss=Margin(trained=True))
    line = "loss: the parameter 'scale' of Margin would never be trained; put the parameter into the model, or make it a buffer"
    assert str(refused.value) == line
    model = small_cnn()
    for loss in (Margin(trained=False), OfFeatures(model), nn.CrossEntropyLoss(weight=WEIGHTS)):
        FederatedModule(model, SGD, local_steps=1, loss=loss)
