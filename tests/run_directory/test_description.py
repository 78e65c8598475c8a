"""One description names a run, however it was built: any setting that decides numbers counts, in YAML and in Python."""

import copy
import functools
import inspect
import json
import types
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from command_line import TINY, FederatedCLI, run, write_config
from defaults import FILE, shipped, today
from torch import nn

from fl_lightning import (
    ClientFailures,
    ConfigurationError,
    FederatedDataModule,
    FederatedModule,
    MultiStep,
    Run,
)
from fl_lightning.aggregation import NNM, Median, TrimmedMean
from fl_lightning.attacks import FallOfEmpires
from fl_lightning.callbacks import FBN, Byzantine, FedBN, FedProx, FixBN, SlidingWindowFixBN
from fl_lightning.datamodules import Digits, FromFile, Gaussians, Shards
from fl_lightning.experiments.run_directory import description
from fl_lightning.experiments.run_directory.description import config_hash, deciding_settings, differences
from fl_lightning.experiments.run_directory.values import as_plain
from fl_lightning.models import LeNet, library_model
from fl_lightning.recorded import Recorded, parameters

SHIPPED = shipped()
EVERY = [
    (name, setting)
    for name, kind in sorted(SHIPPED.items())
    if isinstance(kind, type)
    for setting in parameters(kind)
    if setting not in ("seed", "threads")
]


def other_value(parameter):
    """Some value of a setting that is not its default."""
    hints = [parameter.annotation, *get_args(parameter.annotation)]
    for hint in hints:
        choices = [choice for choice in get_args(hint) if choice != parameter.default]
        if get_origin(hint) is Literal and choices:
            return choices[0]
    if parameter.name.endswith("_optimizer"):
        return functools.partial(torch.optim.SGD, lr=0.5)
    if isinstance(parameter.default, bool):
        return not parameter.default
    if isinstance(parameter.default, int | float):
        return parameter.default + 1
    if any(isinstance(one, types.GenericAlias) for one in hints):
        return [3, 4]
    return next((value for kind, value in ((int, 3), (float, 0.25)) if kind in hints), "another")


def in_place(node):
    """A configuration with an object somewhere: callbacks, data and models count alike."""
    return {"model": {"model": node, "local_steps": 1}, "data": {}, "trainer": {}}


def given(kind, **settings):
    """An object that records its arguments, whatever its constructor thinks of them."""
    return kind.__new__(kind, **settings)


@pytest.mark.parametrize(("name", "setting"), EVERY)
def test_every_argument_of_every_shipped_class_names_a_run_and_yaml_and_python_agree(name, setting):
    kind, parameter = SHIPPED[name], parameters(SHIPPED[name])[setting]
    value = other_value(parameter)
    usual, changed = as_plain(given(kind)), as_plain(given(kind, **{setting: value}))
    if name in ("fl_lightning.RoundCheckpoint", "fl_lightning.RoundProgress"):
        return  # as callbacks they are outside, see below
    assert config_hash(in_place(usual)) != config_hash(in_place(changed))
    plain = changed["init_args"][setting] if callable(value) else as_plain(value, parameter.annotation)
    yaml = {"class_path": name, "init_args": {setting: plain}}
    assert config_hash(in_place(yaml)) == config_hash(in_place(changed))
    assert config_hash(in_place({"class_path": name})) == config_hash(in_place(usual))
    known = {n: x for n, x in usual["init_args"].items() if n != setting}
    reordered = {"class_path": name, "init_args": {**yaml["init_args"], **known}}  # every default filled in
    assert config_hash(in_place(reordered)) == config_hash(in_place(changed))
    moved = {"class_path": name, "dict_kwargs": yaml["init_args"]}
    assert config_hash(in_place(moved)) == config_hash(in_place(changed))


def test_every_default_of_every_shipped_class_is_pinned():
    """Run docs/scripts/defaults.py for a new setting. A default that is changed on purpose belongs into CHANGED."""
    changed = {("fl_lightning.RoundCheckpoint", "mode")}  # (class, setting)
    pinned = json.loads(FILE.read_text())
    for name, found in today().items():
        missing = found.keys() - pinned.get(name, {}).keys()
        assert not missing, f"{name}: run docs/scripts/defaults.py to pin {missing}"
        other = {(name, key) for key in found if found[key] != pinned[name][key]}
        assert other <= changed


def test_a_changed_default_is_hashed_and_a_new_setting_is_not(monkeypatch):
    usual = in_place(as_plain(MultiStep([0.5], 0.1)))
    before = config_hash(usual)
    pinned = copy.deepcopy(description.pinned())
    pinned["fl_lightning.MultiStep"]["gamma"] = 0.5  # once it was another
    monkeypatch.setattr(description, "pinned", lambda: pinned)
    description._defaults.cache_clear()
    assert config_hash(usual) != before
    pinned["fl_lightning.MultiStep"]["gamma"] = 0.1
    pinned["fl_lightning.MultiStep"]["steepness"] = 1.0  # a setting that came later
    description._defaults.cache_clear()
    node = usual["model"]["model"]
    later = {**node, "init_args": {**node["init_args"], "steepness": 1.0}}
    assert config_hash(in_place(later)) == before
    assert config_hash(in_place({**node, "init_args": {**later["init_args"], "steepness": 2.0}})) != before
    monkeypatch.undo()
    description._defaults.cache_clear()


def python_run(
    name="tiny", rounds=4, seed=0, callbacks=None, model=None, data=None, trainer=None, **settings
):
    """TINY as a script makes it."""
    torch.manual_seed(seed)
    model = LeNet(num_classes=10, in_channels=1, image_size=8) if model is None else model
    data = data or Digits(
        3, batch_size=10, partition=Shards(0.4), val_fraction=0.2, max_examples=300, seed=seed
    )
    settings = {"client_optimizer": lambda p: torch.optim.SGD(p, lr=0.05), "local_steps": 2, **settings}
    module = FederatedModule(model, seed=seed, **settings)
    callbacks = [FixBN(freeze_round=2)] if callbacks is None else callbacks
    trainer = {"max_epochs": rounds, "accelerator": "cpu", "enable_progress_bar": False, **(trainer or {})}
    return Run(module, data, name, callbacks=callbacks, **trainer)


def hash_of(**settings):
    return config_hash(python_run(**settings).config)


@pytest.mark.slow
def test_a_script_and_a_yaml_of_the_same_settings_are_one_run_with_one_name():
    cli = run("--trainer.max_epochs", 1)
    mine = python_run(rounds=1)
    mine.fit()
    assert mine.path.name == f"{cli.attempt.path.name}.2"
    ours, yours = (
        json.loads((one / "metrics.jsonl").read_text().splitlines()[-1])
        for one in (cli.attempt.path, mine.path)
    )
    assert ours["val/loss"] == yours["val/loss"]
    assert cli.model.record.description == mine.module.record.description
    assert run("--ckpt_path", "last", "--trainer.max_epochs", 2).attempt.path == mine.path
    again = run(
        "--trainer.max_epochs", 1, config=str(mine.attempt.config)
    )  # a script's file starts its run, too
    assert again.attempt.path.name == f"{cli.attempt.path.name}.3"


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"callbacks": [FBN()]}, ["--trainer.callbacks=FBN"]),
        (
            {"callbacks": [Byzantine(FallOfEmpires(2), [1]), FedBN()], "aggregator": TrimmedMean(1, pre=NNM())},
            [
                '--trainer.callbacks=[{class_path: Byzantine, init_args: {attack: {class_path: FallOfEmpires, init_args: {tau: 2}}, clients: [1]}}, {class_path: FedBN}]',
                "--model.aggregator={class_path: TrimmedMean, init_args: {f: 1, pre: NNM}}",
            ],
        ),
        (
            {"failures": ClientFailures({1: 0}, stragglers=0), "participation": 2, "bn_momentum": 1},
            ["--model.failures={class_path: ClientFailures, init_args: {dropout: {1: 0}, stragglers: 0}}", "--model.participation=2", "--model.bn_momentum=1"],
        ),
        (
            {"statistics_aggregator": Median(), "statistics_domain": "log_variance", "client_lr_schedule": MultiStep([0.5, 3], 0.5)},
            ["--model.statistics_aggregator=Median", "--model.statistics_domain=log_variance", "--model.client_lr_schedule=MultiStep",
             "--model.client_lr_schedule.milestones=[0.5, 3]", "--model.client_lr_schedule.gamma=0.5"],
        ),
        ({"trainer": {"precision": "64-true", "limit_val_batches": 1}}, ["--trainer.precision=64-true", "--trainer.limit_val_batches=1"]),
        ({"parameter_groups": {"batch_norm": {"lr_scale": 2}}, "loss": None, "seed": 3}, ["--model.parameter_groups={batch_norm: {lr_scale: 2}}", "--seed_everything=3"]),
    ],
)  # fmt: skip
def test_python_and_yaml_agree_on_names_of_what_is_nested(settings, arguments, monkeypatch):
    class Found(BaseException):
        pass

    def stop(self, **_):
        raise Found(config_hash(self.resolved))

    monkeypatch.setattr("fl_lightning.cli.federated_cli.FederatedCLI.instantiate_trainer", stop)
    with pytest.raises(Found) as found:
        run(*arguments)
    assert hash_of(**settings) == str(found.value)
    assert hash_of(**settings) != hash_of()


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.layer(inputs) * self.factor


FACTOR = 0.5


def test_differences_that_attributes_do_not_show_count_in_python(tmp_path, monkeypatch):
    many = np.arange(2000.0)
    file = tmp_path / "parts.json"
    file.write_text("{}")
    schedule = lambda round_number, rounds: FACTOR
    mine = type("FedProx", (Recorded,), {"__module__": "methods2"})()
    pairs = [
        ({"statistics_aggregator": Median()}, {}),
        ({"data": Gaussians(3, radius=5.0)}, {"data": Gaussians(3)}),
        ({"data": Gaussians(3, samples_per_client=50)}, {"data": Gaussians(3)}),
        ({"callbacks": [mine]}, {"callbacks": [FedProx()]}),
        ({"callbacks": [FedBN(), FedBN()]}, {"callbacks": [FedBN()]}),
        ({"model": Scale(1.0)}, {"model": Scale(9.0)}),
        ({"data": FederatedDataModule([Holder(many)])}, {"data": FederatedDataModule([Holder(many + (many == 7))])}),
        ({"model": changed_layer(LeNet())}, {"model": LeNet()}),
        ({"model": changed_weight(LeNet())}, {"model": LeNet()}),
        ({"client_lr_schedule": lambda r, n: 0.5}, {"client_lr_schedule": lambda r, n: 0.25}),
        ({"model": library_model("torchvision.models.squeezenet1_1", 10)}, {"model": library_model("torchvision.models.squeezenet1_1", 11)}),
    ]  # fmt: skip
    for one, other in pairs:
        assert hash_of(**one) != hash_of(**other), one
        assert hash_of(**one) == hash_of(**one)
    names = [hash_of(client_lr_schedule=schedule)]
    monkeypatch.setitem(globals(), "FACTOR", 0.25)
    assert hash_of(client_lr_schedule=schedule) not in names
    names = [hash_of(data=Digits(2, partition=FromFile(str(file))))]
    file.write_text("[]")
    assert hash_of(data=Digits(2, partition=FromFile(str(file)))) not in names


def assigned(thing, **values):
    for name, value in values.items():
        setattr(thing, name, value)
    return thing


def test_a_setting_that_is_assigned_later_is_the_one_that_counts():
    run = python_run()
    for changed in (
        {"callbacks": [assigned(FixBN(freeze_round=2), freeze_round=3)]},
        {
            "data": assigned(
                Digits(3, batch_size=10, partition=Shards(0.4), val_fraction=0.2, max_examples=300),
                batch_size=7,
            )
        },
    ):
        assert hash_of(**changed) != config_hash(run.config)
    module = assigned(run.module, local_steps=5)
    assert config_hash(
        Run(module, run.data, callbacks=run.callbacks, max_epochs=4, accelerator="cpu").config
    ) == hash_of(local_steps=5)


class Holder(torch.utils.data.Dataset):
    def __init__(self, values):
        self.values = values


def changed_layer(model):
    model.features[0] = nn.Conv2d(1, 6, 5, bias=False)
    return model


def changed_weight(model):
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    return model


def test_a_model_of_the_runs_seed_has_the_name_of_its_settings_and_one_of_another_seed_has_not():
    first = python_run(seed=1).config
    assert "weights_digest" not in first["model"]["model"]
    torch.manual_seed(5)
    other = python_run(seed=1, model=LeNet(num_classes=10, in_channels=1, image_size=8)).config
    assert config_hash(other) != config_hash(first)


def test_what_was_trained_is_refused_in_another_run(tmp_path):
    window = SlidingWindowFixBN(window=2, threshold=1e9)
    python_run(rounds=3, callbacks=[window]).fit()
    assert window.freeze_round is not None
    with pytest.raises(
        ConfigurationError, match="SlidingWindowFixBN holds the state of an earlier run; make a new"
    ):
        python_run("second", rounds=3, callbacks=[window]).fit()
    model = LeNet(num_classes=10, in_channels=1, image_size=8)
    python_run("third", rounds=1, model=model).fit()
    with pytest.raises(ConfigurationError, match="the model is trained already; make a new model and module"):
        python_run("fourth", rounds=1, model=model).fit()


def test_the_files_of_a_folder_name_a_run(tmp_path):
    def named(users):
        (tmp_path / "all_data_0.json").write_text(json.dumps({"user_data": users}))
        data = {
            "class_path": "fl_lightning.datamodules.Cityscapes",
            "init_args": {"split_file": str(tmp_path)},
        }
        return config_hash({"model": {}, "data": data, "trainer": {}})

    assert named({"a": 1}) == named({"a": 1}) != named({"b": 1})


def test_two_callbacks_of_one_class_differ_by_both():
    one = {"class_path": "Byzantine", "init_args": {"clients": [1]}}
    two = {"class_path": "Byzantine", "init_args": {"clients": [2]}}
    config = {"model": {}, "data": {}, "trainer": {"callbacks": [one, two]}}
    settings = deciding_settings(config)
    assert settings["trainer.callbacks.Byzantine.clients"] == [1]
    assert settings["trainer.callbacks.Byzantine.2.clients"] == [2]


def test_how_often_the_server_evaluates_counts_where_clients_send_for_it_or_it_stops_the_run():
    static = [{"class_path": "fl_lightning.callbacks.StaticBN"}]
    stopping = [
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/loss"}}
    ]
    for callbacks, counts in (([], False), (static, True), (stopping, True)):
        names = {
            config_hash({**TINY, "trainer": {"callbacks": callbacks, "check_val_every_n_epoch": n}})
            for n in (1, 2)
        }
        assert len(names) == 1 + counts


def test_a_configuration_that_would_build_another_run_is_an_error_of_ours(monkeypatch, capsys):
    resolve = FederatedCLI.resolve

    def other(self, config):
        found = resolve(self, config)
        return {**found, "model": {**found["model"], "local_steps": 7}}

    monkeypatch.setattr(FederatedCLI, "resolve", other)
    with pytest.raises(SystemExit):
        run("--trainer.max_epochs", 1)
    assert "model.local_steps: 7 in the file, 2 was built" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_auto_does_not_resume_a_run_of_another_plan_and_last_extends_it(capsys):
    write_config({"trainer.callbacks": [{"class_path": "FixBN"}]})
    trial = run("--trainer.max_epochs", 2).attempt
    capsys.readouterr()
    whole = run("--trainer.max_epochs", 6, "--ckpt_path", "auto").attempt
    line = "is of a run planned for 2 rounds, not 6: --ckpt_path auto ignores it"
    assert line in capsys.readouterr().out
    assert whole.path.name == f"{trial.path.name}.2"
    result = json.loads(whole.result.read_text())
    assert result["planned_rounds"] == 6
    assert result["bn_statistics"] == [[1, "averaged"], [4, "frozen"]]
    assert run("--trainer.max_epochs", 2, "--ckpt_path", "auto").attempt.path == trial.path
    extended = run("--trainer.max_epochs", 7, "--ckpt_path", "last").attempt
    assert extended.path == whole.path
    assert "rounds           7  (planned: 6)" in capsys.readouterr().out


def test_signatures_are_those_of_the_constructors():
    assert list(inspect.signature(FixBN.__init__).parameters)[1:] == list(parameters(FixBN))


def test_nan_does_not_differ_from_nan():
    """A run whose settings hold NaN would go on as one of other settings."""
    nan = float("nan")
    assert differences({"a": nan, "b": [nan, 1]}, {"a": nan, "b": [nan, 1]}) == {}
    assert [*differences({"a": nan, "b": 1}, {"a": 1.0, "b": 1.0})] == ["a"]
