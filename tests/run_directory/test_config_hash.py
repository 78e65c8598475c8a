"""What of a configuration names its run: whatever decides the numbers, and nothing else."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fl_lightning.cli import main
from fl_lightning.experiments.run import training
from fl_lightning.experiments.run_directory.description import OUTSIDE_THE_HASH, config_hash, directory_of

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


def changed(*keys, value="other"):
    config = copy.deepcopy(CONFIG)
    node = config
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return config


@pytest.mark.parametrize("setting", sorted(name for name in OUTSIDE_THE_HASH if name.islower()))
def test_setting_of_the_trainer_that_changes_no_result_leaves_the_hash(setting):
    assert config_hash(changed("trainer", setting)) == config_hash(CONFIG)


def test_threads_that_read_images_leave_the_hash():
    data = [{"class_path": "ImageNet", "init_args": {"threads": n, "data_dir": "d"}} for n in (1, 4)]
    assert len({config_hash({**CONFIG, "data": one}) for one in data}) == 1
    assert config_hash({**CONFIG, "data": {**data[0], "init_args": {}}}) != config_hash(
        {**CONFIG, "data": data[0]}
    )


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
    code = "import json, sys; from fl_lightning.experiments.run_directory.description import *; print(config_hash(json.load(sys.stdin)))"
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


@pytest.mark.parametrize(
    ("name", "default", "value"),
    [
        ("task", None, {"class_path": "fl_lightning.Segmentation"}),
        ("initial_weights", None, "last.ckpt"),
        ("failures", None, {"class_path": "fl_lightning.ClientFailures", "init_args": {"dropout": 0.1}}),
        ("min_clients", 1, 2),
        ("statistics_aggregator", None, {"class_path": "fl_lightning.aggregation.Median"}),
        ("statistics_domain", None, "variance"),
    ],
)
def test_a_setting_at_its_default_leaves_the_hash_and_another_value_does_not(name, default, value):
    assert config_hash(changed("model", "init_args", name, value=default)) == config_hash(CONFIG)
    assert config_hash(changed("model", "init_args", name, value=value)) != config_hash(CONFIG)


def test_the_quickstart_has_the_folder_of_the_readme(monkeypatch):
    """New settings leave the folders of runs that do without them."""

    class Found(BaseException):
        pass

    def stop(config):
        found = directory_of(config)
        raise Found(found.root / found.stem)

    monkeypatch.setattr(training, "directory_of", stop)
    with pytest.raises(Found) as found:
        main(["fit", "--config", str(ROOT / "configs/quickstart.yaml")])
    assert f"files            {found.value}\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("none", "spelt", "other"), [(None, "32-true", "64-true"), ("16", "16-mixed", "bf16-mixed")]
)
def test_a_precision_counts_by_what_lightning_makes_of_it(none, spelt, other):
    hashes = [config_hash(changed("trainer", "precision", value=value)) for value in (none, spelt, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_classification_counts_as_the_task_of_a_run_without_one():
    task = {"class_path": "fl_lightning.round.tasks.Classification", "init_args": {"ignored": -100}}
    given = changed("model", "init_args", "task", value=task)
    assert config_hash(given) == config_hash(CONFIG)
    task["init_args"]["ignored"] = 255
    assert config_hash(given) != config_hash(CONFIG)
    task["init_args"]["ignored"] = -100
    with_loss = changed("model", "init_args", "loss", value="losses.own")
    given["model"]["init_args"]["loss"] = "losses.own"
    assert config_hash(given) != config_hash(with_loss)  # a loss decides its ignored label without a task
