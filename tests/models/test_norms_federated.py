"""FedAvg with norm layers that treat every image by itself, or with none, is one machine with all the batches (oracle 1)."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import SequentialExecutor, VectorizedExecutor
from fl_lightning.callbacks import FixBN
from fl_lightning.models import LeNet, ResNet8
from tests.support.helpers import States, blobs, centralised, distance, small_cnn, train

pytestmark = pytest.mark.first_steps

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, VectorizedExecutor])
DECAYED = partial(torch.optim.SGD, lr=0.05, weight_decay=0.05)


def lenet(norm):
    torch.manual_seed(0)
    return LeNet(num_classes=3, in_channels=2, image_size=8, norm=norm)


def resnet(norm):
    torch.manual_seed(0)
    return ResNet8(num_classes=3, in_channels=2, norm=norm, width=4)


def torch_instance_norm():
    """The LeNet with torch's own Instance Normalization, which has no running statistics by default."""
    model = lenet("in")
    for index, layer in enumerate(model.features):
        if isinstance(layer, nn.GroupNorm):
            model.features[index] = nn.InstanceNorm2d(layer.num_channels, affine=True)
    return model


MODELS = {
    **{
        f"lenet-{norm}": partial(lenet, norm)
        for norm in ("gn", "ln", "in", "gn_ws", "fed_ws", "weight_norm", "scaled_ws", "fn")
    },
    "lenet-torch-in": torch_instance_norm,
    "resnet-gn_ws": partial(resnet, "gn_ws"),
    "resnet-weight_norm": partial(resnet, "weight_norm"),
}


@EXECUTORS
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_local_step_equals_centralised_sgd_on_the_union_batch(model, executor):
    data = blobs(shape=(2, 8, 8))
    federated = train(model(), data, 4, client_optimizer=DECAYED, executor=executor())
    central = centralised(model(), data, 4, DECAYED)
    assert federated.keys() == central.keys()
    assert distance(federated, central) < 1e-10
    assert distance(federated, model().state_dict()) > 1e-3


def test_one_local_step_with_bn_differs_from_centralised_sgd():
    data = blobs(shape=(2, 8, 8))
    federated = train(lenet("bn"), data, 4, client_optimizer=DECAYED)
    central = centralised(lenet("bn"), data, 4, DECAYED)
    weights = [name for name, _ in lenet("bn").named_parameters()]
    assert distance({n: federated[n] for n in weights}, {n: central[n] for n in weights}) > 1e-3


# Frozen groups of BN parameters

AFFINE = ["1.weight", "1.bias", "4.weight", "4.bias"]
STATISTICS = ["1.running_mean", "1.running_var", "4.running_mean", "4.running_var"]


@EXECUTORS
@pytest.mark.parametrize(
    ("freeze", "groups", "frozen"),
    [
        (None, {"batch_norm": {"lr_scale": 0.0}}, AFFINE),
        ("affine", {}, AFFINE),
        ("statistics", {}, STATISTICS),
        ("both", {}, AFFINE + STATISTICS),
    ],
)
def test_any_group_of_bn_parameters_can_be_frozen_from_the_start(freeze, groups, frozen, executor):
    history = States()
    methods = [FixBN(freeze_round=0, freeze=freeze)] if freeze else []
    settings = {"client_optimizer": DECAYED, "local_steps": 2, "executor": executor()}
    train(small_cnn(), blobs(), 3, [*methods, history], parameter_groups=groups, **settings)
    first, last = history.states[0], history.states[-1]
    assert [name for name in AFFINE + STATISTICS if torch.equal(first[name], last[name])] == frozen
    assert not torch.equal(first["0.weight"], last["0.weight"])
