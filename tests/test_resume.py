import contextlib
import json
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from command_line import attempts, rows, run, write_config

from fl_lightning.checkpointing import AtomicCheckpointIO
from fl_lightning.cli import main
from fl_lightning.run_directory import Attempt

# children start from a process that has imported everything, so that many kills are affordable
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["fl_lightning.cli", "datamodules", "callbacks"])


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


def same(first, second):
    """Whether two trees of tensors and plain values are equal bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def final_state(attempt):
    checkpoint = AtomicCheckpointIO().load_checkpoint(attempt.checkpoints / "last.ckpt")
    record = checkpoint["fl_lightning"]["record"]
    record["seconds"] = None
    record["row"] = {name: value for name, value in record["row"].items() if not name.startswith("time/")}
    kept = ("state_dict", "callbacks", "optimizer_states", "fl_lightning", "global_step", "epoch")
    return {key: checkpoint[key] for key in kept}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "periods"),
    [
        ("local", ("--checkpoint.every_n_rounds", "1")),
        ("global", ("--checkpoint.every_n_rounds", "1")),
        ("local", ("--checkpoint.every_n_rounds", "7", "--checkpoint.every_n_seconds", "null")),
    ],
)
def test_run_killed_at_random_moments_ends_bit_identically(scope, periods, tmp_path, monkeypatch):
    settings = {
        "trainer.max_epochs": 90,
        "trainer.check_val_every_n_epoch": 10,
        "trainer.callbacks": [
            {"class_path": "FixBN"},
            {"class_path": "MaintainedMomentum", "init_args": {"scope": scope}},
        ],
        "model.client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.02, "momentum": 0.9}},
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
    kill_and_resume(periods, random.Random(f"{scope} {periods}"), kills=5, rounds=90)
    (folder,) = Path("runs/tiny").iterdir()
    killed = Attempt(folder)
    assert [row["round"] for row in rows(killed)] == list(range(91))
    assert rows(killed) == rows(whole)
    assert same(final_state(killed), final_state(whole))
    assert json.loads(killed.result.read_text())["samples"] == json.loads(whole.result.read_text())["samples"]


def test_run_killed_before_its_first_checkpoint_is_an_error_that_names_the_folder(capsys):
    write_config({"trainer.max_epochs": 100_000})
    process = start("--checkpoint.every_n_seconds", "null")
    deadline = time.monotonic() + 60
    while not any(Path("runs").glob("*/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill(process)
    (folder,) = Path("runs/tiny").iterdir()
    with pytest.raises(SystemExit) as stop:
        run("--ckpt_path", "last")
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert f"'last' found no last.ckpt in {folder}/checkpoints" in message
    assert attempts() == [folder.name]


def test_half_written_last_row_and_rows_after_the_checkpoint_are_dropped():
    whole = run("--name", "whole", "--trainer.max_epochs", 6).attempt
    broken = run("--trainer.max_epochs", 4).attempt
    with broken.metrics.open("a") as file:
        file.write('{"round": 5, "train/loss": 0.0}\n{"round": 6, "train/l')
    resumed = run("--trainer.max_epochs", 6, "--ckpt_path", "last").attempt
    assert resumed.path.samefile(broken.path)
    assert rows(resumed) == rows(whole)


def test_longer_run_keeps_its_plan_and_says_so(capsys):
    write_config({"trainer.callbacks": [{"class_path": "FixBN", "init_args": {"freeze_fraction": 0.5}}]})
    first = run("--trainer.max_epochs", 4).attempt
    before, policy = first.metrics.read_bytes(), (first.path / "policy.json").read_bytes()
    capsys.readouterr()
    cli = run("--trainer.max_epochs", 8, "--ckpt_path", "last")
    assert cli.attempt.path.samefile(first.path)
    assert "planned for 4 rounds" in capsys.readouterr().out
    assert (cli.trainer.global_step, cli.model.planned_rounds) == (8, 4)
    assert first.metrics.read_bytes().startswith(before)
    assert {row["fixbn/freeze_round"] for row in rows(first)[1:]} == {2.0}
    assert (first.path / "policy.json").read_bytes() == policy
    result = json.loads(first.result.read_text())
    assert (result["rounds"], result["planned_rounds"]) == (8, 4)


def test_resuming_a_finished_run_changes_neither_rows_nor_result():
    attempt = run().attempt
    metrics, result = attempt.metrics.read_bytes(), json.loads(attempt.result.read_text())
    assert run("--ckpt_path", "last").attempt.path.samefile(attempt.path)
    assert attempt.metrics.read_bytes() == metrics
    assert json.loads(attempt.result.read_text()) == result


def test_checkpoint_by_its_path_resumes_its_own_run_under_other_settings():
    attempt = run("--trainer.max_epochs", 2).attempt
    path = attempt.checkpoints / "last.ckpt"
    again = run("--ckpt_path", path, "--trainer.max_epochs", 3, "--model.weighting", "uniform").attempt
    assert again.path.samefile(attempt.path)
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2, 3]


def test_failure_while_resuming_never_removes_the_run(capsys):
    attempt = run("--trainer.max_epochs", 2).attempt
    attempt.metrics.unlink()
    path = attempt.checkpoints / "last.ckpt"
    with pytest.raises(SystemExit):
        run("--ckpt_path", path, "--trainer.max_epochs", 3, "--model.client_optimizer.init_args.lr", "1e30")
    assert "not finite" in capsys.readouterr().err
    assert path.exists()


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


def test_early_stopping_of_lightning_stops_at_the_round_of_an_evaluation():
    stopping = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "val/loss", "stopping_threshold": 100.0},
    }
    write_config({"trainer.callbacks": [stopping]})
    attempt = run("--trainer.max_epochs", 9).attempt
    assert json.loads(attempt.result.read_text())["rounds"] == 2
    assert [row["round"] for row in rows(attempt)] == [0, 1, 2]
