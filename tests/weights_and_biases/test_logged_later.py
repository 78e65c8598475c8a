"""A finished run is logged to W&B again if it is resumed."""

import json
import shutil

import pytest

from fl_lightning import FederatedModule, Run
from tests.support.command_line import run, write_config
from tests.support.helpers import SGD, blobs, small_cnn
from tests.support.wandb_files import offline_runs, read_run

METHODS = [
    {"class_path": "FixBN", "init_args": {"freeze_round": 2}},
    {"class_path": "ClientEvaluation"},
]


def same_again(items):
    """Items of W&B without what clocks say, and the ids that it draws for the artifacts of tables."""
    return {
        name: value
        for name, value in items.items()
        if not name.startswith(("_timestamp", "_runtime", "_wandb", "time/"))
        and not name.endswith(("artifact_path", "_seconds"))
    }


def told(folder):
    """What W&B has of a run."""
    found = read_run(folder)
    names = ("run_id", "display_name", "run_group", "project")
    return {
        "run": {name: getattr(found.run, name) for name in names},
        "tags": sorted(found.run.tags),
        "exit code": found.exit_code,
        "config": same_again(found.config),
        "metrics": {name: str(metric) for name, metric in found.metrics.items()},
        "history": [same_again(row) for row in found.history],
        "summary": {
            name: same_again(value) if isinstance(value, dict) else value
            for name, value in same_again(found.summary).items()
        },
    }


@pytest.mark.slow
@pytest.mark.pictures
@pytest.mark.parametrize("first", ["offline", "disabled"])
def test_finished_run_is_logged_again_by_resuming_it(first, offline, capsys):
    write_config({"trainer.callbacks": METHODS})
    setting = ("--wandb.project", "other", "--wandb.tags", "[mine]", "--wandb.mode")
    usual = run(*setting, "offline").attempt
    (folder,) = offline_runs(usual)
    before, wandb_id = told(folder), usual.wandb_id.read_text()
    shutil.rmtree(usual.path / "wandb")
    if first == "disabled":
        shutil.rmtree(usual.path)
        usual = run(*setting, "disabled").attempt
        assert not (usual.path / "wandb").exists()
    capsys.readouterr()
    again = run(*setting, "offline", "--ckpt_path", "last").attempt
    assert again == usual
    (folder,) = offline_runs(again)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == f"W&B: offline; to upload the run: wandb sync {folder}"
    assert shown.err == ""
    after = told(folder)
    if first == "disabled":
        assert after["run"].pop("run_id") != before["run"].pop("run_id")
        assert after["config"].pop("wandb") == {**before["config"].pop("wandb"), "mode": "disabled"}
    else:
        assert again.wandb_id.read_text() == wandb_id
    for part in before:
        assert after[part] == before[part], part
    assert len(before["history"]) == 5
    media = {name.partition(".")[0] for name in before["history"][-1]}
    assert {"policy", "clients", "clients_table", "learning_curve"} <= media
    assert before["run"]["project"] == "other"
    assert "final/test/accuracy" in before["summary"]


def test_finished_run_of_python_is_logged_by_resuming_it(offline):
    def a_run(mode):
        module = FederatedModule(small_cnn(), SGD, local_steps=1)
        settings = {"precision": "64-true", "accelerator": "cpu", "enable_progress_bar": False}
        return Run(module, blobs(), name="mine", max_epochs=2, wandb=mode, **settings)

    first, again = a_run("disabled"), a_run("offline")
    first.fit()
    again.fit(resume=True)
    assert again.path.samefile(first.path)
    (folder,) = offline_runs(again.attempt)
    assert [row["round"] for row in read_run(folder).history] == [0, 1, 2]


def test_run_json_says_what_a_run_is_called():
    attempt = run("--trainer.max_epochs", 1).attempt
    assert json.loads(attempt.identity.read_text())["name"].startswith("FedAvg+FixBN(freeze_round=2)-Digits-")
