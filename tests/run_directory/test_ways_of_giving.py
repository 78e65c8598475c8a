"""Settings given in any way that the command line knows: equal runs have equal names, and a run's own file builds it again."""

from pathlib import Path

import pytest
import yaml

from tests.support.command_line import write_config
from tests.support.naming import named, named_again

OWN = '''
import enum
from torch import nn
from fl_lightning.callbacks import FedProx
from fl_lightning.datamodules import Digits
from fl_lightning.models import LeNet


class Sized(nn.Module):
    """Its outputs depend on a size that the data may not tell."""

    def __init__(self, num_classes: int = 10, image_size: int = 8, width: int | None = None):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(image_size, width or 4), nn.Linear(width or 4, num_classes))

    def forward(self, inputs):
        return self.layers(inputs)


class Wide(LeNet):
    def __init__(self, width: int = 2, **kwargs):
        super().__init__(**kwargs)
        self.width = width


def net(num_classes: int = 10, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))


def passing_on(width: int = 4, **kwargs) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, kwargs.get("num_classes", 3)))


def to_net(width: int = 5, **kwargs) -> nn.Module:
    return net(width=width, **kwargs)


class Maker:
    @staticmethod
    def make(num_classes: int = 10, width: int = 4) -> nn.Module:
        return net(num_classes, width)


class Colours(Digits):
    in_channels = 3


class Prox(FedProx):
    def __init__(self, scale: float = 1.0, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale


class Colour(str, enum.Enum):
    red = "light red"
    blue = "light blue"


class Number(enum.IntEnum):
    one = 1


class Painted(FedProx):
    def __init__(self, word: str = Colour.red, number: float = Number.one, colour: Colour = Colour.red, other=Colour.red):
        super().__init__()
        self.word, self.number, self.colour, self.other = word, number, colour, other
'''

POINTS = {
    "data": {"class_path": "Gaussians", "init_args": {"num_clients": 2}},
    "trainer.callbacks": None,
}
LR = "--model.client_optimizer.lr"


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_given.py").write_text(OWN)


def overlay(**settings):
    Path("overlay.yaml").write_text(yaml.safe_dump(settings))
    return ["--config", "overlay.yaml"]


def in_all_ways():
    """Names of cases, and for each: ways of giving the same, and something else."""
    lr = {"model": {"client_optimizer": {"init_args": {"lr": 0.1}}}}
    fixbn = "--trainer.callbacks+=FixBN"
    again = "--trainer.callbacks.freeze_round=3"
    timer, hour = (
        "--trainer.callbacks=lightning.pytorch.callbacks.Timer",
        "--trainer.callbacks.duration=00:01:00:00",
    )
    painted = "--trainer.callbacks=mine_given.Painted"
    return {
        "values": (
            [
                [LR, 0.1],
                ["--model.client_optimizer.init_args.lr=0.1"],
                ["--model.client_optimizer.init_args.lr=1e-1"],
                ["--model.client_optimizer={class_path: torch.optim.SGD, init_args: {lr: 0.1}}"],
                ["--model.client_optimizer={class_path: torch.optim.sgd.SGD, init_args: {lr: 0.1, momentum: 0}}"],
                lr,
            ],
            [[LR, 0.2], ["--model.client_optimizer=Adam", LR, 0.1]],
        ),
        "callbacks": (
            [
                ["--trainer.callbacks=FixBN", again],
                ["--trainer.callbacks=fl_lightning.callbacks.FixBN", again],
                ["--trainer.callbacks=fl_lightning.callbacks.fixbn.FixBN", again],
                ["--trainer.callbacks=[{class_path: FixBN, init_args: {freeze_round: 3}}]"],
                ["--trainer.callbacks=[]", fixbn, again],
                ["--trainer.callbacks=null", "--trainer.callbacks+={class_path: fl_lightning.callbacks.fixbn.FixBN, init_args: {freeze_round: 3}}"],
                {"trainer": {"callbacks": [{"class_path": "FixBN", "init_args": {"freeze_round": 3}}]}},
                {"trainer": {"callbacks": {"class_path": "FixBN", "init_args": {"freeze_round": 3}}}},
                {"trainer": {"callbacks": [{"class_path": "fl_lightning.callbacks.fixbn.FixBN", "dict_kwargs": {"freeze_round": 3}}]}},
                ["--trainer.callbacks=FixBN", again, "--trainer.callbacks+=RoundProgress"],
            ],
            [["--trainer.callbacks=FixBN", "--trainer.callbacks.freeze_round=4"], ["--trainer.callbacks+=FedProx"], []],
        ),
        "appended": (
            [
                ["--trainer.callbacks+=FedProx"],
                ["--trainer.callbacks+=[FedProx]"],
                ["--trainer.callbacks+=FedProx", "--trainer.callbacks.mu=0.01"],
                {"trainer": {"callbacks+": ["fl_lightning.callbacks.FedProx"]}},
                {"trainer": {"callbacks+": {"class_path": "FedProx"}}},
            ],
            [["--trainer.callbacks+=FedProx", "--trainer.callbacks.mu=0.02"], ["--trainer.callbacks=FedProx"]],
        ),
        "null": (
            [
                [],
                ["--model.participation=1.0"],
                ["--model.statistics_aggregator=null"],
                ["--trainer.precision=null"],
                {"model": {"aggregator": None, "bn_momentum": None}},
            ],
            [["--model.participation=2"], ["--trainer.precision=64-true"]],
        ),
        "links": (
            [
                [],
                ["--model.model.num_classes=10"],
                ["--model.model.init_args.in_channels=1"],
                ["--model.model.dict_kwargs.num_classes=10"],
                ["--model.model.image_size=8"],
                ["--model.model=fl_lightning.models.LeNet"],
                ["--model.model=fl_lightning.models.lenet.LeNet"],
                {"model": {"model": {"class_path": "LeNet", "init_args": {"num_classes": 10, "image_size": 8}}}},
            ],
            [["--model.model.norm=gn"], ["--model.model=mine_given.net"]],
        ),
        "own class": (
            [
                ["--model.model=mine_given.Wide"],
                ["--model.model=mine_given.Wide", "--model.model.width=2"],
                ["--model.model=mine_given.Wide", "--model.model.dict_kwargs.norm=bn"],
                ["--model.model=mine_given.Wide", "--model.model.num_classes=10"],
            ],
            [["--model.model=mine_given.Wide", "--model.model.width=3"], ["--model.model=mine_given.Wide", "--model.model.norm=gn"]],
        ),
        "own callback": (
            [
                ["--trainer.callbacks=mine_given.Prox"],
                ["--trainer.callbacks=mine_given.Prox", "--trainer.callbacks.mu=0.01"],
                {"trainer": {"callbacks": [{"class_path": "mine_given.Prox", "dict_kwargs": {"mu": 0.01, "scale": 1}}]}},
            ],
            [["--trainer.callbacks=mine_given.Prox", "--trainer.callbacks.mu=0.02"], ["--trainer.callbacks=mine_given.Prox", "--trainer.callbacks.scale=2"], ["--trainer.callbacks=FedProx"]],
        ),
        "enum of another class": (
            [[timer, hour], [timer, hour, "--trainer.callbacks.interval=step"]],
            [[timer, hour, "--trainer.callbacks.interval=epoch"]],
        ),
        "own enum": (
            [
                [painted],
                [painted, "--trainer.callbacks.word=light red"],
                [painted, "--trainer.callbacks.number=1"],
                [painted, "--trainer.callbacks.colour=red", "--trainer.callbacks.other=red"],
            ],
            [[painted, "--trainer.callbacks.word=red"], [painted, "--trainer.callbacks.colour=blue"], [painted, "--trainer.callbacks.other=blue"]],
        ),
        "function": (
            [
                ["--model.model=mine_given.net"],
                ["--model.model=mine_given.net", "--model.model.num_classes=10"],
                ["--model.model=mine_given.net", "--model.model.width=4"],
                {"model": {"model": {"class_path": "mine_given.net", "init_args": {"width": 4}}}},
            ],
            [["--model.model=mine_given.net", "--model.model.width=5"]],
        ),
        "function with kwargs": (
            [
                ["--model.model=mine_given.passing_on"],
                ["--model.model=mine_given.passing_on", "--model.model.num_classes=10"],
                ["--model.model=mine_given.passing_on", "--model.model.dict_kwargs.num_classes=10"],
            ],
            [["--model.model=mine_given.passing_on", "--model.model.width=5"], ["--model.model=mine_given.to_net"]],
        ),
        "function that hands on": (
            [
                ["--model.model=mine_given.to_net"],
                ["--model.model=mine_given.to_net", "--model.model.num_classes=10"],
            ],
            [["--model.model=mine_given.to_net", "--model.model.width=6"]],
        ),
        "static factory": (
            [
                ["--model.model=mine_given.Maker.make"],
                ["--model.model=mine_given.Maker.make", "--model.model.num_classes=10"],
                ["--model.model=mine_given.Maker.make", "--model.model.width=4"],
            ],
            [["--model.model=mine_given.Maker.make", "--model.model.width=5"], ["--model.model=mine_given.net"]],
        ),
        "data": (
            [
                ["--data.num_clients=4"],
                {"data": {"init_args": {"num_clients": 4}}},
                ["--data.num_clients=4", "--data.seed=0"],
                ["--data.num_clients=4", "--data.partition=fl_lightning.datamodules.shards.Shards", "--data.partition.class_fraction=0.4"],
            ],
            [["--data.num_clients=5"], ["--data.num_clients=4", "--data.partition=Dirichlet", "--data.partition.alpha=0.4"]],
        ),
    }  # fmt: skip


def arguments_of(way):
    return overlay(**way) if isinstance(way, dict) else way


@pytest.mark.parametrize("case", in_all_ways())
def test_equal_runs_have_equal_names_and_their_file_builds_them_again(case):
    equal, others = in_all_ways()[case]
    found = [named(*arguments_of(way)) for way in equal]
    for way, one in zip(equal, found, strict=True):
        assert (one.hash, one.settings) == (found[0].hash, found[0].settings), way
    other = [named(*arguments_of(way)) for way in others]
    assert len({found[0].hash, *(one.hash for one in other)}) == 1 + len(other)
    files = {yaml.safe_dump(one.config): one for one in (*found, *other)}
    for one in files.values():
        again = named_again(one)
        assert (again.hash, again.settings) == (one.hash, one.settings)


def test_what_the_data_do_not_decide_names_a_run_and_its_file_builds_it_again():
    write_config(POINTS)
    sized = ("--model.model=mine_given.Sized", "--model.model.image_size")
    found = {size: named(*sized, size) for size in (16, 32)}
    assert found[16].hash != found[32].hash
    for size, one in found.items():
        assert one.config["model"]["model"]["init_args"]["image_size"] == size
        again = named_again(one)
        assert again.hash == one.hash
        assert again.settings == one.settings
        assert again.model.layers[1].in_features == size


FAMILIES = (
    *(
        "alexnet",
        "convnext_tiny",
        "densenet121",
        "efficientnet_b0",
        "googlenet",
        "mnasnet0_5",
    ),
    *("mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_y_400mf", "resnet18"),
    *("squeezenet1_1", "vgg11"),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_torchvision_gets_an_output_for_each_class(family):
    model = [f"--model.model=torchvision.models.{family}"]
    usual, given = named(*model), named(*model, "--model.model.num_classes=10")
    assert [*usual.model.parameters()][-1].shape[0] == 10
    assert (usual.hash, usual.settings) == (given.hash, given.settings)
    assert named_again(usual).hash == usual.hash


def test_a_function_whose_default_is_a_class_that_needs_arguments_is_made_by_library_model():
    write_config({"data.class_path": "mine_given.Colours"})
    function = "torchvision.models.shufflenet_v2_x0_5"
    model = ["--model.model=fl_lightning.models.library_model", f"--model.model.function={function}"]
    usual, given = named(*model), named(*model, "--model.model.num_classes=10")
    assert [*usual.model.parameters()][-1].shape[0] == 10
    assert (usual.hash, usual.settings) == (given.hash, given.settings)
