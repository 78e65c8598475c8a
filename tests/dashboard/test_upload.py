"""A run's folder is enough to make its run at W&B again."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from command_line import message_of, run, write_config
from wandb_files import offline_runs, read_run, run_id

from fl_lightning.__main__ import main
from fl_lightning.experiments.dashboard.contents import read_table

METHODS = [
    {"class_path": "FixBN", "init_args": {"freeze_round": 2}},
    {"class_path": "ClientEvaluation"},
]


def same_again(items):
    """Items of W&B without what clocks say, and the ids that it draws for the artifacts of tables."""
    return {
        name: value
        for name, value in items.items()
        if not name.startswith(("_timestamp", "_runtime", "_wandb")) and not name.endswith("artifact_path")
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


@pytest.mark.pictures
def test_uploaded_run_is_the_one_that_was_logged(offline, capsys):
    write_config({"trainer.callbacks": METHODS})
    attempt = run("--wandb.project", "other", "--wandb.tags", "[mine]", "--wandb.mode", "offline").attempt
    (logged,) = offline_runs(attempt)
    before = told(logged)
    shutil.rmtree(attempt.path / "wandb")
    capsys.readouterr()
    main(["upload", str(attempt.path)])
    (uploaded,) = offline_runs(attempt)
    shown = capsys.readouterr()
    assert shown.out == f"W&B: offline; to upload the run: wandb sync {uploaded}\n"
    assert shown.err == ""
    after = told(uploaded)
    for part in before:
        assert after[part] == before[part], part
    assert len(before["history"]) == 5
    media = {name.partition(".")[0] for name in before["history"][-1]}
    assert {"policy", "clients", "clients_table", "client_accuracy", "learning_curve"} <= media
    assert before["run"]["project"] == "other"
    assert "final/test/accuracy" in before["summary"]


def test_runs_that_were_not_logged_or_broke_off_are_uploaded_under_a_new_id(offline):
    write_config({"trainer.callbacks": METHODS})
    done, off = (run("--wandb.mode", "disabled", "--seed_everything", seed).attempt for seed in (0, 1))
    off.result.unlink()
    main(["upload", str(done.path), str(off.path)])
    runs = [read_run(offline_runs(attempt)[0]) for attempt in (done, off)]
    assert [found.exit_code for found in runs] == [0, 1]
    assert [len(found.history) for found in runs] == [5, 5]
    assert runs[0].run.run_group == runs[1].run.run_group
    assert "diverged" not in runs[1].summary
    assert done.wandb_id.read_text().strip() == run_id(offline_runs(done)[0])


@pytest.mark.parametrize("missing", ["config.yaml", "run.json", "metrics.jsonl"])
def test_folder_that_is_no_run_is_one_line_and_nothing_is_uploaded(missing, capsys):
    attempt = run("--trainer.max_epochs", 1, "--wandb.mode", "disabled").attempt
    shutil.copytree(attempt.path, "other")
    (Path("other") / missing).unlink()
    line = message_of(capsys, lambda: main(["upload", str(attempt.path), "other"]))
    assert f"upload: other is no run: it has no {missing}" in line
    assert not (attempt.path / "wandb").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\x00", ["config.yaml", "no resolved configuration"]),
        (b"[1, 2]", ["config.yaml", "no resolved configuration"]),
        (b"", ["config.yaml", "no resolved configuration"]),
        (b"wandb: 3", ["config.yaml", "wandb", "3", "wandb.mode"]),
        (b"wandb: {foo: 1}", ["config.yaml", "wandb.foo", "1", "wandb.mode"]),
        (b"wandb: {tags: 1}", ["config.yaml", "wandb.tags", "1", "wandb.mode"]),
    ],
)
def test_damaged_configuration_is_one_line_and_nothing_is_uploaded(content, words, capsys):
    attempt = run("--trainer.max_epochs", 1, "--wandb.mode", "disabled").attempt
    shutil.copytree(attempt.path, "other")
    if content.startswith(b"wandb"):
        kept = attempt.read_config() | yaml.safe_load(content)
        content = yaml.safe_dump(kept).encode()
    Path("other/config.yaml").write_bytes(content)
    line = message_of(capsys, lambda: main(["upload", str(attempt.path), "other"]))
    assert all(word in line for word in words)
    assert not (attempt.path / "wandb").exists()


def test_disabled_upload_is_an_error(session, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    attempt = run("--trainer.max_epochs", 1).attempt
    capsys.readouterr()
    assert "WANDB_MODE" in message_of(capsys, lambda: main(["upload", str(attempt.path)]))


def test_cells_of_a_table_have_the_type_of_their_column():
    Path("a.csv").write_text('layer,rounds,loss,name\n1,3,0.1,"a, b"\nconv,,,\n')
    columns, rows = read_table(Path("a.csv"))
    assert columns == ["layer", "rounds", "loss", "name"]
    assert rows == [["1", 3, 0.1, "a, b"], ["conv", None, None, None]]
    Path("a.csv").write_text("layer,rounds\n")
    assert read_table(Path("a.csv")) == (["layer", "rounds"], [])


def test_run_json_says_what_a_run_is_called():
    attempt = run("--trainer.max_epochs", 1).attempt
    assert json.loads(attempt.identity.read_text())["name"].startswith("FedAvg+FixBN(freeze_round=2)-Digits-")
