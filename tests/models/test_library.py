"""Models of other libraries, with their norm layers converted by type."""

import sys
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import (
    FederatedDataModule,
    FederatedModule,
    Segmentation,
    SequentialExecutor,
    VectorizedExecutor,
)
from fl_lightning.datamodules import Cityscapes
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.describe import norm_names
from fl_lightning.models import SmallDeepLab, convert_norm, deeplab_v3_plus, library_model
from tests.support.helpers import SGD, ArrayClient, distance, fit, train
from tests.support.street_scenes import write_scenes

pytestmark = pytest.mark.first_steps


def images(clients=2, classes=3):
    generator = torch.Generator().manual_seed(0)
    parts = [
        ArrayClient(
            torch.randn(8, 3, 32, 32, generator=generator, dtype=torch.float64) + client,
            torch.randint(classes, (8,), generator=generator),
            4,
        )
        for client in range(clients)
    ]
    return FederatedDataModule(parts, parts[0])


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_a_round_of_a_model_of_torchvision_is_the_same_from_every_executor(norm):
    states = []
    for executor in (SequentialExecutor(compile=False), VectorizedExecutor()):
        torch.manual_seed(0)
        model = library_model("torchvision.models.mobilenet_v2", 3, norm=norm, settings={"width_mult": 0.25})
        settings = {"client_optimizer": partial(SGD, lr=0.01), "local_steps": 1, "executor": executor}
        states.append(train(model, images(), 1, **settings))
    assert norm_names(model) == [norm.upper()]
    assert distance(*states) < 1e-8


def block(**settings):
    return nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4, eps=1e-3, **settings), nn.ReLU())


@pytest.mark.parametrize(("norm", "groups"), [("gn", 2), ("ln", 1), ("in", 4)])
def test_a_converted_layer_keeps_the_affine_parameters_and_eps(norm, groups):
    model = block()
    nn.init.constant_(model[1].weight, 3.0)
    convert_norm(model, norm)
    x = torch.randn(2, 3, 5, 5)
    values = model[0](x).reshape(2, groups, -1)
    variance, mean = torch.var_mean(values, dim=2, correction=0, keepdim=True)
    expected = 3 * ((values - mean) / (variance + 1e-3).sqrt()).reshape(2, 4, 5, 5)
    torch.testing.assert_close(model(x), expected.relu())


def test_layers_of_every_dimension_are_converted_and_those_without_affine_parameters_stay_so():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2, affine=False))
    convert_norm(model, "gn")
    assert [type(layer) for layer in model] == [nn.GroupNorm, nn.Unflatten, nn.GroupNorm]
    assert model[2].weight is None
    assert model(torch.randn(3, 4)).shape == (3, 2, 2)
    model = block()
    convert_norm(model, "none")
    assert isinstance(model[1], nn.Identity)


class Activated(nn.BatchNorm2d):
    """As timm's: a BN layer that drops and activates as well."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()


def test_what_a_batch_norm_layer_does_beyond_is_kept():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Activated(4))
    convert_norm(model, "gn")
    assert [type(part) for part in model[1]] == [nn.GroupNorm, nn.Identity, nn.ReLU]


def test_a_layer_that_a_model_has_twice_is_converted_in_both_places():
    shared, conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
    model = nn.ModuleDict({"trunk": nn.Sequential(conv, shared, conv, shared), "norm": shared})
    convert_norm(model, "gn")
    assert model["trunk"][1] is model["trunk"][3] is model["norm"]
    x = torch.randn(2, 4, 5, 5)
    model.train()
    apart = [model["trunk"](image[None]) for image in x]  # as no BN layer would
    torch.testing.assert_close(model["trunk"](x), torch.cat(apart))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: library_model("torchvision.models.resnet18", norm="gn", groups=3),
            "groups=3 does not divide a layer of 64 channels; use a divisor of 64",
        ),
        (
            lambda: library_model("torchvision.models.resnet18", norm="gn_ws"),
            "norm: 'gn_ws' must be one of bn, gn",
        ),
        (
            lambda: library_model("torchvision.models.resnet18", 10, 1),
            "in_channels=1: torchvision.models.resnet18",
        ),
        (
            lambda: library_model("torchvision.models.resnet19"),
            "function: there is no 'torchvision.models.resnet19'",
        ),
        (lambda: library_model("resnet18"), "function: there is no 'resnet18'; give a dotted path"),
        (lambda: library_model("nowhere.resnet18"), "function: 'nowhere.resnet18' cannot be imported"),
        (
            lambda: library_model("torchvision.models.vgg"),
            "settings: {} do not fit torchvision.models.vgg: 'module' object is not callable",
        ),
        (lambda: library_model("datetime.timedelta"), "function: 'datetime.timedelta' makes a timedelta"),
        (
            lambda: library_model("torch.nn.Linear", 10),
            "settings: {'num_classes': 10} do not fit torch.nn.Linear",
        ),
        (
            lambda: library_model("torchvision.models.resnet18", settings={"depth": 3}),
            "settings: {'depth': 3} do not fit torchvision.models.resnet18: .*unexpected keyword argument 'depth'",
        ),
    ],
)
def test_what_cannot_be_made_is_one_line(make, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'fl_lightning\[segmentation\]'"):
        deeplab_v3_plus()
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'fl_lightning\[timm\]'"):
        library_model("timm.create_model", settings={"model_name": "resnet18"})


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_050"])
def test_models_of_timm_take_classes_and_channels_of_the_data(name):
    pytest.importorskip("timm")
    model = library_model("timm.create_model", 5, 1, norm="gn", settings={"model_name": name})
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 5)
    assert norm_names(model) == ["GN"]


# Segmentation


def segmented(model, root, executor, batch_size=2):
    torch.manual_seed(0)
    data = Cityscapes(str(root), batch_size=batch_size)
    module = FederatedModule(
        model(), SGD, local_steps=1, executor=executor, task=Segmentation(), weighting="uniform"
    )
    fit(module, data, 1, limit_val_batches=1.0)
    return module


@pytest.mark.parametrize(("encoder", "floats"), [("mobilenet_v2", 4_383_139), ("resnet50", 26_682_211)])
def test_deeplab_v3_plus_is_as_large_as_its_page_says(encoder, floats):
    pytest.importorskip("segmentation_models_pytorch")
    model = deeplab_v3_plus(encoder=encoder)
    assert sum(p.numel() for p in model.parameters()) == floats
    assert model.eval()(torch.rand(1, 3, 64, 96)).shape == (1, 19, 64, 96)
    assert norm_names(deeplab_v3_plus(encoder=encoder, norm="gn")) == ["GN"]


def test_an_encoder_that_does_not_exist_is_one_line():
    pytest.importorskip("segmentation_models_pytorch")
    with pytest.raises(ConfigurationError, match="encoder='resnet17' is unknown"):
        deeplab_v3_plus(encoder="resnet17")


@pytest.mark.parametrize("encoder", ["mobilenet_v2", "resnet50"])
def test_an_encoder_starts_from_the_weights_of_a_file_of_torchvision(encoder):
    pytest.importorskip("segmentation_models_pytorch")
    theirs = library_model(f"torchvision.models.{encoder}").state_dict()
    torch.save(theirs, "imagenet.pth")
    ours = deeplab_v3_plus(encoder=encoder, encoder_weights="imagenet.pth").encoder.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    affine = [
        value
        for name, value in deeplab_v3_plus(encoder=encoder, norm="gn").encoder.state_dict().items()
        if name not in theirs
    ]
    assert affine == []


def of_library(**settings):
    pytest.importorskip("segmentation_models_pytorch")
    return deeplab_v3_plus(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("make", [SmallDeepLab, pytest.param(of_library, marks=pytest.mark.nightly)])
def test_a_deeplab_segments_with_the_same_numbers_from_every_executor(tmp_path, make):
    root = write_scenes(tmp_path, size=(32, 48))
    executors = (SequentialExecutor(compile=False), VectorizedExecutor())
    modules = [segmented(make, root, executor) for executor in executors]
    assert distance(*(module.state_dict() for module in modules)) < 1e-8
    assert 0 <= modules[0].metrics["test/mean_iou"] < 1


@pytest.mark.parametrize("make", [SmallDeepLab, of_library])
def test_a_pooled_branch_without_batch_norm_trains_with_batches_of_one_image(tmp_path, make):
    root = write_scenes(tmp_path, size=(32, 48))
    with pytest.raises(ConfigurationError, match="or, for a DeepLab, pooled_norm: none"):
        segmented(make, root, SequentialExecutor(compile=False), batch_size=1)
    for pooled_norm in ("none", "gn"):
        module = segmented(
            lambda kind=pooled_norm: make(pooled_norm=kind), root, SequentialExecutor(compile=False), 1
        )
        assert all(value.isfinite().all() for value in module.state_dict().values())
        assert "BN" in norm_names(module.model)


@pytest.mark.parametrize("make", [SmallDeepLab, of_library])
def test_instance_norm_refuses_the_pooled_branch_whose_maps_have_one_pixel(make):
    images = torch.randn(2, 3, 32, 32)
    with pytest.raises(ConfigurationError, match=r"feature maps of one pixel.*pooled_norm: ln"):
        make(norm="in")(images)
    assert make(norm="in", pooled_norm="ln")(images).std() > 0


@pytest.mark.parametrize("make", [SmallDeepLab, of_library])
def test_the_pooled_branch_may_keep_batch_norm_beside_another_norm(make):
    model = make(norm="gn", pooled_norm="bn")
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) == 1
