"""What a finished offline run at W&B holds: the rows, the configuration, tables, pictures and checkpoints."""

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.weights_and_biases.contents import callback_settings
from fl_lightning.experiments.weights_and_biases.logger import RoundWandbLogger
from tests.support.command_line import run, write_config
from tests.support.wandb_files import metrics, read_run


@pytest.fixture(scope="module")
def finished(session, tmp_path_factory):
    """A finished run without a key: its folder, what it printed and what W&B's file holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        printed = []
        patch.setattr("builtins.print", lambda *objects, **_: printed.append(str(objects[0])))
        write_config({"trainer.max_epochs": 5, "seed_everything": 7})
        attempt = run("--wandb.tags", "[mine]", "--wandb.log_checkpoints", "true").attempt
        attempt, left = Attempt(attempt.path.resolve()), sorted(path.name for path in Path.cwd().iterdir())
    (folder,) = attempt.path.glob("wandb/*run-*")
    return SimpleNamespace(
        attempt=attempt,
        printed=printed,
        folder=folder,
        left=left,
        logged=read_run(folder),
    )


def test_user_is_told_where_the_offline_run_is_and_nothing_else(finished):
    told = [line for line in finished.printed if "andb" in line or "W&B" in line]
    path = finished.folder.relative_to(finished.attempt.path.parents[2])
    assert told == [f"W&B: offline; to upload the run: wandb sync {path}"]
    assert finished.left == ["runs", "tiny.yaml"]


def test_history_is_metrics_jsonl_row_by_row(finished):
    history = finished.logged.history
    logged, written = metrics(history, finished.attempt)
    assert logged == written
    assert [row["round"] for row in history] == [0, 1, 2, 3, 4, 5]
    extra = {name for row in history[:-1] for name in row if not name.startswith("_")}
    assert extra == {name for row in written for name in row}
    assert "trainer/global_step" not in extra


def test_every_metric_has_the_round_as_its_axis(finished):
    defined = finished.logged.metrics
    assert defined.pop("round").step_metric == ""
    assert defined["*"].glob_name == "*"
    assert {metric.step_metric for metric in defined.values()} == {"round"}
    assert set(defined) == {"*", "val/accuracy", "val/loss", "test/accuracy", "test/loss"}


def test_summary_holds_the_best_and_the_last_evaluation_and_the_result(finished):
    summary = finished.logged.summary
    rows = [row for row in read_metrics(finished.attempt.metrics) if "val/accuracy" in row]
    assert summary["val/accuracy"] == {
        "max": max(row["val/accuracy"] for row in rows), "last": rows[-1]["val/accuracy"]
    }  # fmt: skip
    assert summary["val/loss"] == {
        "min": min(row["val/loss"] for row in rows), "last": rows[-1]["val/loss"]
    }  # fmt: skip
    result = json.loads(finished.attempt.result.read_text())
    assert summary["test/accuracy"] == dict.fromkeys(["max", "last"], result["test/accuracy"])
    assert finished.logged.history[-1]["test/loss"] == result["test/loss"]
    assert summary["train/loss"] == read_metrics(finished.attempt.metrics)[-1]["train/loss"]
    assert summary["final/test/accuracy"] == result["test/accuracy"]
    numbers = {name for name, value in result.items() if type(value) in (int, float)}
    assert {name for name in summary if name.startswith("final/")} == {f"final/{name}" for name in numbers}
    assert summary["diverged"] is False


def test_run_is_named_grouped_and_tagged_by_method_partition_and_seed(finished):
    logged = finished.logged.run
    assert logged.project == "fl_lightning"
    assert logged.display_name == "FedAvg+FixBN(freeze_round=2)-Digits-Shards-E2-lr0.05-s7"
    assert logged.run_group == "tiny-" + finished.attempt.path.name.removesuffix("-s7")
    assert set(logged.tags) == {"FedAvg", "FixBN", "Digits", "LeNet", "mine"}
    assert finished.attempt.wandb_id.read_text().strip() == logged.run_id


def test_config_is_the_resolved_configuration_and_what_it_leaves_to_be_computed(finished):
    config = finished.logged.config
    saved = yaml.safe_load(finished.attempt.config.read_text())
    assert {name: config[name] for name in saved} == saved
    assert config["seed"] == 7
    assert config["method"] == "FedAvg + FixBN(freeze_round=2)"
    assert config["partition"] == "Shards(class_fraction=0.4), 3 clients"
    assert config["planned_rounds"] == 5
    assert finished.attempt.path.name == f"{config['config_hash']}-s7"
    assert "git_commit" in config
    assert config["callbacks"]["FixBN"]["freeze_round"] == 2
    assert config["callbacks"]["FixBN"].keys() == {"freeze_round", "freeze"}


def test_settings_of_callbacks_have_the_name_of_their_class():
    nodes = [
        {"class_path": "fl_lightning.callbacks.FixBN", "init_args": {"freeze_round": 2}},
        {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}},
        {"class_path": "mine.My_Method"},
        {"class_path": "FixBN", "init_args": {"freeze_round": 4}},
    ]
    assert callback_settings({"trainer": {"callbacks": nodes}}) == {
        "FixBN": {"freeze_round": 2},
        "EarlyStopping": {"monitor": "val/loss"},
        "My_Method": {},
        "FixBN_2": {"freeze_round": 4},
    }
    assert callback_settings({"trainer": {"callbacks": None}}) == callback_settings({"trainer": None}) == {}


def test_pictures_and_tables_belong_to_the_last_round(finished):
    last = finished.logged.history[-1]
    for name in ("partition", "learning_curve", "class_accuracy", "policy", "clients"):
        (path,) = [value for key, value in last.items() if key == f"{name}.path"] or [last[name]["path"]]
        assert (finished.folder / "files" / path).is_file()


def table(finished, name):
    (path,) = finished.folder.glob(f"files/media/table/{name}_*.table.json")
    content = json.loads(path.read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def test_clients_table_holds_what_each_client_has_and_did(finished):
    rows = table(finished, "clients")
    partition = json.loads(finished.attempt.partition.read_text())
    assert [row["client"] for row in rows] == [0, 1, 2]
    assert [row["training examples"] for row in rows] == partition["sizes"]
    assert {(row["rounds"], row["local steps"]) for row in rows} == {(5, 10)}
    classes = [[value for name, value in row.items() if name.startswith("class ")] for row in rows]
    assert classes == partition["class_histogram"]
    sizes = torch.tensor(partition["sizes"], dtype=torch.float64)
    mean = (sizes / sizes.sum()) @ torch.tensor(
        [row["last training loss"] for row in rows], dtype=torch.float64
    )
    assert float(mean) == pytest.approx(read_metrics(finished.attempt.metrics)[-1]["train/loss"], rel=1e-6)


def test_policy_table_says_what_happens_to_the_state(finished):
    rows = {row["state of the model"]: row["in a round"] for row in table(finished, "policy")}
    assert rows["BN running mean"] == "averaged; frozen from round 3"


def test_checkpoints_are_an_artifact_whose_files_stay_where_they_are(finished):
    (artifact,) = [found for found in finished.logged.artifacts if found.type == "model"]
    assert set(artifact.aliases) == {"latest"}
    (entry,) = artifact.manifest.contents
    assert Path(entry.local_path) == finished.attempt.checkpoints / "last.ckpt"
    others = [found for found in finished.logged.artifacts if found is not artifact]
    for entry in (entry for found in others for entry in found.manifest.contents):
        assert finished.folder in Path(entry.local_path).parents, (
            "wandb sync would need a file of another folder"
        )


def test_the_command_for_an_upload_works_with_any_name_of_the_folder(tmp_path):
    folder = tmp_path / "my $runs; (1)" / "offline-run-1"
    logger = RoundWandbLogger.__new__(RoundWandbLogger)
    logger._run, logger._failed = SimpleNamespace(offline=True, dir=str(folder / "files")), False
    words = shlex.split(logger.place.rpartition("upload the run: ")[2])
    assert words == ["wandb", "sync", os.path.relpath(folder)]
