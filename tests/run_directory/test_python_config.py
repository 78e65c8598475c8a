"""A script's run has the name that the script gives it, and writes down what has plain form."""

import copy
import enum
import functools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from fl_lightning import ConfigurationError, FederatedCallback, FederatedModule, MultiStep, Run
from fl_lightning.aggregation import NNM, Median, TrimmedMean
from fl_lightning.attacks import FallOfEmpires, SignFlip
from fl_lightning.callbacks import Byzantine, FedProx, FixBN, SlidingWindowFixBN
from fl_lightning.datamodules import Digits, FromFile, Shards
from fl_lightning.experiments.run_directory.config_digest import config_hash, deciding_settings
from fl_lightning.experiments.run_directory.describe import run_title
from fl_lightning.experiments.run_directory.directory import RunDirectory
from fl_lightning.experiments.run_directory.python_config import as_plain
from fl_lightning.models import LeNet, library_model
from fl_lightning.recorded import making
from tests.support.command_line import TINY, rows, run


def python_run(
    rounds=4, name="tiny", seed=0, callbacks=None, model=None, data=None, trainer=None, **settings
):
    """TINY as a script makes it."""
    torch.manual_seed(seed)
    model = LeNet(num_classes=10, in_channels=1, image_size=8) if model is None else model
    data = data or digits(seed=seed)
    settings = {"client_optimizer": lambda p: torch.optim.SGD(p, lr=0.05), "local_steps": 2, **settings}
    module = FederatedModule(model, seed=seed, **settings)
    callbacks = [FixBN(freeze_round=2)] if callbacks is None else callbacks
    trainer = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "check_val_every_n_epoch": 2,
        **(trainer or {}),
    }
    return Run(module, data, name, callbacks=callbacks, max_epochs=rounds, **trainer)


def digits(**settings):
    return Digits(
        3, batch_size=10, **{"partition": Shards(0.4), "val_fraction": 0.2, "max_examples": 300, **settings}
    )


def settings_of(**changes):
    return deciding_settings(python_run(**changes).config)


def last(run):
    return run.attempt.checkpoints / "last.ckpt"


def test_a_script_names_its_run_by_name_and_seed_whatever_its_objects_are():
    first, second, other_seed, other_name = (
        python_run(1),
        python_run(1, client_lr_schedule=lambda r, n: 0.5, callbacks=[FedProx()]),
        python_run(1, seed=1),
        python_run(1, name="other"),
    )
    for one in (first, second, other_seed, other_name):
        one.fit()
    paths = [str(one.path) for one in (first, second, other_seed, other_name)]
    assert paths == ["runs/tiny/s0", "runs/tiny/s0.2", "runs/tiny/s1", "runs/other/s0"]


def test_runs_of_one_name_that_start_together_are_attempts_of_their_own():
    directory = RunDirectory(Path("runs/mine"), "s0")
    with ExitStack() as held, ThreadPoolExecutor(8) as pool:
        attempts = {*pool.map(lambda _: directory.next_attempt(held).path, range(20))}
    assert len(attempts) == 20


CHANGES = [
    (2, {"client_optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "model.client_optimizer.lr", 0.1, 0.05),
    (2, {"callbacks": [FixBN(freeze_round=1)]}, "trainer.callbacks.FixBN.freeze_round", 1, 2),
    (2, {"data": digits(partition=Shards(0.5))}, "data.partition.class_fraction", 0.5, 0.4),
    (2, {"model": LeNet(10, 1, 8, norm="gn")}, "model.model.norm", "gn", "bn"),
    (100, {}, "trainer.max_epochs", 100, 2),
]


@pytest.mark.parametrize(
    ("resume", "rounds", "changes", "setting", "new", "old"),
    [
        pytest.param(resume, *change, marks=pytest.mark.nightly if resume is not True and place else ())
        for resume in (True, "auto", "best")
        for place, change in enumerate(CHANGES)
    ],
)
def test_a_setting_that_differs_is_refused_by_name_where_a_run_is_resumed_by_its_name(
    resume, rounds, changes, setting, new, old
):
    first = python_run(2)
    first.checkpoint.monitor = "val/loss"
    first.fit()
    with pytest.raises(ConfigurationError) as error:
        python_run(rounds, **copy.deepcopy(changes)).fit(resume)
    path = first.path / "checkpoints" / ("best.ckpt" if resume == "best" else "last.ckpt")
    assert str(error.value) == (
        f"resume: {setting} is {new}, but {old} in runs/tiny/s0; give the settings of that run, or call fit() for a new run, or "
        f"fit(resume='{path}') to continue from this file with the new settings"
    )
    assert [folder.name for folder in Path("runs/tiny").iterdir()] == ["s0"]


def test_resume_goes_on_from_the_newest_attempt_bit_for_bit():
    whole = python_run(4, "whole")
    whole.fit()
    for _ in range(2):
        killed = python_run(4)
        killed.fit()
    # as if killed after round 2
    part = python_run(4, "part", trainer={"max_time": None})
    part.checkpoint.keep_rounds = frozenset([2])
    part.fit()
    shutil.copy(part.attempt.checkpoints / "round_2.ckpt", last(killed))
    (killed.path / "result.json").unlink()
    resumed = python_run(4)
    result = resumed.fit(resume=True)
    assert resumed.path == Path("runs/tiny/s0.2")
    assert result["continued_from"] == []
    assert rows(resumed.attempt) == rows(whole.attempt)
    states = [torch.load(last(one), weights_only=True)["state_dict"] for one in (resumed, whole)]
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_a_path_extends_a_run_or_continues_it_with_other_settings_in_a_new_attempt():
    first = python_run(2)
    first.fit()
    extended = python_run(3)
    assert extended.fit(resume=last(first))["planned_rounds"] == 2
    assert extended.path == first.path
    changed = python_run(4, client_optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    (origin,) = changed.fit(resume=last(first))["continued_from"]
    assert changed.path == Path("runs/tiny/s0.2")
    assert origin["differs"] == {"model.client_optimizer.lr": [0.05, 0.1]}


def test_what_has_no_plain_form_is_named_and_never_refused():
    first = python_run(2, client_lr_schedule=lambda r, n: 0.5, loss=nn.CrossEntropyLoss())
    first.fit()
    settings = deciding_settings(first.config)
    assert settings["model.loss"] == "torch.nn.CrossEntropyLoss"
    assert settings["model.client_lr_schedule"].endswith("<lambda>")
    again = python_run(2, client_lr_schedule=lambda r, n: 0.5, loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    assert again.fit(resume=True)["continued_from"] == []
    assert again.path == first.path


def test_a_script_writes_down_the_settings_of_its_objects_as_a_yaml_gives_them():
    """A script's file starts its run, too."""
    mine = python_run(1)
    mine.fit()
    written = yaml.safe_load((mine.path / "config.yaml").read_text())
    assert written == mine.config
    again = run("--trainer.max_epochs", 1, config=str(mine.attempt.config))
    assert rows(again.attempt) == rows(mine.attempt)
    given = deciding_settings(yaml.safe_load(yaml.safe_dump(TINY)))
    settings = deciding_settings(written)
    shared = {name for name in given if not isinstance(given[name], str) and name in settings}
    assert {
        "model.client_optimizer.lr",
        "data.partition.class_fraction",
        "trainer.callbacks.FixBN.freeze_round",
    } <= shared
    assert {name: settings[name] for name in shared} == {name: given[name] for name in shared}


class Colour(enum.Enum):
    red = 1


VALUES = [
    (np.float64(0.1), 0.1), (np.int64(3), 3), (np.bool_(True), True), (Colour.red, "red"), (Path("x"), "x"),
    ({"b", "a", "c"}, ["a", "b", "c"]), ((1, None), [1, None]), (range(3), [0, 1, 2]), ({1: 0.5}, {"1": 0.5}),
    (MultiStep, "fl_lightning.MultiStep"), (nn.functional.relu, "torch.nn.functional.relu"),
    (functools.partial(MultiStep, gamma=0.5), {"class_path": "fl_lightning.MultiStep", "init_args": {"gamma": 0.5}}),
    (TrimmedMean(1, pre=NNM()), {"class_path": "fl_lightning.aggregation.TrimmedMean", "init_args": {
        "f": 1, "pre": {"class_path": "fl_lightning.aggregation.NNM", "init_args": {"f": None}},
        "per": None, "weighting": "uniform", "max_weight": 2.0}}),
    (np.zeros(3), {"class_path": "numpy.ndarray", "init_args": {}}), (torch.zeros(3), {"class_path": "torch.Tensor", "init_args": {}}),
]  # fmt: skip


@pytest.mark.parametrize(("value", "plain"), VALUES)
def test_plain_forms_of_values(value, plain):
    assert as_plain(value) == plain
    assert type(as_plain(value)) is type(plain)
    assert yaml.safe_load(yaml.safe_dump(as_plain(value))) == plain


@pytest.mark.slow
def test_arguments_of_nested_objects_are_settings():
    attack = settings_of(callbacks=[Byzantine(FallOfEmpires(2), [1])])
    assert attack["trainer.callbacks.Byzantine.attack"].endswith(".FallOfEmpires")
    assert attack["trainer.callbacks.Byzantine.attack.tau"] == 2
    assert settings_of(statistics_aggregator=Median())["model.statistics_aggregator"].endswith(".Median")
    library = library_model("torchvision.models.squeezenet1_1", 11)
    assert settings_of(model=library)["model.model.num_classes"] == 11
    assert settings_of(model=torch.compile(library))["model.model.num_classes"] == 11
    assert settings_of(trainer={"precision": "64-true"})["trainer.precision"] == "64-true"
    assert settings_of(data=digits(seed=3))["data.seed"] == 3
    assert "data.seed" not in settings_of(seed=3)
    Path("parts.json").write_text("{}")
    before = settings_of(data=digits(partition=FromFile("parts.json")))["data.partition.path"]
    Path("parts.json").write_text("[1]")
    assert before.startswith("content ")
    assert settings_of(data=digits(partition=FromFile("parts.json")))["data.partition.path"] != before


class WithNew(FixBN):
    def __new__(cls, freeze_round=1):
        return super().__new__(cls)


class Sizes(FederatedCallback):
    def __init__(self, first, *sizes, last=0):
        pass


def test_arguments_are_recorded_whatever_the_constructor_passes_on():
    assert making(WithNew(2)).arguments == {"freeze_round": 2}
    assert making(copy.deepcopy(WithNew(freeze_round=2))).arguments == {"freeze_round": 2}
    assert making(Sizes(2, 3, 4, last=5)).arguments == {"first": 2, "last": 5, "*": [3, 4]}


def test_an_optimizer_is_known_by_what_its_factory_makes():
    for make in (
        functools.partial(torch.optim.SGD, lr=0.3),
        functools.partial(torch.optim.SGD, lr=torch.tensor(0.3).item()),
        lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    ):
        assert settings_of(client_optimizer=make)["model.client_optimizer.lr"] == pytest.approx(0.3)
        assert settings_of(client_optimizer=make)["model.client_optimizer"].endswith("SGD")
    assert settings_of(server_optimizer=make)["model.server_optimizer.lr"] == 0.3


def test_an_argument_that_can_be_read_once_is_left_for_the_run():
    numbers = (number for number in [1])
    settings_of(callbacks=[Byzantine(SignFlip(), clients=numbers)])
    assert [*numbers] == [1]


def test_what_is_changed_before_the_fit_is_written_down():
    mine = python_run(1)
    mine.callbacks.append(FedProx(mu=5.0))
    mine.fit()
    written = yaml.safe_load((mine.path / "config.yaml").read_text())
    assert deciding_settings(written)["trainer.callbacks.FedProx.mu"] == 5.0


def test_configurations_are_equal_in_every_process_and_of_equal_objects():
    configs = [python_run(model=LeNet(10, 1, 8), client_lr_schedule=lambda r, n: 1).config for _ in range(2)]
    assert configs[0] == configs[1]
    assert config_hash(configs[0]) == config_hash(configs[1])
    assert "0x" not in yaml.safe_dump(configs[0])


def test_what_was_trained_is_refused_in_another_run():
    window = SlidingWindowFixBN(window=2, threshold=1e9)
    python_run(3, callbacks=[window]).fit()
    assert window.freeze_round is not None
    words = "SlidingWindowFixBN holds the state of an earlier run; make a new"
    for method in (window, copy.deepcopy(window)):
        with pytest.raises(ConfigurationError, match=words):
            python_run(3, "second", callbacks=[method]).fit()
    model = LeNet(num_classes=10, in_channels=1, image_size=8)
    trained = python_run(1, "third", model=model, callbacks=[])
    trained.fit()
    with pytest.raises(ConfigurationError, match="the model is trained already; make a new model and module"):
        python_run(1, "fourth", model=model, callbacks=[]).fit()
    shutil.rmtree("runs/third")
    with pytest.raises(ConfigurationError, match="the model is trained already"):
        trained.fit(resume="auto")


@dataclass
class Data(FederatedCallback):
    value: float = 1.0


def test_methods_that_cannot_be_hashed_are_trained():
    python_run(1, callbacks=[Data()]).fit()


@pytest.mark.slow
def test_a_compiled_model_is_trained_and_told_by_its_class():
    torch.manual_seed(0)
    model = torch.compile(LeNet(num_classes=10, in_channels=1, image_size=8), backend="aot_eager")
    mine = python_run(1, model=model, callbacks=[])
    mine.fit()
    assert json.loads((mine.path / "result.json").read_text())["model"] == "LeNet"
    assert run_title(mine.module)[1].startswith("LeNet (")


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
