"""Adaptations to unlabelled data: moving statistics, entropy steps and class-balanced statistics, by hand."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.methods import adapt_statistics, balanced_statistics, entropy_steps, moving_statistics
from tests.support.helpers import distance, small_cnn


def test_balanced_statistics_of_values_far_from_zero_do_not_cancel():
    generator = torch.Generator().manual_seed(0)
    inputs, labels = 1000 + torch.randn(64, 2, generator=generator), torch.arange(64) % 2
    found = []
    for kind in (torch.float32, torch.float64):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).to(kind).eval()
        balanced_statistics(model, [inputs.to(kind)] * 200, 0.1, labels=[labels] * 200)
        found.append(model[0].running_var.double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=0)


def batches(count=3, classes=4):
    generator = torch.Generator().manual_seed(1)
    labels = [torch.arange(8 * classes) % classes for _ in range(count)]
    inputs = [
        torch.randn(len(y), 2, 6, 6, generator=generator).double() * (1 + k) + y.view(-1, 1, 1, 1)
        for k, y in enumerate(labels)
    ]
    return inputs, labels


def model(classes=4):
    return small_cnn(classes=classes).double().eval()


def adapted(adapt, **settings):
    network = deepcopy(model())
    adapt(network, iter(batches()[0]), **settings)
    return network.state_dict()


# Moving statistics (TsmoBN)


class Moving(nn.Module):
    def __init__(self, layer, tau, correction=0):
        super().__init__()
        self.layer, self.tau, self.correction = layer, tau, correction

    def forward(self, x):
        layer, tau = self.layer, self.tau
        layer.running_mean = (1 - tau) * layer.running_mean + tau * x.mean((0, 2, 3))
        layer.running_var = (1 - tau) * layer.running_var + tau * x.var((0, 2, 3), correction=self.correction)
        return layer(x)


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_statistics_move_before_a_layer_normalises(tau):
    def by_hand(correction=0):
        network = deepcopy(model())
        network[1], network[4] = (Moving(network[i], tau, correction) for i in (1, 4))
        with torch.no_grad():
            for inputs in batches()[0]:
                network(inputs)
        return {name.replace(".layer", ""): x for name, x in network.state_dict().items()}

    found = adapted(moving_statistics, tau=tau)
    assert distance(found, by_hand()) < 1e-12
    assert (distance(found, model().state_dict()) == 0) == (tau == 0)
    assert tau == 0 or distance(found, by_hand(correction=1)) > 1e-4


# Entropy steps (TENT)


def test_without_a_learning_rate_entropy_steps_are_adabn_bit_for_bit():
    assert distance(adapted(entropy_steps, lr=0.0), adapted(adapt_statistics)) == 0


def test_entropy_steps_are_those_of_adam_on_gamma_and_beta_alone():
    network = deepcopy(model()).train()
    affine = [x for i in (1, 4) for x in (network[i].weight, network[i].bias)]
    optimizer = torch.optim.Adam(affine, lr=0.01)
    for inputs in batches()[0]:
        chances = F.softmax(network(inputs), 1)
        optimizer.zero_grad()
        torch.special.entr(chances).sum(1).mean().backward()
        optimizer.step()
    found = adapted(entropy_steps, lr=0.01)
    parameters = {name: x.detach() for name, x in network.named_parameters()}
    assert distance({name: found[name] for name in parameters}, parameters) < 1e-12
    moved = {name for name, x in model().named_parameters() if not torch.equal(found[name], x)}
    assert moved == {"1.weight", "1.bias", "4.weight", "4.bias"}


# Class-balanced statistics (TRIBE)


def by_loops(rate, share, labels, mutant=None):
    """The first layer's statistics, class by class and channel by channel."""
    network, classes = deepcopy(model()), 4
    convolution, layer = network[0], network[1]
    m = [layer.running_mean.clone() for _ in range(classes)]
    v = [layer.running_var.clone() for _ in range(classes)]
    for inputs, own in zip(batches()[0], labels, strict=True):
        with torch.no_grad():
            maps = convolution(inputs)
        d, e = [], []
        for k in range(classes):
            u = maps[own == k].transpose(0, 1).flatten(1)
            n = u.shape[1]
            a = rate if n <= 1 / rate else 1 / n
            centred = u - m[k].unsqueeze(1)
            d.append(a * centred.sum(1))
            e.append(
                a * (centred.square().sum(1) - n * v[k]) - (0 if mutant == "no square" else d[k].square())
            )
        m = [m[k] + (1 - share) * d[k] + share * sum(d) / classes for k in range(classes)]
        v = [v[k] + (1 - share) * e[k] + share * sum(e) / classes for k in range(classes)]
    mean, divisor = sum(m) / classes, classes if mutant == "divisor K" else classes - 1
    between = sum((x - mean).square() for x in m) / divisor
    return mean, sum(v) / classes + between


@pytest.mark.parametrize(("rate", "share"), [(0.01, 0.0), (0.001, 0.3), (0.2, 0.0)])
def test_balanced_statistics_are_those_of_the_formula_class_by_class(rate, share):
    inputs, labels = batches()
    labels = [torch.where(torch.arange(len(y)) < 20, torch.zeros_like(y), y) for y in labels]  # skewed
    network = deepcopy(model())
    balanced_statistics(network, inputs, rate, share, labels)

    def gap(mutant=None):
        pair = zip(
            (network[1].running_mean, network[1].running_var),
            by_loops(rate, share, labels, mutant),
            strict=True,
        )
        return max(float((one - other).abs().max()) for one, other in pair)

    assert gap() < 1e-10
    assert min(gap("divisor K"), gap("no square")) > 1e-4


@pytest.mark.parametrize(("classes", "rate"), [(10, 0.01), (11, 0.05), (100, 0.05), (101, 0.5)])
def test_the_largest_weight_depends_on_the_number_of_classes(classes, rate):
    def variance(**settings):
        network = deepcopy(model(classes))
        balanced_statistics(network, batches(2)[0], **settings)
        return network[1].running_var

    assert torch.equal(variance(), variance(rate=rate))
    assert not torch.equal(variance(), variance(rate=0.01 if rate == 0.05 else 0.05))


def test_of_balanced_data_they_are_those_of_the_union_up_to_the_divisor_of_the_variance_between_classes():
    inputs, labels = (x[:1] for x in batches())
    network = deepcopy(model())
    balanced_statistics(network, inputs, labels=labels)
    maps = model()[0](inputs[0]).detach()
    assert torch.allclose(network[1].running_mean, maps.mean((0, 2, 3)), atol=1e-12)
    means = torch.stack([maps[labels[0] == k].mean((0, 2, 3)) for k in range(4)])
    union = maps.var((0, 2, 3), correction=0) + means.var(0) - means.var(0, correction=0)
    assert torch.allclose(network[1].running_var, union, atol=1e-12)


def test_without_labels_the_models_own_predictions_are_the_classes():
    inputs, _ = batches(1)
    predicted = [model()(x).argmax(1) for x in inputs]
    one, other = deepcopy(model()), deepcopy(model())
    balanced_statistics(one, inputs)
    balanced_statistics(other, inputs, labels=predicted)
    assert distance(one.state_dict(), other.state_dict()) == 0


@pytest.mark.parametrize(
    "adapt", [moving_statistics, entropy_steps, balanced_statistics, partial(adapt_statistics)]
)
def test_an_adaptation_changes_no_weights_of_other_layers(adapt):
    found = adapted(adapt)
    for name in ("0.weight", "3.weight", "8.weight", "8.bias"):
        assert torch.equal(found[name], model().state_dict()[name])
