"""Whether and where a run is logged, and that W&B is never in its way: one line, and the run goes on."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

from tests.support.command_line import run, write_config
from tests.support.wandb_files import offline_runs, read_run, run_id

KEY = "0123456789abcdef" * 3


@pytest.mark.slow
def test_without_a_key_the_run_is_offline_and_its_process_connects_nowhere_and_prints_no_warning(
    session,
):
    # a process of its own: W&B's telemetry is sent at the end of the process
    write_config()
    command = [sys.executable, "-W", "error", "-m", "fl_lightning", "fit", "--config", "tiny.yaml"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        own = {"WANDB_BASE_URL": url, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        own |= {"HOME": str(Path("home").resolve()), "MPLCONFIGDIR": mpl.get_cachedir()}
        unset = (
            "JSONARGPARSE_DEPRECATION_WARNINGS", "PYTHONWARNINGS", "WANDB_CACHE_DIR", "XDG_CACHE_HOME",
            "WANDB_CONFIG_DIR", "WANDB_ERROR_REPORTING",
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


def test_disabled_run_does_not_import_wandb_and_has_no_folder(session, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would fail
    attempt = run("--trainer.max_epochs", 1).attempt
    assert not (attempt.path / "wandb").exists()
    assert not attempt.wandb_id.exists()


def test_mode_of_the_configuration_decides_over_the_environment(offline, monkeypatch):
    attempt = run("--trainer.max_epochs", 1, "--wandb.mode", "disabled").attempt
    assert not (attempt.path / "wandb").exists()


def test_no_logger_leaves_wandb_on_and_says_so(offline, capsys):
    told = "trainer.logger: false leaves W&B on; wandb.mode: disabled turns W&B off"
    attempt = run("--trainer.max_epochs", 1, "--trainer.logger", "false").attempt
    assert (attempt.path / "wandb").exists()
    assert capsys.readouterr().out.count(told) == 1
    run("--trainer.max_epochs", 1, "--trainer.logger", "false", "--wandb.mode", "disabled")
    run("--trainer.max_epochs", 1)
    assert told not in capsys.readouterr().out


@pytest.mark.slow
def test_unreachable_server_turns_the_run_offline_with_one_line(offline, monkeypatch, capsys):
    import wandb

    wandb.teardown()
    monkeypatch.setattr("fl_lightning.experiments.weights_and_biases.settings._INIT_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    attempt = run("--trainer.max_epochs", 1).attempt
    wandb.teardown()
    shown = capsys.readouterr()
    (told,) = [line for line in shown.err.splitlines() if line.startswith("W&B")]
    assert told.startswith("W&B does not work online, the run continues offline: ")
    (folder,) = offline_runs(attempt)
    assert [row["round"] for row in read_run(folder).history] == [0, 1]


def error_line(capsys, *args, status=1):
    with pytest.raises(SystemExit) as stop:
        run(*args)
    assert stop.value.code == status
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("wandb: ")]
    assert not list(Path("runs").glob("*/*"))
    (line,) = lines
    return line


@pytest.mark.parametrize(("key", "said"), [(None, "wandb login"), ("short", "40+ characters")])
def test_own_wandb_logger_without_a_key_is_an_error_of_one_line(offline, monkeypatch, capsys, key, said):
    import wandb

    wandb.teardown()
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    line = error_line(capsys, "--trainer.logger", "WandbLogger")
    assert said in line


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
    assert line.startswith("W&B does not work online, the run continues offline: ")
    assert reason in line
    assert len(offline_runs(attempt)) == 1


def test_an_empty_mode_of_the_environment_counts_as_none(offline, monkeypatch, capsys):
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "")
    attempt = run("--trainer.max_epochs", 1).attempt
    wandb.teardown()
    assert capsys.readouterr().err == ""
    assert len(offline_runs(attempt)) == 1


@pytest.mark.slow
def test_names_of_the_environment_come_first_and_a_sweep_gives_a_resumed_run_its_id(offline, monkeypatch):
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
    run("--trainer.max_epochs", 2, "--ckpt_path", "last")
    wandb.teardown()
    (folder,) = offline_runs(attempt)
    assert run_id(folder) == "a2"
    assert [row["round"] for row in read_run(folder).history] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_MODE", "banana"), ("WANDB_PROJECT", "a/b"), ("WANDB_INIT_TIMEOUT", "abc")]
)
def test_variable_that_wandb_refuses_is_one_line_and_the_run_goes_on(
    offline, monkeypatch, capsys, name, value
):
    import wandb

    wandb.teardown()
    monkeypatch.setenv(name, value)
    attempt = run("--trainer.max_epochs", 1).attempt
    assert json.loads(attempt.result.read_text())["rounds"] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("W&B does not work, the run continues without it: ")
    assert name.removeprefix("WANDB_").lower() in line


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
    assert line.startswith("W&B does not work, the run continues without it: ")
    assert {"project": "'a/b'", "tags": "run_tags"}[setting] in line


def test_mode_that_there_is_not_is_an_error_of_one_line(capsys):
    line = error_line(capsys, "--wandb.mode", "on", status=2)
    assert "wandb.mode" in line
    assert "offline" in line
