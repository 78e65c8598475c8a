import contextlib
import csv
import json
import multiprocessing
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.faults import same
from fl_lightning.cli.command_line import main
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.round.module import FederatedModule
from tests.support.command_line import attempts, message_of, rows, run, write_config

# children start from a process that has imported everything, so that many kills are affordable
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["fl_lightning.cli.command_line"])


def train(folder, arguments):
    os.chdir(folder)
    torch.set_num_threads(1)
    with Path("log.txt").open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        main(["fit", "--config", "tiny.yaml", *arguments])


def start(*arguments):
    process = PROCESSES.Process(target=train, args=(str(Path.cwd()), list(arguments)))
    process.start()
    return process


def kill(process):
    process.kill()
    process.join()


def rows_written():
    return sum(path.read_bytes().count(b"\n") for path in Path("runs").glob("*/*/metrics.jsonl"))


def start_or_resume(arguments):
    if any(Path("runs").glob("*/*/checkpoints/last.ckpt")):
        return start(*arguments, "--ckpt_path", "last")
    shutil.rmtree("runs", ignore_errors=True)
    return start(*arguments)


def kill_and_resume(arguments, moments, kills, rounds):
    """Kill the run some milliseconds into random rounds, resume it each time, and let it end at last."""
    for target in sorted(moments.sample(range(5, rounds - 10), kills)):
        process = start_or_resume(arguments)
        while process.is_alive() and rows_written() < target:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.04))
        assert process.is_alive(), Path("log.txt").read_text()
        kill(process)
    process = start_or_resume(arguments)
    process.join()
    assert process.exitcode == 0, Path("log.txt").read_text()


def contents(attempt):
    return {path: path.read_bytes() for path in attempt.path.rglob("*") if path.is_file()}


def refused(capsys, *arguments, command="fit", status=2):
    """The one line of a command that is refused."""
    capsys.readouterr()
    return message_of(capsys, lambda: run(*arguments, command=command), status)


def final_state(attempt):
    checkpoint = AtomicCheckpointIO().load_checkpoint(attempt.checkpoints / "last.ckpt")
    record = checkpoint["fl_lightning"]["record"]
    record["seconds"] = None
    record["metrics"] = {
        name: value for name, value in record["metrics"].items() if not name.startswith("time/")
    }
    kept = ("state_dict", "callbacks", "optimizer_states", "fl_lightning", "global_step", "epoch")
    return {key: checkpoint[key] for key in kept}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "periods"),
    [
        ("local", ("--checkpoint.every_n_rounds", "1")),
        ("global", ("--checkpoint.every_n_rounds", "7", "--checkpoint.every_n_seconds", "null")),
    ],
)
def test_run_killed_at_random_moments_ends_bit_identically(scope, periods, tmp_path, monkeypatch):
    settings = {
        "trainer.max_epochs": 60,
        "trainer.check_val_every_n_epoch": 10,
        "trainer.callbacks": [
            {"class_path": "FixBN"},
            {"class_path": "MaintainedMomentum", "init_args": {"scope": scope}},
        ],
        "model.client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.005, "momentum": 0.9}},
        "model.server_optimizer": {"class_path": "SGD", "init_args": {"lr": 1.0, "momentum": 0.5}},
        "model.participation": 2,
        "data.init_args.num_clients": 5,
    }
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_config(settings, tmp_path / name / "tiny.yaml")
    monkeypatch.chdir(tmp_path / "whole")
    whole = Attempt(run(*periods).attempt.path.resolve())
    monkeypatch.chdir(tmp_path / "killed")
    kill_and_resume(periods, random.Random(f"{scope} {periods}"), kills=4, rounds=60)
    (folder,) = Path("runs/tiny").iterdir()
    killed = Attempt(folder)
    assert [row["round"] for row in rows(killed)] == list(range(61))
    assert rows(killed) == rows(whole)
    assert same(final_state(killed), final_state(whole))
    assert json.loads(killed.result.read_text())["samples"] == json.loads(whole.result.read_text())["samples"]


@pytest.mark.slow
def test_half_written_last_row_and_rows_after_the_checkpoint_are_dropped():
    whole = run("--name", "whole", "--trainer.max_epochs", 6).attempt
    broken = run("--trainer.max_epochs", 4).attempt
    with broken.metrics.open("a") as file:
        file.write('{"round": 5, "train/loss": 0.0}\n{"round": 6, "train/l')
    resumed = run("--trainer.max_epochs", 6, "--ckpt_path", "last").attempt
    assert resumed.path.samefile(broken.path)
    assert rows(resumed) == rows(whole)


def test_longer_run_keeps_its_plan_and_says_so(capsys):
    write_config({"trainer.callbacks": [{"class_path": "FixBN", "init_args": {"freeze_round": 0.5}}]})
    first = run("--trainer.max_epochs", 4).attempt
    before, policy = first.metrics.read_bytes(), (first.path / "policy.json").read_bytes()
    capsys.readouterr()
    cli = run("--trainer.max_epochs", 8, "--ckpt_path", "last")
    assert cli.attempt.path.samefile(first.path)
    assert "planned for 4 rounds" in capsys.readouterr().out
    assert (cli.trainer.global_step, cli.model.planned_rounds) == (8, 4)
    assert first.metrics.read_bytes().startswith(before)
    assert [row.get("fixbn/freeze_round") for row in rows(first)[1:]] == [None] * 2 + [2.0] * 6
    assert (first.path / "policy.json").read_bytes() == policy
    result = json.loads(first.result.read_text())
    assert (result["rounds"], result["planned_rounds"]) == (8, 4)


def test_resuming_a_finished_run_changes_neither_rows_nor_result(capsys):
    attempt = run().attempt
    assert "continues from" not in capsys.readouterr().out
    metrics, result = attempt.metrics.read_bytes(), json.loads(attempt.result.read_text())
    assert run("--ckpt_path", "last").attempt.path.samefile(attempt.path)
    assert f"{attempt.path} continues from round 4\n" in capsys.readouterr().out
    assert attempt.metrics.read_bytes() == metrics
    again = json.loads(attempt.result.read_text())
    assert again | {"process_seconds": 0} == result | {"process_seconds": 0}


@pytest.mark.slow
def test_checkpoint_by_its_path_goes_on_in_its_own_folder_under_the_same_settings():
    attempt = run("--trainer.max_epochs", 2).attempt
    again = run("--ckpt_path", attempt.checkpoints / "last.ckpt", "--trainer.max_epochs", 3).attempt
    assert again.path.samefile(attempt.path)
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("--seed_everything", 3, "--accept_data"),
        ("--model.client_optimizer.init_args.lr", 0.01),
        ("--model.server_optimizer", "SGD", "--model.server_optimizer.init_args.lr", 0.5),
    ],
)
def test_resume_under_other_settings_is_a_new_attempt_of_its_own_configuration(change, capsys):
    monitor = ("--checkpoint.monitor", "val/accuracy")
    source = run("--trainer.max_epochs", 2, *monitor).attempt
    before = contents(source)
    capsys.readouterr()
    cli = run("--ckpt_path", source.checkpoints / "last.ckpt", "--trainer.max_epochs", 4, *monitor, *change)
    new = cli.attempt
    assert contents(source) == before
    line = f"new attempt {new.path} continues from round 2 of {source.checkpoints / 'last.ckpt'}"
    assert line in capsys.readouterr().out
    assert new.path.name == cli.training.directory.stem != source.path.name
    assert [row["round"] for row in rows(new)] == [0, 1, 2, 3, 4]
    assert rows(new)[:3] == rows(source)
    assert yaml.safe_load(new.config.read_text())["seed_everything"] == cli.model.seed
    assert Path(cli.trainer.checkpoint_callback.best_model_path).samefile(new.checkpoints / "best.ckpt")
    if "--model.server_optimizer" in change:
        assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    assert run("--ckpt_path", "last", "--trainer.max_epochs", 5, *monitor, *change).attempt.path.samefile(
        new.path
    )
    assert [row["round"] for row in rows(new)] == [0, 1, 2, 3, 4, 5]


def test_resume_from_an_older_checkpoint_is_a_new_attempt_whose_rows_have_no_hole():
    write_config({"trainer.check_val_every_n_epoch": 1})
    monitor = ("--checkpoint.monitor", "val/loss", "--checkpoint.mode", "max")  # best is an early round
    source = run("--trainer.max_epochs", 5, *monitor).attempt
    best = AtomicCheckpointIO().load_checkpoint(source.checkpoints / "best.ckpt")["global_step"]
    assert best < 5
    before = contents(source)
    process = start("--ckpt_path", "best", "--trainer.max_epochs", "1000000", *monitor)
    written = rows_written()
    while process.is_alive() and rows_written() < written + best + 3:
        time.sleep(0.01)
    assert process.is_alive(), Path("log.txt").read_text()
    kill(process)
    assert contents(source) == before
    new = run("--ckpt_path", "last", "--trainer.max_epochs", 7, *monitor).attempt
    assert new.path.name == f"{source.path.name}.2"
    assert [row["round"] for row in rows(new)] == list(range(8))
    assert rows(new)[:6] == rows(source)
    assert contents(source) == before


def test_older_checkpoint_goes_on_in_a_new_attempt_even_when_the_run_already_ends_there():
    source = run("--trainer.max_epochs", 2).attempt
    old = source.checkpoints / "old.ckpt"
    shutil.copy(source.checkpoints / "last.ckpt", old)
    run("--ckpt_path", "last")
    new = run("--ckpt_path", old).attempt
    assert new.path.name == f"{source.path.name}.2"
    assert rows(new) == rows(source)


def test_failed_resume_in_a_new_attempt_leaves_only_the_old_one(capsys):
    source = run("--trainer.max_epochs", 2).attempt
    path = source.checkpoints / "last.ckpt"
    with pytest.raises(SystemExit):
        run("--ckpt_path", path, "--trainer.max_epochs", 3, "--model.client_optimizer.init_args.lr", "1e30")
    assert "not finite" in capsys.readouterr().err
    assert attempts() == [source.path.name]


def test_checkpoint_outside_a_run_starts_an_attempt_that_says_where_its_rows_begin(capsys):
    source = run("--trainer.max_epochs", 2).attempt
    shutil.copy(source.checkpoints / "last.ckpt", "copy.ckpt")
    new = run("--ckpt_path", "copy.ckpt", "--trainer.max_epochs", 3).attempt
    line = "from round 2 of copy.ckpt, which stays unchanged; the new metrics.jsonl begins after this round"
    assert line in capsys.readouterr().out
    run("--ckpt_path", "last", "--trainer.max_epochs", 4)
    assert [row["round"] for row in rows(new)] == [3, 4]


@pytest.mark.parametrize("change", [(), ("--seed_everything", 3)])
def test_resume_of_a_run_whose_rows_are_gone_is_refused(change, capsys):
    source = run("--trainer.max_epochs", 2).attempt
    path = source.checkpoints / "last.ckpt"
    lines = source.metrics.read_text().splitlines(keepends=True)
    source.metrics.write_text("".join(lines[:2]))
    for words in ("has no row of round 2, but the checkpoint is of round 2", "does not exist"):
        before = contents(source)
        assert words in refused(capsys, "--ckpt_path", path, "--trainer.max_epochs", 3, *change)
        assert contents(source) == before
        assert attempts() == [source.path.name]
        source.metrics.unlink(missing_ok=True)


@pytest.mark.slow
def test_second_resume_of_an_attempt_at_the_same_time_is_refused(capsys):
    source = run("--trainer.max_epochs", 2).attempt
    resume = ("--ckpt_path", "last", "--trainer.max_epochs")
    process = start(*resume, "1000000", "--checkpoint.every_n_seconds", "null")
    while process.is_alive() and rows_written() < 6:
        time.sleep(0.01)
    try:
        message = refused(capsys, *resume, 9)
        assert process.is_alive(), Path("log.txt").read_text()
    finally:
        kill(process)
    assert f"another process is training in {source.path}" in message
    run(*resume, 4)
    assert [row["round"] for row in rows(source)] == [0, 1, 2, 3, 4]


def test_last_says_where_a_run_of_other_settings_lies_and_that_file_goes_on(capsys):
    source = run("--trainer.max_epochs", 2).attempt
    older = source.path.rename(
        source.path.with_name("01234567-s0")
    )  # as if its configuration had another hash
    path = older / "checkpoints" / "last.ckpt"
    assert f"give {path}, of another seed or other settings" in refused(
        capsys, "--ckpt_path", "last", "--trainer.max_epochs", 3
    )
    new = run("--ckpt_path", path, "--trainer.max_epochs", 3).attempt
    assert new.path == source.path
    assert [row["round"] for row in rows(new)] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "test"])
def test_file_that_is_no_checkpoint_of_a_run_is_one_line(command, capsys):
    source = run("--trainer.max_epochs", 1).attempt
    whole = source.checkpoints / "last.ckpt"
    weights = AtomicCheckpointIO().load_checkpoint(whole)["state_dict"]
    Path("half.ckpt").write_bytes(whole.read_bytes()[:5000])
    Path("text.ckpt").write_text("model")
    torch.save(weights, "bare.ckpt")
    torch.save({"state_dict": weights}, "weights.ckpt")
    for name, words in {
        "half": "half.ckpt is truncated, damaged or holds more than tensors and plain values (5,000 bytes",
        "text": "text.ckpt is truncated, damaged or holds more than tensors and plain values (5 bytes",
        "bare": "bare.ckpt is not of a federated run: it has no state_dict, global_step, pytorch-lightning_version",
        "weights": "weights.ckpt is not of a federated run: it has no global_step, pytorch-lightning_version",
    }.items():
        assert words in refused(capsys, "--ckpt_path", f"{name}.ckpt", command=command)
    write_config({"trainer.callbacks": []})
    options = ("--ckpt_path", whole, "--model.model.init_args.norm")
    assert "does not fit model.model LeNet" in refused(capsys, *options, "gn", command=command)
    assert attempts() == [source.path.name]


def test_resume_with_another_server_optimizer_is_refused(capsys):
    source = run("--trainer.max_epochs", 1).attempt
    adam = ("--model.server_optimizer", "Adam")
    message = refused(capsys, "--ckpt_path", source.checkpoints / "last.ckpt", *adam)
    assert "was not written with model.server_optimizer Adam; resume with the server optimizer" in message
    assert attempts() == [source.path.name]


@pytest.mark.parametrize("split", ["val", "test"])
def test_result_without_an_evaluation_is_written(split):
    attempt = run(f"--trainer.limit_{split}_batches", 0).attempt
    names = {name.partition("/")[0] for name in json.loads(attempt.result.read_text()) if "/" in name}
    assert names == {"val", "test"} - {split}


def test_failure_in_the_first_round_leaves_no_parent_folder(capsys):
    assert "not finite" in refused(capsys, "--model.client_optimizer.init_args.lr", "1e30", status=3)
    assert not Path("runs").exists()


def refuse_round(self):
    raise RuntimeError("stop here")


def test_failure_while_resuming_never_removes_the_run(monkeypatch):
    attempt = run("--trainer.max_epochs", 2).attempt
    monkeypatch.setattr(FederatedModule, "start_round", refuse_round)
    with pytest.raises(SystemExit) as stop:
        run("--ckpt_path", "last", "--trainer.max_epochs", 3)
    assert stop.value.code == 1
    assert (attempt.checkpoints / "last.ckpt").exists()
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2]


def test_model_checkpoint_of_lightning_keeps_the_best_rounds():
    write_config(
        {
            "trainer.check_val_every_n_epoch": 1,
            "trainer.callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"monitor": "val/loss", "save_top_k": 2, "filename": "{step}"},
                }
            ],
        }
    )
    attempt = run().attempt
    losses = {row["round"]: row["val/loss"] for row in rows(attempt)[1:]}
    best = sorted(losses, key=losses.get)[:2]
    kept = {path.name for path in attempt.checkpoints.iterdir()}
    assert kept == {"last.ckpt", *(f"step={r}.ckpt" for r in best)}
    for r in best:
        assert (
            AtomicCheckpointIO().load_checkpoint(attempt.checkpoints / f"step={r}.ckpt")["global_step"] == r
        )


def test_checkpoints_of_lightning_stay_in_the_run_beside_a_logger_with_a_folder_of_its_own():
    keeper = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "elsewhere"}}
    write_config({"trainer.callbacks": [keeper], "trainer.logger": [logger]})
    attempt = run().attempt
    assert {path.name for path in attempt.checkpoints.iterdir()} == {"last.ckpt", "epoch=3-step=4.ckpt"}
    assert list(Path("elsewhere").rglob("*.ckpt")) == []


@pytest.mark.parametrize("version", [0, "fixed", None])
@pytest.mark.parametrize("changed", [False, True], ids=["resumed", "a new attempt"])
def test_a_csv_logger_has_a_row_of_each_round_also_before_a_resume(version, changed):
    settings = {"save_dir": "csv", "version": version}
    write_config(
        {"trainer.logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": settings}}
    )
    last = run("--trainer.max_epochs", 2).attempt.checkpoints / "last.ckpt"
    options = ["--model.client_optimizer.lr", 0.01] if changed else []
    attempt = run("--ckpt_path", last, "--trainer.max_epochs", 4, *options).attempt
    newest = max(Path("csv").rglob("metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    table = [*csv.DictReader(newest.read_text().splitlines())]
    assert [float(row["round"]) for row in table] == [0, 1, 2, 3, 4] == [float(row["step"]) for row in table]
    losses = [row.get("train/loss") for row in rows(attempt)]
    assert [float(row["train/loss"]) if row["train/loss"] else None for row in table] == losses


def test_early_stopping_of_lightning_stops_at_the_round_of_an_evaluation(capsys):
    stopping = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "val/loss", "stopping_threshold": 100.0},
    }
    write_config({"trainer.callbacks": [stopping]})
    attempt = run("--trainer.max_epochs", 9).attempt
    result = json.loads(attempt.result.read_text())
    assert result["rounds"] == 2
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2]
    why = "EarlyStopping: Stopping threshold reached: val/loss = "
    assert result["stopped"].startswith(why)
    assert result["stopped"].endswith(" < 100.0.")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stopped ")]
    assert told == [f"stopped after round 2 of 9 by {result['stopped']}"]
    again = run("--trainer.max_epochs", 2, config=write_config(path="plain.yaml")).attempt
    assert json.loads(again.result.read_text())["stopped"] is None


def test_run_that_its_time_or_a_callback_of_the_users_stops_says_so(capsys):
    attempt = run("--trainer.max_time", "00:00:00:00", "--trainer.min_epochs", 1).attempt
    stopped = json.loads(attempt.result.read_text())["stopped"]
    assert re.fullmatch(r"Timer: \d+ s have passed", stopped)  # the time of one round on this machine


@pytest.mark.slow
def test_a_new_attempt_without_a_round_to_train_is_refused_and_leaves_no_folder(capsys):
    source = run("--trainer.max_epochs", 2).attempt
    shutil.copy(source.checkpoints / "last.ckpt", "copy.ckpt")
    other = ("--model.client_optimizer.init_args.lr", 0.01)
    for path, *change in (("copy.ckpt",), (source.checkpoints / "last.ckpt", *other)):
        words = refused(capsys, "--ckpt_path", path, "--trainer.max_epochs", 2, *change)
        assert (
            f"trainer.max_epochs: 2, but {path} is of round 2: nothing is left to train; use more rounds"
            in words
        )
        assert attempts() == [source.path.name]
    again = run("--ckpt_path", "last", "--trainer.max_epochs", 2).attempt  # its own end: evaluated once more
    assert again.path.samefile(source.path)


def test_a_budget_that_is_used_up_leaves_no_new_attempt(capsys):
    budget = ("--trainer.max_epochs", -1, "--model.budget_epochs", 1)
    source = run(*budget).attempt
    path = source.checkpoints / "last.ckpt"
    words = refused(capsys, *budget, "--ckpt_path", path, "--model.client_optimizer.init_args.lr", 0.01)
    assert "nothing is left to train; use more rounds or a larger model.budget_epochs" in words
    assert attempts() == [source.path.name]


def test_a_damaged_configuration_beside_a_checkpoint_does_not_stop_a_resumed_run():
    attempt = run("--trainer.max_epochs", 1).attempt
    attempt.config.write_bytes(b"\xff\x00")
    assert run("--ckpt_path", "last", "--trainer.max_epochs", 2).attempt.path == attempt.path
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2]
    assert attempt.read_config()["trainer"]["max_epochs"] == 2
