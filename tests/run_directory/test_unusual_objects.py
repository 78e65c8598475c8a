"""Objects that no configuration has are told apart by what they hold, and unusual arguments start a run all the same."""

import copy
import functools
import json
import logging
import shutil
from dataclasses import dataclass

import numpy as np
import PIL.Image
import pytest
import torch
from command_line import run
from test_description import hash_of, python_run
from torch import nn

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule
from fl_lightning.attacks import SignFlip
from fl_lightning.callbacks import Byzantine, FedProx, SlidingWindowFixBN
from fl_lightning.datamodules import Digits, Shards
from fl_lightning.experiments.run_directory.describe import run_title
from fl_lightning.experiments.run_directory.description import config_hash
from fl_lightning.models import LeNet


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
    "dropout in eval mode": [lambda: {"model": lenet(nn.Module.eval)}, lambda: {"model": lenet(still)}],
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
    with pytest.raises(ConfigurationError, match="SlidingWindowFixBN holds the state of an earlier run"):
        python_run("copy", rounds=3, callbacks=[copy.deepcopy(window)]).fit()
    plain = python_run("gone", rounds=1, callbacks=[])
    plain.fit()
    shutil.rmtree("runs/gone")
    with pytest.raises(ConfigurationError, match="the model is trained already"):
        plain.fit(resume="auto")


@dataclass
class Data(FederatedCallback):
    value: float = 1.0


def test_methods_that_cannot_be_hashed_are_trained():
    python_run(rounds=1, callbacks=[Data()]).fit()


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


def by_size(rate):
    def make(parameters):
        kernels = [x for x in parameters if x.ndim > 1]
        rest = [x for x in parameters if x.ndim <= 1]
        return torch.optim.SGD([{"params": kernels, "weight_decay": rate}, {"params": rest}], lr=1.0)

    return make


def by_number(large, small):
    def rate(parameter):
        return large if parameter.numel() > 1000 else small

    def make(given):
        groups = [x if isinstance(x, dict) else {"params": [x]} for x in given]
        return torch.optim.SGD([{**x, "lr": rate(x["params"][0])} for x in groups], lr=0.1)

    return make


def chain(length, last):
    """Functions each of which calls all before it."""
    space = {"last": last, "__name__": "__main__"}
    for number in range(length):
        calls = " + ".join(f"f{other}(n)" for other in range(number)) or "last"
        exec(f"def f{number}(n, rounds=0): return {calls}", space)  # noqa: S102  # the text beside it
    return space[f"f{length - 1}"]


def in_rounds(value):
    """Two functions that call each other, one of them with a value."""

    def one(round_number, rounds):
        return other(round_number, rounds) if round_number < 0 else 1.0

    def other(round_number, rounds):
        return one(-1, rounds) * value

    return one


class Scaled:
    def __init__(self, factor):
        self.factor = factor
        self.of_itself = self.at

    def at(self, round_number, rounds):
        return self.factor


@dataclass
class Called:
    factor: float

    def __call__(self, round_number, rounds, power=1):
        return self.factor**power


class Singular(FedProx):
    def __new__(cls, *args, **settings):
        return super().__new__(cls)


def image(value):
    return PIL.Image.new("L", (2, 2), value)


def sparse(value):
    return torch.eye(3).mul(value).to_sparse()


MORE = {
    "compiled models": [lambda: {"model": lenet()}, lambda: {"model": torch.compile(lenet())}],
    "groups of a server optimizer": [lambda r=r: {"server_optimizer": by_size(r)} for r in (0.0, 0.1, 0.2)],
    "groups of a client optimizer": [
        lambda r=r: {"client_optimizer": by_number(*r)} for r in ((0.1, 0.1), (0.1, 0.2), (0.2, 0.1))
    ],
    "functions that share functions": [lambda v=v: {"client_lr_schedule": chain(24, v)} for v in (1, 2)],
    "functions that call each other": [lambda v=v: {"client_lr_schedule": in_rounds(v)} for v in (1, 2)],
    "an object that holds its own method": [lambda c=c: {"client_lr_schedule": Scaled(c).at} for c in (1, 2)],
    "a partial of an object": [
        lambda p=p: {"client_lr_schedule": functools.partial(Called(0.5), power=p)} for p in (1, 2)
    ],
    "an object of a partial": [
        lambda c=c: {"client_lr_schedule": functools.partial(Called(c), power=1)} for c in (0.5, 0.1)
    ],
    "arguments that __new__ drops": [lambda m=m: {"callbacks": [Singular(mu=m)]} for m in (0.1, 0.2)],
    "images": [lambda v=v: {"data": FederatedDataModule([image(v)])} for v in (1, 2)],
    "sparse tensors": [lambda v=v: {"data": FederatedDataModule([sparse(v)])} for v in (1, 2)],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", MORE)
def test_objects_that_are_met_again_or_decide_later_name_a_run(what):
    names = [hash_of(**one()) for one in MORE[what]]
    assert len({*names}) == len(names)
    assert [hash_of(**one()) for one in MORE[what]] == names


@pytest.mark.slow
def test_a_compiled_model_is_trained_and_told_by_its_class():
    run = python_run(rounds=1, model=torch.compile(lenet(), backend="aot_eager"), callbacks=[])
    run.fit()
    assert json.loads((run.path / "result.json").read_text())["model"] == "LeNet"
    assert run_title(run.module)[1].startswith("LeNet (")


LOG = logging.getLogger(__name__)


def logs(round_number, rounds):
    LOG.info("round %s", round_number)
    return 1.0


def test_a_logger_is_told_by_its_name(monkeypatch):
    monkeypatch.setattr(logs, "__module__", "__main__")
    before = hash_of(client_lr_schedule=logs)
    LOG.addHandler(logging.StreamHandler())
    assert hash_of(client_lr_schedule=logs) == before
    monkeypatch.setitem(logs.__globals__, "LOG", logging.getLogger("other"))
    assert hash_of(client_lr_schedule=logs) != before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:FutureWarning")  # until torch drops it
def test_what_no_name_can_hold_is_refused_in_one_line():
    with pytest.raises(
        ConfigurationError, match=r"Byzantine.clients: an iterator \(generator\) can be read once"
    ):
        hash_of(callbacks=[Byzantine(SignFlip(), clients=(number for number in [1]))])
    with pytest.raises(ConfigurationError, match=r"model: torch\.jit\.script hides the layers of LeNet"):
        hash_of(model=torch.jit.script(lenet()))
