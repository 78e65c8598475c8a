"""The FixUp ResNet: Zhang, Dauphin, Ma, ICLR 2019."""

from functools import partial
from math import log

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_lightning import SequentialExecutor, VectorizedExecutor
from fl_lightning.models import CIFARResNet, ResNet8, ResNet20
from fl_lightning.models.fixup import FixupBlock, ScalarBias
from tests.support.helpers import blobs, centralised, distance, train

pytestmark = pytest.mark.first_steps

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
TENTH = {"scalars": {"lr_scale": 0.1}}


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)


def small_resnet():
    torch.manual_seed(0)
    return ResNet8(num_classes=3, in_channels=2, norm="fixup", width=4)


def fixup_in_training():
    """A FixUp network away from its zeros, where every parameter has a gradient."""
    model = small_resnet()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tenth_for_scalars(parameters):
    """SGD that gives parameters with one element a tenth of the learning rate."""
    parameters = list(parameters)
    scalars = {"params": [p for p in parameters if p.numel() == 1], "lr": 0.005}
    return torch.optim.SGD([{"params": [p for p in parameters if p.numel() > 1]}, scalars], lr=0.05)


def images(*shape):
    return 3 + 5 * torch.randn(*shape, dtype=torch.float64)


def gap(first, second):
    return float((first - second).detach().abs().max())


@pytest.mark.parametrize("build", [ResNet8, ResNet20])
def test_a_fixup_network_starts_with_zero_logits_and_loss_ln_10(build):
    model = build(norm="fixup").double()
    logits = model(images(4, 3, 8, 8))
    assert not logits.any()
    assert cross_entropy(logits, torch.tensor([0, 3, 5, 9])).item() == pytest.approx(log(10), abs=1e-14)


@pytest.mark.parametrize("depth", [8, 20, 32])
def test_fixup_starts_the_first_convolutions_with_he_over_the_root_of_the_number_of_blocks(depth):
    blocks = CIFARResNet(depth, norm="fixup", width=32).blocks
    for block in blocks:
        he = (2 / (block.conv1.out_channels * 9)) ** 0.5
        found = float(block.conv1.weight.detach().std()) / he
        assert found == pytest.approx(len(blocks) ** -0.5, rel=0.05)
        assert found != pytest.approx(len(blocks) ** -0.25, rel=0.05)


def test_fixup_zeroes_the_last_convolutions_and_the_classifier_and_starts_scalars_at_zero_and_one():
    model = ResNet20(norm="fixup")
    assert not any(block.conv2.weight.any() for block in model.blocks)
    assert not model.classifier.weight.any()
    assert not model.classifier.bias.any()
    assert not any(layer.bias.any() for layer in model.modules() if isinstance(layer, ScalarBias))
    assert all(block.scale == 1 for block in model.blocks)
    assert model.conv.bias is None
    assert model.conv.weight.abs().max() <= 27**-0.5


def test_fixup_has_the_weights_of_the_resnet_and_47_scalars():
    sizes = [parameter.numel() for parameter in ResNet20(norm="fixup").parameters()]
    batch_norm = 2 * 688
    assert sizes.count(1) == 9 * 5 + 2
    assert sum(sizes) == 269_722 - batch_norm + 47 == 268_393


@pytest.mark.parametrize("stride", [1, 2])
def test_a_fixup_block_is_the_authors_formula(stride):
    """With average pooling over one pixel and concatenation as they wrote it, and every number away from its start."""
    block = FixupBlock(3, 3 * stride, stride).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.uniform_(-1, 1)
    x = images(2, 3, 7, 7)
    b1a, b1b, b2a, b2b = (layer.bias for layer in block.children() if isinstance(layer, ScalarBias))
    out = block.conv2(torch.relu(block.conv1(x + b1a) + b1b) + b2a) * block.scale + b2b
    identity = x
    if stride == 2:
        identity = nn.AvgPool2d(1, stride)(x + b1a)
        identity = torch.cat([identity, torch.zeros_like(identity)], 1)
    assert gap(block(x), torch.relu(identity + out)) < 1e-12


@EXECUTORS
@pytest.mark.parametrize("model", [small_resnet, fixup_in_training], ids=["initial", "in-training"])
def test_fixup_with_slow_scalars_equals_centralised_sgd_with_slow_scalars(model, executor):
    data = blobs(shape=(2, 8, 8))
    settings = {"client_optimizer": partial(torch.optim.SGD, lr=0.05), "executor": executor()}
    central = centralised(model(), data, 4, tenth_for_scalars)
    assert distance(train(model(), data, 4, parameter_groups=TENTH, **settings), central) < 1e-10
    assert distance(train(model(), data, 4, **settings), central) > 1e-5


def test_every_parameter_of_a_fixup_network_is_trained():
    final = train(fixup_in_training(), blobs(shape=(2, 8, 8)), 2)
    still = [n for n, p in fixup_in_training().named_parameters() if gap(p.double(), final[n]) < 1e-4]
    assert still == []
