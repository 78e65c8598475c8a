"""Norm layers that treat every image by itself, and networks without any: their formulas and initialisations."""

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError
from fl_lightning.experiments.run_directory.describe import norm_names
from fl_lightning.models import FBNCNN, LeNet, ResNet8
from fl_lightning.models.convolutions import (
    ScaledStandardizedConv2d,
    SmallStandardizedConv2d,
    StandardizedConv2d,
    WeightNormConv2d,
)
from fl_lightning.models.norm import FeatureNormLinear, make_head, make_norm

FILTER = (1, 2, 3)


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)


def lenet(norm):
    torch.manual_seed(0)
    return LeNet(num_classes=3, in_channels=2, image_size=8, norm=norm)


def resnet(norm):
    torch.manual_seed(0)
    return ResNet8(num_classes=3, in_channels=2, norm=norm, width=4)


def images(*shape):
    return 3 + 5 * torch.randn(*shape, dtype=torch.float64)


def gap(first, second):
    return float((first - second).detach().abs().max())


# Group, Layer and Instance Normalization


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norm_has_any_number_of_groups(groups):
    assert make_norm("gn", 6, groups).num_groups == make_norm("gn_ws", 6, groups).num_groups == groups


@pytest.mark.parametrize(
    ("norm", "groups"), [("in", None), ("gn", 6), ("gn", 3), ("ln", None)], ids=lambda value: str(value)
)
def test_only_one_group_for_each_channel_is_torchs_instance_norm(norm, groups):
    x = images(4, 6, 5, 5)
    reference = nn.InstanceNorm2d(6, affine=True, track_running_stats=False).double()
    difference = gap(make_norm(norm, 6, groups or 2).double()(x), reference(x))
    assert difference < 1e-12 if norm == "in" or groups == 6 else difference > 0.1


@pytest.mark.parametrize("norm", ["ln", "gn"])
def test_only_one_group_of_all_channels_is_layer_norm_over_channels_and_pixels(norm):
    x = images(4, 6, 5, 5) * torch.arange(1, 7, dtype=torch.float64).view(6, 1, 1)
    reference = nn.LayerNorm((6, 5, 5), elementwise_affine=False).double()
    assert gap(make_norm("gn", 6, groups=1).double()(x), reference(x)) < 1e-12
    difference = gap(make_norm(norm, 6).double()(x), reference(x))
    assert difference < 1e-12 if norm == "ln" else difference > 0.1


# Weight Standardization


class BiasedStandardized(StandardizedConv2d):
    def filters(self):
        std, mean = torch.std_mean(self.weight, dim=FILTER, correction=0, keepdim=True)
        return (self.weight - mean) / (std + self.eps)


class DetachedStandardized(StandardizedConv2d):
    def filters(self):
        std, mean = torch.std_mean(self.weight.detach(), dim=FILTER, correction=1, keepdim=True)
        return (self.weight - mean) / (std + self.eps)


def standardized(kind=StandardizedConv2d, eps=None):
    conv = kind(3, 8, 3).double()
    with torch.no_grad():
        conv.weight.add_(0.3)
    if eps is not None:
        conv.eps = eps
    return conv


@pytest.mark.parametrize(("kind", "right"), [(StandardizedConv2d, True), (BiasedStandardized, False)])
def test_standardized_filters_have_mean_zero_and_standard_deviation_one(kind, right):
    filters = standardized(kind, eps=0.0).filters()
    assert gap(filters.mean(FILTER), torch.zeros(8)) < 1e-12
    difference = gap(filters.flatten(1).std(1, correction=1), torch.ones(8))
    assert difference < 1e-12 if right else difference > 1e-2


def test_the_authors_add_1e_5_to_the_standard_deviation():
    conv = standardized()
    std = conv.weight.flatten(1).std(1, correction=1)
    assert gap(conv.filters().flatten(1).std(1, correction=1), std / (std + 1e-5)) < 1e-12


@pytest.mark.parametrize(("kind", "right"), [(StandardizedConv2d, True), (nn.Conv2d, False)])
def test_output_does_not_change_with_scale_and_shift_of_the_weights(kind, right):
    conv, x = standardized(kind, eps=0.0), images(2, 3, 8, 8)
    before = conv(x)
    with torch.no_grad():
        scale = torch.rand(8, 1, 1, 1, dtype=torch.float64) + 0.5
        conv.weight.mul_(scale).add_(torch.randn(8, 1, 1, 1, dtype=torch.float64))
    difference = gap(conv(x), before)
    assert difference < 1e-10 if right else difference > 1.0


@pytest.mark.parametrize(("kind", "right"), [(StandardizedConv2d, True), (DetachedStandardized, False)])
def test_gradients_flow_through_the_standardization(kind, right):
    """The output knows neither mean nor length of a filter, so the gradient is orthogonal to both directions."""
    conv = standardized(kind, eps=0.0)
    (conv(images(2, 3, 8, 8)) ** 2).mean().backward()
    centred = conv.weight.detach() - conv.weight.detach().mean(FILTER, keepdim=True)
    along = [conv.weight.grad.sum(FILTER), (conv.weight.grad * centred).sum(FILTER)]
    differences = [float(value.abs().max()) for value in along]
    assert max(differences) < 1e-10 if right else min(differences) > 1e-2


# Scaled Weight Standardization


class WithoutKappa(ScaledStandardizedConv2d):
    kappa = 1.0


class WithoutFanIn(ScaledStandardizedConv2d):
    def filters(self):
        return super().filters() * self.weight[0].numel() ** 0.5


@pytest.mark.parametrize(
    ("kind", "right"), [(ScaledStandardizedConv2d, True), (WithoutKappa, False), (WithoutFanIn, False)]
)
def test_scaled_ws_keeps_the_variance_of_a_signal_through_relu(kind, right):
    signal = torch.randn(16, 32, 14, 14, dtype=torch.float64)
    for _ in range(4):
        signal = kind(32, 32, 3, bias=False).double()(signal.relu()).detach()
    assert (0.8 < signal.var() < 1.25) == right


def test_scaled_ws_filters_have_mean_zero_and_length_gain_times_kappa():
    conv = standardized(ScaledStandardizedConv2d, eps=0.0)
    with torch.no_grad():
        conv.gain.uniform_(0.5, 2)
    assert conv.kappa == pytest.approx(1.7129, abs=1e-4)
    assert gap(conv.filters().sum(FILTER), torch.zeros(8)) < 1e-12
    assert gap(conv.filters().flatten(1).norm(dim=1), conv.gain * conv.kappa) < 1e-12


# Weight normalization


class WithoutLength(WeightNormConv2d):
    def filters(self):
        return self.weight * self.gain.view(-1, 1, 1, 1)


@pytest.mark.parametrize(("kind", "right"), [(WeightNormConv2d, True), (WithoutLength, False)])
def test_weight_norm_is_torchs_in_output_and_gradients(kind, right):
    ours, x = kind(3, 8, 3).double(), images(2, 3, 8, 8)
    ours.match_gain()
    theirs = nn.Conv2d(3, 8, 3).double()
    theirs.load_state_dict({"weight": ours.weight, "bias": ours.bias})
    theirs = nn.utils.parametrizations.weight_norm(theirs)
    originals = theirs.parametrizations.weight
    with torch.no_grad():
        ours.gain.mul_(1.7)
        originals.original0.mul_(1.7)
    (ours(x) ** 2).mean().backward()
    (theirs(x) ** 2).mean().backward()
    difference = max(
        gap(ours(x), theirs(x)),
        gap(ours.gain.grad, originals.original0.grad.flatten()),
        gap(ours.weight.grad, originals.original1.grad),
    )
    assert difference < 1e-10 if right else difference > 0.1


@pytest.mark.parametrize("build", [lenet, resnet])
def test_weight_norm_starts_as_the_model_without_norm(build):
    x = images(4, 2, 8, 8)
    assert gap(build("weight_norm").double()(x), build("none").double()(x)) < 1e-5


# FedWS and FN


def test_fed_ws_scales_the_filters_of_weight_standardization_by_a_thousandth():
    small, conv = standardized(SmallStandardizedConv2d), standardized()
    small.load_state_dict(conv.state_dict())
    assert gap(1000 * small.filters(), conv.filters()) < 1e-12
    assert (
        gap(resnet("fed_ws").double()(images(4, 2, 8, 8)), resnet("gn_ws").double()(images(4, 2, 8, 8)))
        > 1e-2
    )


def test_fed_ws_takes_another_standard_deviation():
    model = resnet("fed_ws:0.02")
    convolutions = [x for x in model.modules() if isinstance(x, SmallStandardizedConv2d)]
    assert len(convolutions) > 5
    for conv in convolutions:
        assert torch.allclose(conv.filters().std((1, 2, 3)), torch.tensor(0.02), rtol=1e-3)
    for value in ("0", "x", "", "nan", "inf", "-1"):
        with pytest.raises(
            ConfigurationError, match=f"norm='fed_ws:{value}': '{value}' is no standard deviation"
        ):
            resnet(f"fed_ws:{value}")


class NormOfOne(FeatureNormLinear):
    def forward(self, input):
        return nn.Linear.forward(self, input / input.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize(
    ("kind", "right"), [(FeatureNormLinear, True), (NormOfOne, False), (nn.Linear, False)]
)
def test_features_before_the_head_have_the_norm_sqrt_d(kind, right):
    head, x = kind(6, 3).double(), images(5, 6)
    x[2] = 0
    expected = head.weight @ (6**0.5 * x[0] / x[0].norm()) + head.bias
    assert (gap(head(x)[0], expected) < 1e-12) == right
    if kind is FeatureNormLinear:
        assert isinstance(make_head("fn", 6, 3), kind)
        assert not isinstance(make_head("none", 6, 3), kind)
        assert torch.equal(head(x)[2], head.bias)
        features = x.clone().requires_grad_()
        head(features).sin().sum().backward()
        assert features.grad.isfinite().all()
        assert (features.grad * x).sum(1).abs().max() < 1e-10  # the length has no effect
        assert gap(head(7 * x), head(x)) < 1e-12


def test_a_model_with_fn_has_no_norm_layers_and_no_biases_before_its_head():
    model = resnet("fn")
    assert norm_names(model) == ["FN"]
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["classifier.bias"]


# What a person reads


@pytest.mark.parametrize(
    ("norm", "names"),
    [
        ("bn", "BN"),
        ("gn", "GN"),
        ("ln", "LN"),
        ("in", "IN"),
        ("gn_ws", "GN WS"),
        ("fed_ws", "GN small WS"),
        ("fn", "FN"),
        ("scaled_ws", "scaled WS"),
        ("weight_norm", "weight norm"),
        ("fixup", "FixUp"),
        ("none", ""),
    ],
)
def test_a_picture_names_the_norm_layers_of_its_model(norm, names):
    assert " ".join(norm_names(resnet(norm))) == names


# What cannot be built


@pytest.mark.parametrize("build", [LeNet, FBNCNN])
def test_fixup_needs_a_residual_network(build):
    with pytest.raises(ConfigurationError, match=r"norm='fixup' is unknown.*CIFARResNet also") as error:
        build(norm="fixup")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("build", [LeNet, FBNCNN, ResNet8])
def test_an_unknown_norm_names_the_choices(build):
    choices = r"use one of bn, gn, ln, in, gn_ws, fed_ws, weight_norm, scaled_ws, fn, none \(CIFARResNet also: fixup\)"
    with pytest.raises(ConfigurationError, match=f"norm='batch' is unknown; {choices}"):
        build(norm="batch")
