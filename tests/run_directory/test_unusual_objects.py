"""Objects that no configuration has are told apart by what they hold, and unusual arguments start a run all the same."""

import copy
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from command_line import run
from test_description import hash_of, python_run
from torch import nn

from callbacks import FedProx, SlidingWindowFixBN
from datamodules import Digits, Shards
from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule
from fl_lightning.models import LeNet
from fl_lightning.run_directory.description import config_hash


class Decay:
    def __init__(self, factor):
        self.factor = factor

    def of(self, round_number, rounds):
        return self.factor


class Net(nn.Module):
    def __init__(self, value=1.0, tied=False):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.load_state_dict(self.a.state_dict())
        if tied:
            self.b.weight = self.a.weight
        self.register_buffer("mask", torch.tensor(value), persistent=False)


class Around(LeNet):
    def __init__(self, inner: nn.Module):
        super().__init__(num_classes=10, in_channels=1, image_size=8)
        self.inner = inner


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def lenet(change=lambda model: None):
    torch.manual_seed(0)
    model = LeNet(num_classes=10, in_channels=1, image_size=8)
    change(model)
    return model


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(2, 2)


def still(model):
    model.apply(lambda layer: layer.eval() if isinstance(layer, nn.BatchNorm2d) else None)


def net(**settings):
    torch.manual_seed(0)
    return Net(**settings)


def around(seed):
    inner = linear(seed)
    torch.manual_seed(0)
    return Around(inner)


def digits(**settings):
    return Digits(3, batch_size=10, partition=Shards(0.4), val_fraction=0.2, max_examples=300, **settings)


def loss(chosen):
    return nn.CrossEntropyLoss(weight=torch.ones(10).index_fill(0, torch.tensor(chosen), 10.0))


PAIRS = {
    "seed of the data": [lambda: {"data": digits(seed=3), "seed": 3}, lambda: {"data": digits(), "seed": 3}],
    "weights of a loss": [lambda: {"loss": loss(1)}, lambda: {"loss": loss(2)}],
    "object of a method": [lambda c=c: {"client_lr_schedule": Decay(c).of} for c in (1.0, 0.01)],
    "layers in eval mode": [lambda: {"model": lenet(still)}, lambda: {"model": lenet()}],
    "buffers that are not saved": [lambda v=v: {"model": net(value=v)} for v in (1.0, 2.0)],
    "shared parameters": [lambda t=t: {"model": net(tied=t)} for t in (True, False)],
    "a model among the arguments": [lambda s=s: {"model": around(s)} for s in (1, 2)],
    "slots": [lambda v=v: {"data": FederatedDataModule([Slots(v)])} for v in (1, 2)],
    "random generators": [lambda s=s: {"data": FederatedDataModule([np.random.default_rng(s)])} for s in (1, 2)],
}  # fmt: skip


@pytest.mark.parametrize("what", PAIRS)
def test_what_objects_hold_names_a_run(what):
    one, other = PAIRS[what]
    assert hash_of(**one()) == hash_of(**one())
    assert hash_of(**one()) != hash_of(**other())


def test_what_is_changed_before_the_first_fit_names_it_too():
    mine = python_run(rounds=1)
    before = config_hash(mine.config)
    mine.callbacks.append(FedProx(mu=5.0))
    mine.fit()
    assert mine.path.name.partition("-")[0] == config_hash(mine.config) != before


def test_a_copy_of_a_trained_method_is_trained_and_so_is_a_model_whose_checkpoints_are_gone():
    window = SlidingWindowFixBN(window=2, threshold=1e9)
    first = python_run(rounds=3, callbacks=[window])
    first.fit()
    with pytest.raises(ConfigurationError, match="SlidingWindowFixBN was trained already"):
        python_run("copy", rounds=3, callbacks=[copy.deepcopy(window)]).fit()
    plain = python_run("gone", rounds=1, callbacks=[])
    plain.fit()
    shutil.rmtree("runs/gone")
    with pytest.raises(ConfigurationError, match="the model is trained already"):
        plain.fit(resume="auto")


@dataclass
class Data(FederatedCallback):
    value: float = 1.0


def test_methods_that_cannot_be_hashed_and_lazy_layers_are_trained():
    python_run(rounds=1, callbacks=[Data()]).fit()
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    assert python_run("lazy", rounds=1, model=model, callbacks=[]).config["model"]["model"]["state_digest"]


OWN = """
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

from fl_lightning import FederatedCallback

@dataclass
class Opts:
    a: int = 1

class Pair(NamedTuple):
    a: int = 1
    b: float = 2.0

class Odd(FederatedCallback):
    def __init__(self, nan: float = float("nan"), opts: Opts = Opts(), pair: Pair = Pair(), names: set[str] = {"c", "a", "b"},
                 number: Decimal = Decimal("1.5"), steps: range = range(5), raw: bytes = b"hello"):
        self.nan = nan

def decay(round_number, rounds):
    return 0.5

other = decay
"""


def test_unusual_arguments_start_a_run(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    assert run("--trainer.max_epochs=1", "--trainer.callbacks=odd.Odd").trainer.global_step == 1
    assert run("--trainer.max_epochs=1", "--model.client_lr_schedule=odd.other").trainer.global_step == 1
