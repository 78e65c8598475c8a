"""What of a configuration names its run: whatever decides the numbers, and nothing else."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fl_lightning import FederatedModule
from fl_lightning.cli.command_line import main
from fl_lightning.experiments.run import training
from fl_lightning.experiments.run_directory.config_digest import (
    OUTSIDE_THE_HASH,
    changed_settings,
    config_hash,
    deciding_settings,
    directory_of,
)
from tests.support.naming import named

ROOT = Path(__file__).parents[2]

CONFIG = {
    "seed_everything": 0,
    "ckpt_path": None,
    "name": "quickstart",
    "model": {
        "class_path": "fl_lightning.FederatedModule",
        "init_args": {"local_steps": 5, "name": "resnet8"},
    },
    "trainer": {
        "max_epochs": 10,
        "precision": "32-true",
        "callbacks": [
            {"class_path": "fl_lightning.callbacks.fixbn.FixBN", "init_args": {"freeze_round": 5}},
            {
                "class_path": "fl_lightning.experiments.run.progress.RoundProgress",
                "init_args": {"every_n_seconds": 5.0},
            },
        ],
    },
}


def changed(*keys, value="other", config=CONFIG):
    config = copy.deepcopy(config)
    node = config
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return config


@pytest.mark.parametrize("setting", sorted(name for name in OUTSIDE_THE_HASH if name.islower()))
def test_setting_of_the_trainer_that_changes_no_result_leaves_the_hash(setting):
    assert config_hash(changed("trainer", setting)) == config_hash(CONFIG)


def test_threads_that_read_images_leave_the_hash():
    def names(kind):
        data = [{"class_path": kind, "init_args": {"threads": n, "data_dir": "d"}} for n in (1, 4)]
        return {config_hash({**CONFIG, "data": one}) for one in data}

    assert len(names("fl_lightning.datamodules.ImageNet")) == 1
    assert len(names("mine.Spread")) == 2  # of a class of one's own they may decide more


def test_only_model_data_trainer_and_seed_name_a_run():
    config = {**CONFIG, "data": {}, "run_root": "runs"}
    other = {**config, "threads": 3, "wandb": {"mode": "online"}, "checkpoint": {"monitor": "val/loss"}}
    assert directory_of(config) == directory_of(other)
    assert directory_of(config) != directory_of({**config, "seed_everything": 1})


@pytest.mark.parametrize(
    "keys",
    [
        ("trainer", "precision"),
        ("model", "init_args", "local_steps"),
        ("model", "init_args", "name"),
        ("trainer", "callbacks", 0, "class_path"),
        ("trainer", "callbacks", 0, "init_args", "freeze_round"),
    ],
)
def test_setting_that_changes_the_result_changes_the_hash(keys):
    assert config_hash(changed(*keys)) != config_hash(CONFIG)


def test_progress_bar_and_checkpoint_callbacks_do_not_count_wherever_they_stand():
    fixbn, _ = CONFIG["trainer"]["callbacks"]
    checkpoint = {
        "class_path": "fl_lightning.experiments.run_directory.checkpoints.RoundCheckpoint",
        "init_args": {"every_n_rounds": 1},
    }
    assert config_hash(changed("trainer", "callbacks", value=[checkpoint, fixbn])) == config_hash(CONFIG)


def test_order_of_callbacks_counts_and_order_of_keys_does_not():
    fixbn, _ = CONFIG["trainer"]["callbacks"]
    fedbn = {"class_path": "fl_lightning.callbacks.fedbn.FedBN"}
    one = changed("trainer", "callbacks", value=[fixbn, fedbn])
    other = changed("trainer", "callbacks", value=[fedbn, fixbn])
    assert config_hash(one) != config_hash(other)
    assert config_hash(dict(reversed(CONFIG.items()))) == config_hash(CONFIG)


@pytest.mark.slow
def test_hash_is_eight_hex_digits_and_the_same_in_every_process():
    code = "import json, sys; from fl_lightning.experiments.run_directory.config_digest import *; print(config_hash(json.load(sys.stdin)))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(CONFIG),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": seed},
    ).stdout.strip()
    assert printed == config_hash(CONFIG)
    assert len(bytes.fromhex(printed)) == 4


def leaves(node, *keys):
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from leaves(value, *keys, key)
    if not items:
        yield keys


def test_every_setting_of_a_resolved_configuration_names_the_run_but_those_outside():
    config = named().config
    outside = {("trainer", name) for name in OUTSIDE_THE_HASH} | {("model", "check_first_steps")}
    before = config_hash(config)
    tried = [keys for keys in leaves(config) if keys[0] in ("model", "data", "trainer")]
    assert len(tried) > 80
    for keys in tried:
        assert (config_hash(changed(*keys, config=config)) == before) == (keys[:2] in outside), keys


def test_two_files_of_one_resolved_configuration_have_one_name():
    """Whether a setting is left to its default or written, in this order or another."""
    one = named()
    written = {name: one.config[name] for name in ("trainer", "data", "seed_everything", "model")}
    Path("other.yaml").write_text(yaml.safe_dump(written, sort_keys=True))
    assert named(config="other.yaml").hash == one.hash
    assert named("--model.participation=1.0", "--model.client_optimizer.momentum=0").hash == one.hash
    assert named("--model.participation=2").hash != one.hash
    assert named("--model.client_optimizer.momentum=0.5").hash != one.hash


def test_the_quickstart_has_the_folder_of_the_readme(monkeypatch):
    """The page names the folder that its command writes."""

    class Found(BaseException):
        pass

    def stop(config):
        found = directory_of(config)
        raise Found(found.root / found.stem)

    monkeypatch.setattr(training, "directory_of", stop)
    with pytest.raises(Found) as found:
        main(["fit", "--config", str(ROOT / "configs/quickstart.yaml")])
    assert f"files            {found.value}\n" in (ROOT / "README.md").read_text()


def test_the_files_of_a_folder_name_a_run(tmp_path):
    def name(users):
        (tmp_path / "all_data_0.json").write_text(json.dumps({"user_data": users}))
        data = {
            "class_path": "fl_lightning.datamodules.Cityscapes",
            "init_args": {"split_file": str(tmp_path)},
        }
        return config_hash({"model": {}, "data": data, "trainer": {}})

    assert name({"a": 1}) == name({"a": 1}) != name({"b": 1})


@pytest.mark.parametrize(
    ("keys", "node"),
    [
        (("model", "init_args", "initial_weights"), None),
        (("data",), {"class_path": "fl_lightning.datamodules.FromFile", "init_args": {"path": ""}}),
        (("data",), {"class_path": "fl_lightning.datamodules.TensorData", "init_args": {"features": ""}}),
        (("model", "init_args", "model"), {"class_path": "fl_lightning.models.deeplab_v3_plus", "init_args": {"encoder_weights": ""}}),
    ],
)  # fmt: skip
def test_a_file_that_decides_results_counts_by_its_content_wherever_it_lies(keys, node):
    def name(path, content):
        Path(path).write_bytes(content)
        value = path if node is None else {**node, "init_args": dict.fromkeys(node["init_args"], path)}
        return config_hash(changed(*keys, value=value))

    assert name("one", b"1") == name("other", b"1") != name("third", b"22")


def test_two_callbacks_of_one_class_differ_by_both():
    one = {"class_path": "Byzantine", "init_args": {"clients": [1]}}
    two = {"class_path": "Byzantine", "init_args": {"clients": [2]}}
    config = {"model": {}, "data": {}, "trainer": {"callbacks": [one, two]}}
    settings = deciding_settings(config)
    assert settings["trainer.callbacks.Byzantine.clients"] == [1]
    assert settings["trainer.callbacks.Byzantine.2.clients"] == [2]


def test_nan_does_not_differ_from_nan():
    """A run whose settings hold NaN would go on as one of other settings."""
    nan = float("nan")
    assert changed_settings({"a": nan, "b": [nan, 1]}, {"a": nan, "b": [nan, 1]}) == {}
    assert [*changed_settings({"a": nan, "b": 1}, {"a": 1.0, "b": 1.0})] == ["a"]


@pytest.mark.parametrize(
    ("now", "differs"),
    [("removed.pt", False), ("content b", True), (None, True), (3, True), (False, True), ({"a": "x"}, True)],
)
def test_only_the_path_of_a_removed_file_is_no_difference(now, differs):
    name = "model.initial_weights"
    assert changed_settings({name: "content a"}, {name: now}) == (
        {name: ["content a", now]} if differs else {}
    )


def test_how_often_the_server_evaluates_counts_where_a_callback_may_act_upon_it():
    """Clients send for it, or it stops the run."""
    for path, counts in (
        ("fl_lightning.callbacks.FixBN", False),
        ("fl_lightning.RoundProgress", False),
        ("fl_lightning.callbacks.StaticBN", True),
        ("lightning.pytorch.callbacks.EarlyStopping", True),
        ("mine.Stopping", True),
    ):
        trainer = {"callbacks": [{"class_path": path}]}
        configs = [{**CONFIG, "trainer": {**trainer, "check_val_every_n_epoch": n}} for n in (1, 2)]
        assert len({*map(config_hash, configs)}) == 1 + counts, path


def test_the_class_of_a_module_of_ones_own_names_a_run():
    """Also where the command line is given the class, so that no file names it."""
    found = []
    for kind in (FederatedModule, type("Mine", (FederatedModule,), {"__module__": "mine"})):
        module = object.__new__(kind)
        config = {**CONFIG, "model": CONFIG["model"]["init_args"], "data": {}, "run_root": "runs"}
        found.append(training.Training(module, None, config, None).directory.stem)
    assert found[0] != found[1]
