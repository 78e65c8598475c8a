"""A function that returns a model is named in a configuration as a class is."""

import sys
from pathlib import Path

import pytest
import yaml

from fl_lightning.batch_norm.layers import batch_norm_layers
from tests.support.command_line import message_of, run, write_config
from tests.support.helpers import write_cifar10_folders

FUNCTIONS = """
from collections.abc import Callable
from torch import nn

def activated(num_classes: int = 7, first: Callable[..., nn.Module] = nn.Identity) -> nn.Module:
    return nn.Sequential(first(), *small(num_classes))

def small(num_classes: int = 7, width: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(36 * width, num_classes)
    )

def fixed(width: int = 4) -> nn.Module:
    return small(10, width)

def by_name(model_name: str, pretrained: bool = False, **kwargs) -> nn.Module:
    return {"small": small}[model_name](**kwargs)  # as timm's: what it passes on cannot be read

def unsaid(num_classes=10):
    return small(num_classes)

class Three(nn.Sequential):
    def __init__(self, num_classes: int = 10, in_channels: int = 3):
        conv = nn.Conv2d(in_channels, 4, 3)
        super().__init__(conv, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, num_classes))

def three(num_classes: int = 10) -> nn.Module:
    return Three(num_classes)

def wide(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes))
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("functions", None)


ONE = ("--trainer.max_epochs", 1)


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        (("functions.small",), (10, 144)),
        (("functions.activated",), (10, 144)),
        (("functions.small", "--model.model.width", 3), (10, 108)),
        (("functions.fixed", "--model.model.width", 2), (10, 72)),
        (("functions.by_name", "--model.model.model_name", "small"), (10, 144)),
        (
            ("functions.by_name", "--model.model.model_name", "small", "--model.model.dict_kwargs.width", 2),
            (10, 72),
        ),
    ],
)
def test_the_data_decide_the_classes_of_a_function_that_takes_them(settings, shape):
    cli = run("--model.model", *settings, *ONE)
    assert tuple(cli.model.model[-1].weight.shape) == shape
    again = run(*ONE, config=str(cli.attempt.config))  # the saved configuration names it, too
    assert tuple(again.model.model[-1].weight.shape) == shape


def test_the_data_decide_the_channels_of_a_model_of_ones_own_that_takes_them():
    cli = run("--model.model", "functions.Three", *ONE)
    assert cli.model.model[0].in_channels == 1


@pytest.mark.parametrize("evaluated", [[], ["--trainer.limit_val_batches", 0]])
@pytest.mark.parametrize(
    ("model", "layer"), [("three", "'0' is Conv2d(3, 4,"), ("wide", "'1' is Linear(in_features=784,")]
)
def test_inputs_that_a_model_refuses_are_named_with_its_first_layer(model, layer, evaluated, capsys):
    arguments = ["--model.model", f"functions.{model}", "--trainer.callbacks=[]", *ONE, *evaluated]
    message = message_of(capsys, lambda: run(*arguments))
    size = 10 if evaluated else 60
    assert f" cannot take inputs of the shape [{size}, 1, 8, 8]: its first layer {layer}" in message
    assert "in_channels" in message


@pytest.mark.slow
def test_resnet18_of_torchvision_is_trained_and_resumed_from_a_yaml():
    write_cifar10_folders()
    data = {"class_path": "CIFAR10", "init_args": {"image_size": 8, "num_clients": 2, "batch_size": 4}}
    write_config({"model.model": {"class_path": "torchvision.models.resnet18"}, "data": data})
    cli = run(*ONE)
    assert cli.model.model.fc.out_features == 10
    config = yaml.safe_load(Path(cli.attempt.config).read_text())
    assert config["model"]["model"]["class_path"] == "torchvision.models.resnet18"
    assert run("--ckpt_path", "last", "--trainer.max_epochs", 2).trainer.global_step == 2


@pytest.mark.slow
def test_a_model_of_torchvision_takes_another_norm_from_a_yaml():
    write_cifar10_folders()
    data = {"class_path": "CIFAR10", "init_args": {"image_size": 32, "num_clients": 2, "batch_size": 4}}
    settings = {"function": "torchvision.models.mobilenet_v2", "norm": "gn", "settings": {"width_mult": 0.25}}
    model = {"class_path": "fl_lightning.models.library_model", "init_args": settings}
    write_config({"model.model": model, "data": data, "trainer.callbacks": []})
    cli = run(*ONE)
    assert cli.model.model.classifier[1].out_features == 10
    assert not batch_norm_layers(cli.model.model)
    assert run("--ckpt_path", "last", "--trainer.max_epochs", 2).trainer.global_step == 2
    config = yaml.safe_load(Path(cli.attempt.config).read_text())
    assert config["model"]["model"]["class_path"] == "fl_lightning.models.library_model"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ("functions.small", "--model.model.widht", 3),
            "small: there is no setting 'widht' among num_classes, width; did you mean width?",
        ),
        (
            ("functions.small", "--model.model.num_classes", 5),
            "model.model.init_args.num_classes: 5 contradicts the data set, which decides: its num_classes is 10; leave it out",
        ),
        (
            ("functions.unsaid",),
            (
                "model.model: functions.unsaid is no Module, nor a function annotated to return one; give one that this setting takes, "
                "or the dotted path of your own"
            ),
        ),
    ],
)
def test_what_a_function_does_not_take_is_one_line(settings, line, capsys):
    assert message_of(capsys, lambda: run("--model.model", *settings, *ONE)) == f"error: {line}\n"


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "ShuffleNetV2"])
def test_a_setting_that_is_a_class_by_default_names_the_way_out(name, capsys):
    model = f"torchvision.models.{name}"
    for changes, arguments in (({}, ["--model.model", model]), ({"model.model": {"class_path": model}}, [])):
        write_config(changes)
        message = message_of(capsys, lambda arguments=arguments: run(*arguments))
        words = (
            f"model.model: {name}",
            "inverted_residual",
            "library_model with function: torchvision.models.",
        )
        assert [word for word in words if word not in message] == []
