"""Mistakes in the settings: each is one line that names it, and leaves nothing behind."""

from pathlib import Path

import pytest

from fl_lightning import errors
from fl_lightning.cli.command_line import main
from fl_lightning.cores import usable_cores
from tests.support.command_line import attempts, message_of, run, write_config

DATA = "--data.init_args."
OPTIMIZER = "model.client_optimizer"


def callback(name, **settings):
    return {"trainer.callbacks": [{"class_path": name, "init_args": settings}]}


def optimizer(name, **settings):
    return {OPTIMIZER: {"class_path": name, "init_args": settings}}


def partition(name, **settings):
    return {"data.init_args.partition": {"class_path": name, "init_args": settings}}


def server(name, **settings):
    return {"model.server_optimizer": {"class_path": name, "init_args": settings}}


# (arguments or changes of the YAML, words that the message must hold)
TABLE = {
    "unknown setting": ("--model.local_step 3", ["'model.local_step'", "did you mean model.local_steps"]),
    "unknown setting in YAML": (
        {"model.local_stepz": 3},
        ["'model.local_stepz'", "did you mean model.local_steps"],
    ),
    "unknown section in YAML": ({"modle": 3}, ["'modle'", "did you mean model"]),
    "setting of another section": (
        "--model.lr 0.1",
        ["'model.lr'", "did you mean model.client_optimizer.lr?"],
    ),
    "misspelt section": (
        {"dta": {"class_path": "Digits", "init_args": {"num_clients": 3}}},
        ["no setting 'dta'", "did you mean data?"],
    ),
    "setting of another partition": (
        "--data.partition.alpha 1",
        ["Shards: there is no setting 'alpha' among class_fraction"],
    ),
    "abbreviated setting": (
        "--trainer.max_epoch 3",
        ["'trainer.max_epoch'", "did you mean trainer.max_epochs"],
    ),
    "unknown setting of W&B": ("--wandb.foo 1", ["'wandb.foo'", "did you mean wandb.mode"]),
    "unknown setting of W&B in YAML": ({"wandb": {"foo": 1}}, ["'wandb.foo'", "did you mean wandb.mode"]),
    "half a client": (
        {
            "model.failures": {
                "class_path": "fl_lightning.ClientFailures",
                "init_args": {"dropout": {1.5: 0.5}},
            }
        },
        ["ClientFailures.dropout: 1.5", "client's number, such as 7"],
    ),
    "half an attacker": (
        callback("Byzantine", attack={"class_path": "SignFlip"}, clients=[1.5]),
        ["Byzantine.clients: [1.5]", "Sequence[int]"],
    ),
    "abbreviated seed": ("--seed 3", ["'seed'", "did you mean seed_everything"]),
    "word for a number": ("--model.local_steps three", ["model.local_steps: three", "it takes int"]),
    "word for a number of a class": (f"{DATA}num_clients x", ["Digits.num_clients: x", "it takes int"]),
    "unknown choice": ("--model.weighting size", ["model.weighting: size", "'examples', 'uniform'"]),
    "missing data": (
        "--data ImageFolder --data.init_args.data_dir nowhere --data.init_args.image_size 8",
        ["data_dir=nowhere does not exist", "train/<class>", "unpack the data set there"],
    ),
    "alpha of zero": (partition("Dirichlet", alpha=0), ["alpha", "positive", "found 0"]),
    "negative alpha": (partition("Dirichlet", alpha=-1.5), ["alpha", "positive", "found -1.5"]),
    "more clients than samples": (
        {**partition("IID"), "data.init_args.num_clients": 5000},
        ["num_clients", "[1, 240]", "5000"],
    ),
    "too few classes per client": (partition("Shards", class_fraction=0.1), ["class_fraction=0.1", ">= 0.4"]),
    "class fraction above one": (
        partition("Shards", class_fraction=2),
        ["class_fraction", "(0, 1]", "found 2"],
    ),
    "fewer samples than asked of each client": (
        f"{DATA}min_examples 500",
        ["min_examples=500 leaves no client", "use at most 96"],
    ),
    "steps and epochs": ("--model.local_epochs 1", ["local_steps: 2", "local_epochs: 1", "give one of them"]),
    "neither steps nor epochs": (
        {"model.local_steps": None},
        ["local_steps", "local_epochs", "give one of them"],
    ),
    "unknown callback": (callback("FixedBN"), ["trainer.callbacks", "'FixedBN'", "did you mean FixBN"]),
    "unknown callback on the command line": (
        "--trainer.callbacks FixBNN",
        ["'FixBNN'", "did you mean FixBN"],
    ),
    "missing name in a module": (
        callback("fl_lightning.callbacks.FixBM"),
        ["'fl_lightning.callbacks.FixBM'", "no attribute 'FixBM'"],
    ),
    "broken callback module": (
        callback("broken.Mine"),
        [
            "'broken.Mine'",
            "cannot be imported",
            "not_installed",
            "pip install not_installed (broken.py, line 1)",
        ],
    ),
    "extra that is missing": (
        "--model.model of_an_extra.create_model",
        ["of_an_extra.create_model", "pip install 'fl_lightning[timm]'"],
    ),
    "package that a class imports": ("--trainer.logger needs.Logs", ["making Logs()", "pip install nowhere"]),
    "unknown callback setting": (
        callback("FixBN", freeze_rond=2),
        ["FixBN", "'freeze_rond'", "freeze_round"],
    ),
    "unknown model": ("--model.model LeNett", ["model.model", "'LeNett'", "did you mean LeNet"]),
    "bare name of a function": (
        "--model.model deeplab_v3_plus",
        ["'deeplab_v3_plus'", "did you mean fl_lightning.models.deeplab_v3_plus?"],
    ),
    "unknown model setting": ("--model.model.init_args.width 2", ["LeNet", "'width'", "norm, groups"]),
    "unknown norm": ("--model.model.init_args.norm layer", ["norm='layer'", "bn, gn, ln, in, gn_ws"]),
    "unknown data set": ("--data Digit", ["'Digit'", "did you mean Digits"]),
    "no model": ({"model.model": None}, ["required", "model.model"]),
    "no data": ({"data": None}, ["required", "data"]),
    "no checkpoint": ("--ckpt_path last", ["'last'", "runs/tiny/", "-s0"]),
    "missing checkpoint file": ("--ckpt_path none.ckpt", ["none.ckpt", "does not exist"]),
    "no client": ("--model.participation 0", ["participation: 0", "(0, 1]"]),
    "one and a half of the clients": ("--model.participation 1.5", ["participation: 1.5", "(0, 1]"]),
    "more clients than there are": ("--model.participation 9", ["participation: 9", "only 3"]),
    "freeze fraction in a setting of its own": (
        callback("FixBN", freeze_fraction=0.3),
        ["FixBN", "'freeze_fraction'", "freeze_round"],
    ),
    "nothing to freeze": ("--model.model.init_args.norm gn", ["FixBN", "LeNet", "norm: bn"]),
    "no momentum to keep": (callback("MaintainedMomentum"), ["MaintainedMomentum", "SGD", "momentum > 0"]),
    "unknown scope": (
        callback("MaintainedMomentum", scope="both"),
        ["MaintainedMomentum.scope", "both", "'local', 'global'"],
    ),
    "no optimizer": ({OPTIMIZER: None}, ["required", OPTIMIZER]),
    "unknown optimizer": (optimizer("SDG", lr=0.1), [OPTIMIZER, "'SDG'", "SGD"]),
    "unknown optimizer setting": (
        optimizer("SGD", lr=0.1, momentun=0.9),
        ["'momentun'", "did you mean momentum"],
    ),
    "negative learning rate": (optimizer("SGD", lr=-0.1), ["client_optimizer", "-0.1"]),
    "optimizer that mixes clients": (optimizer("Adafactor", lr=0.1), ["Adafactor", "elementwise", "SGD"]),
    "optimizer that needs a closure": (optimizer("LBFGS", lr=0.1), ["LBFGS", "closure", "SGD"]),
    "null for a number": (f"{DATA}batch_size null", ["batch_size", "null", "int"]),
    "null for a number of the module": (
        "--model.participation null",
        ["participation", "null", "int, float"],
    ),
    "null for a number of an optimizer": (
        "--model.client_optimizer.init_args.momentum null",
        ["momentum", "null", "float"],
    ),
    "no number of rounds": ({"trainer.max_epochs": None}, ["trainer.max_epochs", "model.budget_epochs"]),
    "budget below one step": ("--model.budget_epochs 1e-6", ["budget_epochs: 1e-06", "raise it"]),
    "validation fraction above one": (f"{DATA}val_fraction 1.5", ["val_fraction", "[0, 1)", "found 1.5"]),
    "no device": ("--trainer.devices 0", ["trainer", "devices: 0"]),
    "more ranks than cores": (
        "--trainer.devices 999",
        ["trainer.devices: 999", f"{usable_cores()} CPU cores", f"use {usable_cores()}"],
    ),
    "unknown accelerator": ("--trainer.accelerator gpuu", ["accelerator: gpuu", "Available names"]),
    "evaluation every zero rounds": (
        "--trainer.check_val_every_n_epoch 0",
        ["trainer.check_val_every_n_epoch: 0", "at least 1"],
    ),
    "steps instead of rounds": ("--trainer.max_steps 5", ["trainer.max_steps 5", "trainer.max_epochs"]),
    "milestone between rounds": (
        {"model.client_lr_schedule": {"class_path": "MultiStep", "init_args": {"milestones": [1.5]}}},
        ["milestones: 1.5", "fraction in (0, 1)"],
    ),
    "no seed": ("--seed_everything false", ["seed_everything: False", "whole number from 0"]),
    "any seed": ("--seed_everything true", ["seed_everything: True", "whole number from 0"]),
    "negative seed": ("--seed_everything -1", ["seed_everything: -1", "from 0 to 4294967295"]),
    "negative learning rate of the server": (
        server("SGD", lr=-1),
        ["server_optimizer", "learning rate: -1.0", "SGD(lr=1)"],
    ),
    "Nesterov without momentum at the server": (
        server("SGD", lr=1, nesterov=True),
        ["server_optimizer: Nesterov", "SGD(lr=1)"],
    ),
    "server optimizer that needs a closure": (server("LBFGS"), ["server_optimizer: LBFGS", "closure"]),
    "server optimizer of sparse gradients": (server("SparseAdam"), ["server_optimizer: SparseAdam", "dense"]),
    "server optimizer of matrices": (server("Muon"), ["server_optimizer: Muon", "2D"]),
    "overfitting batches": ("--trainer.overfit_batches 1", ["trainer.overfit_batches: 1", "max_epochs"]),
    "no batches": ("--trainer.limit_train_batches 0", ["trainer.limit_train_batches: 0", "max_epochs"]),
    "half a batch": ("--trainer.limit_train_batches 0.5", ["trainer.limit_train_batches: 0.5", "max_epochs"]),
    "callback given twice": (
        {
            "trainer.callbacks": [{"class_path": "MaintainedMomentum"}] * 2,
            **optimizer("SGD", lr=0.1, momentum=0.9),
        },
        ["more than one stateful callback of type `MaintainedMomentum`"],
    ),
    "second checkpoint of rounds": (
        callback("RoundCheckpoint"),
        ["more than one stateful callback of type `RoundCheckpoint`"],
    ),
    "data without clients": (
        {"data": {"class_path": "fl_lightning.FederatedDataModule"}},
        ["the data set does not define its num_classes"],
    ),
    "misspelt loss": ("--model.loss CrossEntropyLos", ["model.loss", "did you mean CrossEntropyLoss"]),
    "argument without a type that is missing": (callback("untyped.Untyped"), ["Untyped.a is missing"]),
    "misspelt hook": (
        callback("misspelt.A"),
        ["A.on_rond_start", "did you mean on_round_start", "(misspelt.py, line 2)"],
    ),
    "class in a module that ends in another's error": (
        "--trainer.callbacks nameless.Good",
        ["name 'Nothing' is not defined (nameless.py, line 4)"],
    ),
    "misspelt hook on the command line": (
        "--trainer.callbacks+=misspelt.A",
        ["A.on_rond_start", "did you mean on_round_start"],
    ),
    "seed of the data": ("--data.seed 5", ["data.seed: 5", "seed_everything: 0, which decides"]),
    "seed of the data in YAML": (
        {"data.init_args.seed": 0, "seed_everything": 3},
        ["data.seed: 0", "seed_everything: 3, which decides"],
    ),
    "other classes than the data": (
        "--model.model.init_args.num_classes 5",
        ["model.model.init_args.num_classes: 5", "its num_classes is 10"],
    ),
    "default channels that the data do not have": (
        {"model.model.init_args": {"in_channels": 3}},
        ["model.model.init_args.in_channels: 3", "its in_channels is 1"],
    ),
    "seed of the model in YAML": (
        {"model.seed": 5},
        ["model.seed: 5", "seed_everything: 0, which decides"],
    ),
    "section without settings": ({"wandb": 3}, ["wandb: 3 holds no settings such as wandb."]),
    "class of another kind": ("--model.model Digits", ["model.model: the class 'Digits' is of another kind"]),
    "word for a learning rate": (optimizer("SGD", lr="x"), ["SGD.lr: x is not valid", "it takes float"]),
    "unknown parameter group": ({"model.parameter_groups": {"bn": {"lr": 0.1}}}, ["'bn'", "batch_norm"]),
}


@pytest.mark.parametrize(("given", "words"), TABLE.values(), ids=TABLE)
def test_mistake_is_one_line_that_names_it_and_leaves_nothing(given, words, capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("broken.py").write_text("import not_installed\n")
    monkeypatch.setitem(errors._EXTRAS, "of_an_extra", "timm")
    Path("needs.py").write_text(
        "from lightning.pytorch.loggers import CSVLogger\n"
        "class Logs(CSVLogger):\n"
        "    def __init__(self):\n"
        "        import nowhere\n"
    )
    Path("nameless.py").write_text(
        "import lightning as L\nclass Good(L.Callback): ...\n\nclass Bad(Nothing): ...\n"
    )
    Path("untyped.py").write_text(
        "import lightning as L\nclass Untyped(L.Callback):\n    def __init__(self, a): ...\n"
    )
    Path("misspelt.py").write_text(
        "from fl_lightning import FederatedCallback\n"
        "class A(FederatedCallback):\n"
        "    def on_rond_start(self): ...\n"
    )
    write_config(given if isinstance(given, dict) else {})
    message = message_of(capsys, lambda: run(*(given.split() if isinstance(given, str) else ())))
    for word in words:
        assert word in message
    assert attempts() == []


def test_configuration_file_that_is_missing_or_no_settings_is_named(capsys):
    assert "nowhere.yaml" in message_of(capsys, lambda: main(["fit", "--config", "nowhere.yaml"]))
    for text, words in (
        ("a: [1\nb: }", "is not YAML"),
        ("a:\n  - b: [1\n", "is not YAML"),
        ("- a\n- b\n", "holds no settings"),
        ("", "holds no settings"),
    ):
        Path("odd.yaml").write_text(text)
        message = message_of(capsys, lambda: main(["fit", "--config", "odd.yaml"]))
        assert "config odd.yaml" in message
        assert words in message
