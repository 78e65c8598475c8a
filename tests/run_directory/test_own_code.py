"""Code of one's own: an edit changes the versions of the cells that use it, and of no others. A file that a setting names renames them."""

import gc
import importlib
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from fl_lightning import FederatedModule, Run
from fl_lightning.datamodules import Digits
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


def names():
    """The name and the versions of the code for each use."""
    cells = {use: Cell({}, 0, config) for use, config in in_yaml().items()}
    return {use: (one.directory.stem, one.now) for use, one in cells.items()}


CLOCK = itertools.count(1)


def edited(name, text):
    Path(name).write_bytes(text.encode())
    os.utime(name, ns=(0, next(CLOCK)))  # a digest of a file is kept until its time differs


def test_an_edit_counts_where_it_is_used():
    before = names()
    for name in (*FILES, "parts.json", "start.pt"):
        whole = Path(name).read_text()
        edited(name, whole + "\nMORE = 1\n" if name in FILES else "[1]")
        after = names()
        edited(name, whole)
        for use in before:
            renamed, other = (old != new for old, new in zip(before[use], after[use], strict=True))
            assert other == (name in USES[use] and name in FILES), (name, use)
            assert renamed == (name in USES[use] and name not in FILES), (name, use)
    assert names() == before


PACKAGE = {
    "lazy/__init__.py": """
def __getattr__(name):
    import importlib
    if name in ("Mine", "scale"):
        return getattr(importlib.import_module("lazy._impl"), name)
    raise AttributeError(name)
""",
    "lazy/_impl.py": """
from fl_lightning.callbacks import FedProx
from lazy.rates import rate
def scale(): return rate()
class Mine(FedProx): pass
""",
    "lazy/rates.py": "def rate(): return 1\n",
    "lazy/_other.py": "class Other: pass\n",
    "eager/__init__.py": """
from eager.first import First as Mine
from eager.second import *
from . import third
try:
    from eager.fast import work
except ImportError:
    from eager.slow import work
""",
    "eager/first.py": "from lazy import scale\nfrom eager.third import x\nclass First: pass\ndef f():\n    from eager import work, FACTOR\n",
    "eager/second.py": "FACTOR = 1\nclass Second: pass\n",
    "eager/third.py": "import sched, trace\nfrom trace import Mine as Another\nx = 1\n",
    "eager/fast.py": "def work(): return 1\n",
    "eager/slow.py": "def work(): return 2\n",
    "namespace/inner.py": "import namespace.deeper\nclass Mine: pass\n",
    "namespace/deeper.py": "",
    "trace.py": "class Mine: pass\n",
    "sched.py": "class Mine: pass\n",
}
USED = {
    "lazy.Mine": {"lazy/_impl.py", "lazy/rates.py"},
    "lazy._other.Other": {"lazy/_other.py"},
    # try and except: the module counts that chooses, with all that it imports
    "eager.Mine": {"eager/__init__.py", "eager/first.py", "eager/second.py", "eager/third.py", "eager/fast.py", "eager/slow.py",
                   "lazy/_impl.py", "lazy/rates.py", "trace.py", "sched.py"},
    "eager.Second": {"eager/second.py"},
    "eager.third.Another": {"trace.py"},
    "namespace.inner.Mine": {"namespace/inner.py", "namespace/deeper.py"},
    "trace.Mine": {"trace.py"},
    "sched.Mine": {"sched.py"},
}  # fmt: skip


@pytest.fixture
def packages(tmp_path, monkeypatch):
    known = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in PACKAGE}
    for name in {*known, *(name.partition(".")[0] for name in known)} & {*sys.modules}:
        monkeypatch.delitem(sys.modules, name)
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    importlib.invalidate_caches()
    yield
    for name in known & {*sys.modules}:
        del sys.modules[name]
    gc.collect()  # else a short class name of a later test is looked up among these classes


def files_of(path):
    """The files whose edit changes the versions of a callback of this class."""
    config = {"trainer": {"callbacks": [{"class_path": path}]}}
    before, found = provenance(config), set()
    for name, text in PACKAGE.items():
        Path(name).write_text(f"{text}\nMORE = 1\n")
        after = provenance(config)
        if after != before:
            module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            assert {key for key in before if before[key] != after[key]} == {module}
            found.add(name)
        Path(name).write_text(text)
    return found


@pytest.mark.parametrize("path", USED)
@pytest.mark.parametrize("imported", [False, True])
def test_the_files_of_the_module_that_defines_a_class_count_whatever_they_are_called(
    packages, path, imported
):
    if imported:
        importlib.import_module(path.rpartition(".")[0])
    assert files_of(path) == USED[path]


def test_a_new_file_of_another_method_changes_no_digest(packages):
    config = {"trainer": {"callbacks": [{"class_path": "eager.third.Another"}, {"class_path": "lazy.Mine"}]}}
    before = provenance(config)
    for package in ("eager", "lazy"):
        Path(package, "newer.py").write_text("class Newer: pass\n")
        with Path(package, "__init__.py").open("a") as file:
            file.write(f"from {package}.newer import Newer\n")
    assert provenance(config) == before


def test_no_module_is_run_to_find_its_file(packages):
    Path("script.py").write_text("raise SystemExit('run')\n")
    with Path("trace.py").open("a") as file:
        file.write("def late():\n    import script\n    from script.inner import x\n")
    config = {"trainer": {"callbacks": [{"class_path": "trace.Mine"}]}}
    before = provenance(config)
    Path("script.py").write_text("raise SystemExit('again')\n")
    assert provenance(config) != before


@pytest.mark.parametrize(
    "line", ["from .helping import f", "from . import helping", "from ..helping import f"]
)
def test_a_module_without_a_package_may_try_a_relative_import(packages, line):
    for name in ("trying", "helping"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    Path("helping.py").write_text("def f(): return 1\n")
    Path("trying.py").write_text(
        f"try:\n    {line}\nexcept ImportError:\n    from helping import f\nclass Mine: pass\n"
    )
    config = {"trainer": {"callbacks": [{"class_path": "trying.Mine"}]}}
    before = provenance(config)
    Path("helping.py").write_text("def f(): return 2\n")
    assert provenance(config)["helping"] != before["helping"]


def test_the_code_of_a_class_is_known_to_a_run_of_a_script():
    """Only of what stands in the script's config.yaml."""
    method = importlib.import_module("mine_methods").Method
    module = FederatedModule(LeNet(10, 1, 8), lambda p: torch.optim.SGD(p, lr=0.1), local_steps=1)
    trainer = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False}
    mine = Run(module, Digits(**DIGITS), callbacks=[method()], **trainer)
    mine.fit()
    (entry,) = json.loads((mine.path / "result.json").read_text())["provenance"]
    own = {"mine_methods", "mine_helper"}
    assert {name for name in entry if name.startswith("mine")} == own
    assert {name: entry[name] for name in own} == {name: provenance(mine.config)[name] for name in own}
    edited("mine_helper.py", "def strength(): return 2\n")
    assert entry["mine_helper"] != provenance(mine.config)["mine_helper"]
