import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import matplotlib as mpl
import pytest
import torch
import yaml
from command_line import run_rendered as run
from command_line import write_config
from helpers import SGD, blobs, small_cnn
from wandb_files import read_run

from fl_lightning import FederatedCallback, FederatedModule
from fl_lightning.dashboard.contents import clients_table
from fl_lightning.dashboard.logger import RoundWandbLogger
from fl_lightning.dashboard.settings import WandbSettings
from fl_lightning.errors import ConfigurationError
from fl_lightning.run_directory.directory import Attempt
from fl_lightning.run_directory.metrics import read_metrics

KEY = "0123456789abcdef" * 3


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A W&B session of this file alone: no key, no settings and no caches of the user's."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("NETRC", str(home / "netrc"))
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            patch.setenv(name, str(home))
        import wandb

        yield home
        wandb.teardown()


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


@pytest.fixture
def offline(session, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return session


def offline_runs(attempt):
    return sorted(attempt.path.glob("wandb/*run-*"))


def metrics(history, attempt):
    """Rows of a history and of metrics.jsonl, both with the names that metrics.jsonl has."""
    written = read_metrics(attempt.metrics)
    return [
        {name: row.get(name) for name in known} for row, known in zip(history, written, strict=True)
    ], written


def test_without_a_key_and_a_home_the_run_is_offline_and_its_process_connects_nowhere_and_prints_no_warning(
    session,
):
    # a process of its own: W&B's telemetry is sent at the end of the process
    write_config()
    command = [sys.executable, "-W", "error", "-m", "fl_lightning", "fit", "--config", "tiny.yaml"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        # an empty mode is none
        own = {
            "WANDB_BASE_URL": url,
            "WANDB_MODE": "",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        own |= {"HOME": str(Path("tiny.yaml").resolve()), "MPLCONFIGDIR": mpl.get_cachedir()}
        unset = (
            "JSONARGPARSE_DEPRECATION_WARNINGS", "PYTHONWARNINGS", "WANDB_CACHE_DIR", "XDG_CACHE_HOME",
            "WANDB_CONFIG_DIR",
        )  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in unset} | own
        done = subprocess.run(
            [*command, "--trainer.max_epochs", "1"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (done.returncode, done.stderr) == (0, "")
    (folder,) = Path("runs").glob("*/*/wandb/offline-run-*")
    assert read_run(folder).exit_code == 0


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
    assert set(defined) == {name for row in read_metrics(finished.attempt.metrics) for name in row}
    assert {metric.step_metric for name, metric in defined.items() if name != "round"} == {"round"}
    assert not any(metric.glob_name for metric in defined.values())


def test_summary_holds_the_best_and_the_last_evaluation_and_the_result(finished):
    summary = finished.logged.summary
    rows = [row for row in read_metrics(finished.attempt.metrics) if "val/accuracy" in row]
    assert summary["val/accuracy"] == {
        "max": max(row["val/accuracy"] for row in rows), "last": rows[-1]["val/accuracy"]
    }  # fmt: skip
    assert summary["val/loss"] == {
        "min": min(row["val/loss"] for row in rows), "last": rows[-1]["val/loss"]
    }  # fmt: skip
    assert summary["train/loss"] == read_metrics(finished.attempt.metrics)[-1]["train/loss"]
    result = json.loads(finished.attempt.result.read_text())
    assert summary["final/test/accuracy"] == result["test/accuracy"]
    numbers = {name for name, value in result.items() if type(value) in (int, float)}
    assert {name for name in summary if name.startswith("final/")} == {f"final/{name}" for name in numbers}
    assert summary["diverged"] is False


def test_run_is_named_grouped_and_tagged_by_method_partition_and_seed(finished):
    logged = finished.logged.run
    assert logged.project == "fl_lightning"
    assert logged.display_name == "FedAvg+FixBN-Shards-E2-s7"
    assert logged.run_group == "tiny-" + finished.attempt.path.name.removesuffix("-s7")
    assert logged.job_type == "fit"
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


def test_disabled_run_does_not_import_wandb_and_has_no_folder(session, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would fail
    attempt = run("--trainer.max_epochs", 1).attempt
    assert not (attempt.path / "wandb").exists()
    assert not attempt.wandb_id.exists()


def test_mode_of_the_configuration_decides_over_the_environment(offline, monkeypatch):
    attempt = run("--trainer.max_epochs", 1, "--wandb.mode", "disabled").attempt
    assert not (attempt.path / "wandb").exists()


def test_resumed_run_keeps_its_id_and_leaves_one_offline_run_with_all_rounds(offline):
    attempt = run("--trainer.max_epochs", 2).attempt
    (first,) = offline_runs(attempt)
    run("--ckpt_path", "last", "--trainer.max_epochs", 4)
    (second,) = offline_runs(attempt)
    assert first != second
    before, after = read_run_id(first), read_run(second)
    assert after.run.run_id == before == attempt.wandb_id.read_text().strip()
    logged, written = metrics(after.history, attempt)
    assert logged == written
    assert [row["round"] for row in written] == [0, 1, 2, 3, 4]
    (path,) = second.glob("files/media/table/clients_*.table.json")
    assert [row[2:4] for row in json.loads(path.read_text())["data"]] == [[8, 4]] * 3


def read_run_id(folder):
    return folder.name.rpartition("-")[2]


def test_run_that_goes_on_in_a_new_attempt_is_a_new_run_with_all_rounds(offline):
    first = run("--trainer.max_epochs", 2).attempt
    last = first.checkpoints / "last.ckpt"
    second = run("--ckpt_path", last, "--trainer.max_epochs", 3, "--model.local_steps", 1).attempt
    assert second.path != first.path
    assert first.wandb_id.read_text() != second.wandb_id.read_text()
    (folder,) = offline_runs(second)
    logged, written = metrics(read_run(folder).history, second)
    assert logged == written
    assert len(offline_runs(first)) == 1


class Stopped(FederatedCallback):
    """Breaks off a round."""

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if cohort.round == 3:
            raise RuntimeError("stopped")


def test_run_that_breaks_off_is_marked_and_holds_its_rounds(offline):
    stop = {"class_path": f"{__name__}.Stopped"}
    write_config({"trainer.callbacks": [stop]})
    with pytest.raises(RuntimeError, match="stopped"):
        run()
    (folder,) = Path("runs").glob("*/*/wandb/offline-run-*")
    logged = read_run(folder)
    assert logged.exit_code == 1
    assert [row["round"] for row in logged.history] == [0, 1, 2]
    assert list(folder.parents[1].glob("learning_curve.png"))
    assert list(folder.glob("files/media/images/learning_curve_*.png"))


def test_own_wandb_logger_gets_the_same_contents_and_no_second_run_is_started(offline, monkeypatch):
    import wandb

    wandb.teardown()  # it read the environment when it was first used
    monkeypatch.setenv("WANDB_MODE", "offline")
    own = {
        "class_path": "lightning.pytorch.loggers.WandbLogger",
        "init_args": {"project": "mine", "save_dir": "own"},
    }
    Path("own").mkdir()
    write_config({"trainer.logger": own})
    attempt = run().attempt
    wandb.finish()
    wandb.teardown()
    assert not (attempt.path / "wandb").exists()
    (folder,) = Path("own").glob("wandb/offline-run-*")
    logged = read_run(folder)
    assert logged.run.project == "mine"
    assert logged.config["planned_rounds"] == 4
    assert logged.metrics["val/accuracy"].step_metric == "round"
    assert logged.summary["val/accuracy"].keys() == {"max", "last"}
    assert "final/test/accuracy" in logged.summary
    assert {path.name.partition("_4")[0] for path in folder.glob("files/media/*/*")} >= {
        "policy",
        "clients",
    } or list(folder.glob("files/media/table/clients_*"))


def test_run_goes_on_where_wandb_fails_and_its_end_brings_everything_back(offline, monkeypatch, capsys):
    from wandb import Run

    log, failures = Run.log, []

    def fail_once_in_round_2(self, row, step):
        if step == 2 and not failures:
            failures.append(step)
            raise ConnectionResetError("Connection lost")
        log(self, row, step=step)

    monkeypatch.setattr(Run, "log", fail_once_in_round_2)
    attempt = run("--trainer.max_epochs", 4).attempt
    shown = capsys.readouterr()
    failure, place = [line for line in (shown.err + shown.out).splitlines() if "W&B" in line]
    assert (
        failure
        == f"W&B failed, the run goes on without it; all metrics are in {attempt.metrics}: Connection lost"
    )
    (folder,) = offline_runs(attempt)
    assert str(folder) in place
    found = read_run(folder)
    logged, written = metrics(found.history, attempt)
    assert logged == written
    assert len(written) == 5
    assert "final/test/accuracy" in found.summary
    assert found.config["planned_rounds"] == 4


def test_unreachable_server_turns_the_run_offline_with_one_line(offline, monkeypatch, capsys):
    import wandb

    wandb.teardown()
    monkeypatch.setattr("fl_lightning.dashboard.settings._INIT_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    attempt = run("--trainer.max_epochs", 1).attempt
    wandb.teardown()
    shown = capsys.readouterr()
    (told,) = [line for line in shown.err.splitlines() if line.startswith("W&B")]
    assert told.startswith("W&B does not work online, the run goes on offline: ")
    (folder,) = offline_runs(attempt)
    assert [row["round"] for row in read_run(folder).history] == [0, 1]


def test_offline_run_leaves_the_next_run_of_its_process_free_to_go_online(offline, monkeypatch):
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    wandb.setup(settings=wandb.Settings(silent=True, mode="offline"))
    assert WandbSettings().resolve_mode() == "online"
    settings = offline / "settings"
    settings.write_text("[default]\nmode = offline\n")  # as the command wandb offline does
    try:
        assert WandbSettings().resolve_mode() == "offline"
    finally:
        settings.unlink()
        wandb.teardown()


def test_rows_that_the_server_has_are_not_sent_again(tmp_path, monkeypatch):
    sent = []
    resumed = SimpleNamespace(
        id="abc", starting_step=3, dir=str(tmp_path), config={},
        define_metric=lambda *_, **__: None, log=lambda row, step: sent.append((step, row["round"])),
    )  # fmt: skip
    monkeypatch.setattr("fl_lightning.dashboard.logger.open_run", lambda mode, init: (resumed, "online"))
    logger = RoundWandbLogger()
    for number in (2, 3, 4):
        logger.log_metrics({"round": number, "train/loss": 1.0}, step=number)
    assert sent == [(3, 3), (4, 4)]


def fit(logger, module, rounds, **settings):
    trainer = L.Trainer(
        logger=logger, max_epochs=rounds, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=-1, log_every_n_steps=1, **settings,
    )  # fmt: skip
    trainer.fit(module, datamodule=blobs())


def test_logger_works_in_a_plain_trainer_and_divergence_is_no_obstacle(offline, tmp_path):
    logger = RoundWandbLogger(mode="offline", project="plain", save_dir=str(tmp_path))
    module = FederatedModule(small_cnn().double(), SGD, local_steps=2, on_divergence="record")
    fit(logger, module, 2)
    logger.log_metrics({"round": 3, "train/loss": math.nan, "val/loss": math.inf})
    logger.log_metrics({"test/loss": 1.0})
    logger.close()
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    logged = read_run(folder)
    assert [row["round"] for row in logged.history] == [0, 1, 2, 3]
    assert math.isnan(logged.history[-1]["train/loss"])
    assert logged.config["method"] == "FedAvg"


class Losses(FederatedCallback):
    """Keeps the clients' losses of each round, as they are before the aggregation."""

    def __init__(self):
        self.seen = []

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.seen.append((list(cohort.client_ids), cohort.losses.tolist(), float(cohort.mean(cohort.losses))))


def test_losses_of_the_cohort_average_to_the_training_loss_and_clients_are_counted():
    seen = Losses()
    module = FederatedModule(small_cnn().double(), SGD, local_epochs=1, participation=2)
    fit(False, module, 3, callbacks=[seen])
    assert module.metrics["train/loss"] == pytest.approx(seen.seen[-1][2], rel=1e-6)
    logged = {row[0]: row for row in clients_table(module)[1]}
    for client, row in logged.items():
        rounds = [losses[ids.index(client)] for ids, losses, _ in seen.seen if client in ids]
        assert row[3] == len(rounds)
        assert row[2] == 5 * len(rounds)
        assert row[4] == (rounds[-1] if rounds else None)


def test_second_fit_with_one_logger_is_refused_and_a_validation_starts_no_run(offline, tmp_path):
    logger = RoundWandbLogger(mode="offline", save_dir=str(tmp_path))
    module = FederatedModule(small_cnn().double(), SGD, local_steps=1)
    trainer = L.Trainer(
        logger=logger, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False
    )
    trainer.validate(module, datamodule=blobs(), verbose=False)
    logger.close()
    assert not list(tmp_path.glob("wandb/*"))
    fit(logger, module, 1)
    with pytest.raises(ConfigurationError, match="make a new one"):
        fit(logger, FederatedModule(small_cnn().double(), SGD, local_steps=1), 1)
    logger.close()


def error_line(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        run(*args)
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("wandb: ")]
    assert not list(Path("runs").glob("*/*"))
    (line,) = lines
    return line


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_MODE", "banana"), ("WANDB_PROJECT", "a/b"), ("WANDB_INIT_TIMEOUT", "abc")]
)
def test_variable_that_wandb_would_refuse_is_an_error_of_one_line(offline, monkeypatch, capsys, name, value):
    import wandb

    wandb.teardown()
    monkeypatch.setenv(name, value)
    line = error_line(capsys)
    assert "an environment variable WANDB_... or W&B's settings file has a value that W&B refuses: " in line
    assert f"{value!r}" in line
    assert name.removeprefix("WANDB_").lower() in line


@pytest.mark.parametrize("key", [None, "short"])
def test_own_wandb_logger_without_a_key_is_an_error_of_one_line(offline, monkeypatch, capsys, key):
    import wandb

    wandb.teardown()
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    line = error_line(capsys, "--trainer.logger", "WandbLogger")
    assert line.startswith("error: W&B: ")
    assert "wandb login" in line


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("WANDB_MODE", "online", "there is no API key"), ("WANDB_API_KEY", "short", "40+ characters")],
)
def test_online_without_a_usable_key_is_offline_with_one_line(
    offline, monkeypatch, capsys, name, value, reason
):
    import wandb

    wandb.teardown()
    monkeypatch.setenv(name, value)
    attempt = run("--trainer.max_epochs", 1).attempt
    wandb.teardown()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("W&B does not work online, the run goes on offline: ")
    assert reason in line
    assert len(offline_runs(attempt)) == 1


def test_names_of_the_environment_come_first_and_a_sweep_that_changes_the_id_is_told(
    offline, monkeypatch, capsys
):
    import wandb

    named = {"NAME": "n", "RUN_GROUP": "g", "JOB_TYPE": "j", "TAGS": "t,u", "RUN_ID": "a1", "PROJECT": ""}
    for name, value in named.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
    attempt = run("--trainer.max_epochs", 1).attempt
    (folder,) = offline_runs(attempt)
    logged = read_run(folder).run
    assert (logged.display_name, logged.run_group, logged.job_type) == ("n", "g", "j")
    assert (logged.run_id, logged.project) == ("a1", "fl_lightning")
    assert {"t", "u", "FedAvg"} <= set(logged.tags)
    wandb.teardown()
    monkeypatch.setenv("WANDB_RUN_ID", "a2")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    capsys.readouterr()
    run("--trainer.max_epochs", 2, "--ckpt_path", "last")
    wandb.teardown()
    (line,) = capsys.readouterr().err.splitlines()
    assert "a1" in line
    assert "a2" in line
    (folder,) = offline_runs(attempt)
    assert read_run_id(folder) == "a2"
    assert [row["round"] for row in read_run(folder).history] == [0, 1, 2]


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize(("setting", "value"), [("project", "a/b"), ("tags", "['']")])
def test_setting_that_wandb_refuses_is_one_line_and_the_run_goes_on(
    offline, monkeypatch, capsys, mode, setting, value
):
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    attempt = run("--trainer.max_epochs", 1, "--wandb.mode", mode, f"--wandb.{setting}", value).attempt
    wandb.teardown()
    assert json.loads(attempt.result.read_text())["rounds"] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("W&B does not work, the run goes on without it: ")
    assert {"project": "'a/b'", "tags": "run_tags: "}[setting] in line


def test_mode_that_there_is_not_is_an_error_of_one_line(capsys):
    line = error_line(capsys, "--wandb.mode", "on")
    assert "wandb.mode" in line
    assert "offline" in line
