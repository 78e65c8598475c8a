"""Code of one's own: an edit makes stale or renames the cells that use it, and no others, in YAML and in Python."""

import functools
import importlib
import itertools
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_lightning import FederatedDataModule, FederatedModule, Run
from fl_lightning.datamodules import Digits, FromFile
from fl_lightning.experiments.run_directory.description import config_hash
from fl_lightning.experiments.run_directory.source import provenance
from fl_lightning.experiments.studies.cells import Cell
from fl_lightning.models import LeNet

FILES = {
    "mine_methods.py": """
from fl_lightning.callbacks import FedProx
from mine_helper import strength

class Method(FedProx):
    def __init__(self, mu: float = 0.5):
        super().__init__(mu * strength())

class Outer:
    class Prox(FedProx):
        pass
""",
    "mine_helper.py": "def strength(): return 1\n",
    "mine_models.py": """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, inputs):
        return self.layers(inputs)
""",
    "mine_factory.py": """
from torch import nn
from mine_models import Net

class Outer:
    @staticmethod
    def make(num_classes: int = 10) -> nn.Module:
        return Net(num_classes)
""",
    "mine_task.py": """
from fl_lightning import Classification

class Task(Classification):
    pass
""",
    "mine_loss.py": """
from torch.nn.functional import cross_entropy

def loss(outputs, targets):
    return cross_entropy(outputs, targets)
""",
    "mine_local.py": """
from torch import nn
from fl_lightning.callbacks import FedProx

def helper(): return 1

def make():
    class Local(FedProx):
        def on_round_end(self, trainer, pl_module, cohort):
            return helper()
    return Local()

shown = lambda r, n: helper()

class Layer(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + helper()
""",
    "mine_data.py": """
from fl_lightning.datamodules import Digits

class Mine(Digits):
    pass
""",
}
USES = {
    "usual": (),
    "method": ("mine_methods.py", "mine_helper.py"),
    "nested": ("mine_methods.py", "mine_helper.py"),
    "model": ("mine_models.py",),
    "factory": ("mine_factory.py", "mine_models.py"),
    "task": ("mine_task.py",),
    "loss": ("mine_loss.py",),
    "data": ("mine_data.py",),
    "local class": ("mine_local.py",),
    "lambda": ("mine_local.py",),
    "layers": ("mine_local.py",),
    "changed layer": ("mine_local.py",),
    "partition": ("parts.json",),
    "weights": ("start.pt",),
}
DIGITS = {"num_clients": 2, "batch_size": 8, "max_examples": 60}


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in FILES:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    for name, text in FILES.items():
        Path(name).write_text(text)
    importlib.invalidate_caches()
    Path("parts.json").write_text("{}")
    Path("start.pt").write_bytes(b"one")


def in_yaml():
    """A resolved configuration for each use."""
    lenet = {"class_path": "fl_lightning.models.LeNet"}
    data = {"class_path": "fl_lightning.datamodules.Digits", "init_args": DIGITS}
    spread = {"class_path": "fl_lightning.datamodules.FromFile", "init_args": {"path": "parts.json"}}
    changes = {
        "usual": {},
        "method": {"callbacks": [{"class_path": "mine_methods.Method"}]},
        "nested": {"callbacks": [{"class_path": "mine_methods.Outer.Prox"}]},
        "model": {"model": {"class_path": "mine_models.Net"}},
        "factory": {"model": {"class_path": "mine_factory.Outer.make"}},
        "task": {"task": {"class_path": "mine_task.Task"}},
        "loss": {"loss": "mine_loss.loss"},
        "data": {"data": {"class_path": "mine_data.Mine", "init_args": DIGITS}},
        "partition": {"data": {"class_path": "fl_lightning.datamodules.Digits", "init_args": {**DIGITS, "partition": spread}}},
        "weights": {"initial_weights": "start.pt"},
    }  # fmt: skip
    found = {}
    for use, changed in changes.items():
        callbacks, own = changed.pop("callbacks", None), changed.pop("data", data)
        found[use] = {
            "name": "own",
            "run_root": "runs",
            "seed_everything": 0,
            "model": {"model": lenet, "local_steps": 1, **changed},
            "data": own,
            "trainer": {"max_epochs": 2, "callbacks": callbacks},
        }
    return found


def in_python():
    """What a script would run, for each use."""
    torch.manual_seed(0)
    load = importlib.import_module
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    def run(*callbacks, model=None, data=Digits, partition=None, **settings):
        own = data(**DIGITS, **({"partition": partition} if partition else {}))
        module = FederatedModule(model or LeNet(10, 1, 8), sgd, local_steps=1, **settings)
        return Run(module, own, callbacks=callbacks, max_epochs=2)

    return {
        "usual": run(),
        "method": run(load("mine_methods").Method()),
        "nested": run(load("mine_methods").Outer.Prox()),
        "model": run(model=load("mine_models").Net()),
        "factory": run(model=load("mine_factory").Outer.make()),
        "task": run(task=load("mine_task").Task()),
        "loss": run(loss=load("mine_loss").loss),
        "data": run(data=load("mine_data").Mine),
        "local class": run(load("mine_local").make()),
        "lambda": run(client_lr_schedule=load("mine_local").shown),
        "layers": run(model=nn.Sequential(nn.Flatten(), load("mine_local").Layer(64, 10))),
        "changed layer": run(model=changed(LeNet(10, 1, 8), load("mine_local").Layer)),
        "partition": run(partition=FromFile("parts.json")),
        "weights": run(initial_weights="start.pt"),
    }


def changed(model, layer):
    model.classifier = layer(model.features[0].out_channels, 10)
    return model


def names(way):
    """The hash and the digest of the source for each use."""
    if way == "yaml":
        cells = {use: Cell({}, 0, config) for use, config in in_yaml().items()}
        return {use: (one.directory.stem, one.now) for use, one in cells.items()}
    return {use: (config_hash(one.config), provenance(one._made)) for use, one in in_python().items()}


CLOCK = itertools.count(1)


def edited(name, text):
    Path(name).write_bytes(text.encode())
    os.utime(name, ns=(0, next(CLOCK)))  # a digest of a file is kept until its time differs


def with_words(text):
    """The same code with a comment and docstrings of its module, of a class and of a function."""
    for line in ("class Prox(FedProx):\n", "mu: float = 0.5):\n"):
        text = text.replace(line, f'{line}        """Words."""\n')
    return f'"""Words."""\n# a comment\n\n{text}'


@pytest.mark.parametrize("way", ["yaml", "python"])
def test_an_edit_counts_where_it_is_used_and_words_nowhere(way):
    before = names(way)
    for name, text in FILES.items():
        edited(name, with_words(text))
    assert names(way) == before
    for name in (*FILES, "parts.json", "start.pt"):
        whole = Path(name).read_text()
        edited(name, whole + "\nMORE = 1\n" if name in FILES else "[1]")
        after = names(way)
        edited(name, whole)
        for use in before:
            # a factory is not part of what it has made
            files = USES["model" if (use, way) == ("factory", "python") else use]
            renamed, stale = (old != new for old, new in zip(before[use], after[use], strict=True))
            assert stale == (name in files and name in FILES), (name, use)
            assert renamed == (name in files and name not in FILES), (name, use)
    assert names(way) == before


SCRIPT = """
import functools
import lightning as L
from torch import nn
from torch.nn.functional import cross_entropy
from fl_lightning.callbacks import FedProx
from fl_lightning.models import LeNet

FACTOR = 1.0

def helper(value):
    return value * FACTOR

def loss(outputs, targets):
    return helper(cross_entropy(outputs, targets))

def make_loss(scale):
    def of(outputs, targets):
        def inner(value):
            return value + 0
        return inner(scale * cross_entropy(outputs, targets))
    return of

class Method(FedProx):
    def __init__(self, mu: float = 0.5):
        super().__init__(mu)

    @property
    def double(self):
        return helper(2)

def times(factor):
    def decorate(function):
        @functools.wraps(function)
        def called(*arguments):
            return factor * function(*arguments)
        return called
    return decorate

@times(5)
def decorated(outputs, targets):
    return cross_entropy(outputs, targets)

class Samples:
    spread = 1.0

    def __getitem__(self, index):
        return index - 1

class Client(L.LightningDataModule):
    def __init__(self, samples):
        super().__init__()
        self.samples = samples

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, inputs):
        return self.layers(inputs)

class Layer(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + 7

def layers():
    return nn.Sequential(nn.Flatten(), Layer(64, 10))

def make_class():
    class Local(FedProx):
        def on_round_end(self, trainer, pl_module, cohort):
            return helper(3)
    return Local

def documented(outputs, targets):
    class Inner:
        places = 1
    return cross_entropy(outputs, targets) * Inner.places * (1 in {1, 2})
"""


def of_script(monkeypatch, text):
    """The hashes of runs of a script or notebook whose code is this."""
    script = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec(text, vars(script))  # noqa: S102  # the text is SCRIPT, or an edit of it
    sgd = functools.partial(torch.optim.SGD, lr=0.1)

    def run(*callbacks, model=None, clients=(), **settings):
        torch.manual_seed(0)
        module = FederatedModule(model() if model else LeNet(10, 1, 8), sgd, local_steps=1, **settings)
        data = FederatedDataModule(clients) if clients else Digits(**DIGITS)
        return config_hash(Run(module, data, callbacks=callbacks, max_epochs=2).config)

    return {
        "usual": run(),
        "loss": run(loss=script.loss),
        "class in a function": run(loss=script.documented),
        "decorated": run(loss=script.decorated),
        "closure": run(loss=script.make_loss(2)),
        "lambda": run(client_lr_schedule=eval("lambda r, n: helper(r)", vars(script))),
        "method": run(script.Method()),
        "local class": run(script.make_class()()),
        "model": run(model=script.Net),
        "layers": run(model=script.layers),
        "samples": run(clients=[script.Client(script.Samples())]),
    }


@pytest.mark.parametrize(
    ("old", "new", "renamed"),
    [
        ("FACTOR = 1.0", "FACTOR = 2.0", {"loss", "lambda", "method", "local class"}),
        ("return value * FACTOR", "return FACTOR + value", {"loss", "lambda", "method", "local class"}),
        ("return value + 0", "return value + 1", {"closure"}),
        ("return helper(2)", "return helper(4)", {"method"}),
        ("return helper(3)", "return helper(4)", {"local class"}),
        ("return self.layers(inputs)", "return -self.layers(inputs)", {"model"}),
        ("inputs) + 7", "inputs) + 8", {"layers"}),
        ("@times(5)", "@times(6)", {"decorated"}),
        ("return index - 1", "return index - 2", {"samples"}),
        ("spread = 1.0", "spread = 2.0", {"samples"}),
        ("places = 1", "places = 2", {"class in a function"}),
        ("in {1, 2}", "in {1, 3}", {"class in a function"}),
        ("    class Inner:", '    """Words."""\n    class Inner:\n        """Words."""', set()),
        ("mu: float = 0.5):", "mu: float = 0.25):", {"method"}),
        ("FACTOR = 1.0", "FACTOR = 1.0  # a comment\n\n", set()),
        ("    return value * FACTOR", '    """Words."""\n    return value * FACTOR', set()),
        ("class Net(nn.Module):", 'class Net(nn.Module):\n    """Words."""\n', set()),
        ("            return helper(3)", '            """Words."""\n            return helper(3)', set()),
        ("            return value + 0", '            """Words."""\n            return value + 0', set()),
        ("class Method(FedProx):", 'class Method(FedProx):\n    """Words."""\n', set()),
    ],
)  # fmt: skip
def test_code_of_a_script_counts_by_what_it_does(monkeypatch, old, new, renamed):
    before, after = of_script(monkeypatch, SCRIPT), of_script(monkeypatch, SCRIPT.replace(old, new))
    assert {use for use in before if before[use] != after[use]} == renamed
