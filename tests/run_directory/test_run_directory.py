import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.ckpt_path import find_checkpoint
from fl_lightning.experiments.run_directory.config_digest import directory_of
from fl_lightning.experiments.run_directory.describe import describe_environment
from fl_lightning.experiments.run_directory.directory import (
    LOCK,
    Attempt,
    RunDirectory,
)
from fl_lightning.experiments.run_directory.start import Start
from fl_lightning.files import atomic_write, write_json, write_text


def test_module_imports_neither_torch_nor_lightning():
    code = "import sys, fl_lightning.experiments.run_directory.directory; sys.exit(bool({'torch', 'lightning'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode
        == 0
    )


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "runs" / "quickstart", "0123abcd-s0")


def add_checkpoint(attempt, name="last.ckpt"):
    attempt.checkpoints.mkdir(exist_ok=True)
    path = attempt.checkpoints / name
    path.write_bytes(b"checkpoint")
    return path


def test_new_attempts_count_up_and_never_take_an_existing_folder(run):
    assert run.attempts() == []
    names = [run.new_attempt().path.name for _ in range(11)]
    assert names == ["0123abcd-s0", *(f"0123abcd-s0.{number}" for number in range(2, 12))]
    assert run.attempts()[0].path.name == "0123abcd-s0.11"


def test_new_attempt_is_newest_even_where_older_ones_were_removed(run):
    for _ in range(5):
        run.new_attempt()
    for number in (2, 3, 4):
        (run.root / f"0123abcd-s0.{number}").rmdir()
    assert run.new_attempt() == run.attempts()[0] == Attempt(run.root / "0123abcd-s0.6")


def test_attempts_of_other_seeds_and_stray_files_are_not_counted(run):
    RunDirectory(run.root, "0123abcd-s01").new_attempt()
    for name in ("0123abcd-s0.old", "0123abcd-s0.", "x0123abcd-s0"):
        (run.root / name).mkdir()
    (run.root / "0123abcd-s0.7").touch()
    assert run.attempts() == []
    assert run.new_attempt().path.name == "0123abcd-s0"


def test_attempts_that_start_together_get_folders_of_their_own(run):
    with ThreadPoolExecutor(8) as pool:
        attempts = list(pool.map(lambda _: run.new_attempt().path, range(40)))
    assert len(set(attempts)) == 40


def test_taken_folder_makes_the_attempt_try_the_next(run, monkeypatch):
    monkeypatch.setattr(RunDirectory, "attempts", lambda self: [])
    first, second = run.new_attempt(), run.new_attempt()
    assert (first.path.name, second.path.name) == ("0123abcd-s0", "0123abcd-s0.2")


def test_attempt_that_is_locked_says_so_and_is_free_again_after_it(run):
    attempt = run.new_attempt()
    with attempt.lock():
        with pytest.raises(ConfigurationError, match=r"another process is training in .*0123abcd-s0; wait"):
            attempt.lock().__enter__()
        with run.new_attempt().lock():
            pass
    with attempt.lock():
        assert [path.name for path in attempt.path.iterdir()] == [LOCK]


def test_lock_is_free_when_its_process_was_killed(run):
    attempt = run.new_attempt()
    code = (
        "import os, sys; from pathlib import Path; from fl_lightning.experiments.run_directory.directory import Attempt\n"
        "with Attempt(Path(sys.argv[1])).lock(): os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, attempt.path], check=False)
    assert killed.returncode == -9
    with attempt.lock():
        pass


def test_discarded_attempt_takes_along_the_empty_folders_of_runs_and_no_other_attempt(run, tmp_path):
    first, second = run.new_attempt(), run.new_attempt()
    add_checkpoint(second)
    Start(second).discard_untrained()
    assert list(run.root.iterdir()) == [first.path]
    Start(first).discard_untrained()
    assert list(tmp_path.iterdir()) == []


def test_discarded_attempt_leaves_what_is_not_empty(run):
    first, second = run.new_attempt(), run.new_attempt()
    Start(first).discard_untrained()
    assert list(run.root.iterdir()) == [second.path]


def test_run_root_may_lie_in_the_home_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    attempt = directory_of(
        {"seed_everything": 0, "model": {}, "data": {}, "trainer": {}, "run_root": "~/runs", "name": "x"}
    ).new_attempt()
    assert attempt.path.parent == tmp_path / "home" / "runs" / "x"
    assert not Path("~").exists()


def test_root_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigurationError, match=r"runs/x/abc-s0 cannot be written: Not a directory"):
        RunDirectory(tmp_path / "runs" / "x", "abc-s0").new_attempt()


@pytest.mark.parametrize("word", ["last", "best"])
def test_last_and_best_mean_the_newest_attempt_that_has_one(run, word):
    add_checkpoint(run.new_attempt(), f"{word}.ckpt")
    newest = add_checkpoint(run.new_attempt(), f"{word}.ckpt")
    run.new_attempt()
    assert find_checkpoint(run, word) == newest


def test_last_names_a_checkpoint_of_the_same_run_name_under_another_hash(run):
    with pytest.raises(
        ConfigurationError, match=r"'last' found no last\.ckpt in .*0123abcd-s0; give the path"
    ):
        find_checkpoint(run, "last")
    older = add_checkpoint(RunDirectory(run.root, "00000000-s0").new_attempt())
    other = add_checkpoint(RunDirectory(run.root, "89abcdef-s0").new_attempt())
    os.utime(older, (1, 1))
    with pytest.raises(ConfigurationError, match=rf"give {other}, of another seed or other settings"):
        find_checkpoint(run, "last")


def test_explicit_checkpoint_belongs_to_the_run_directory_around_it(run, monkeypatch):
    attempt = RunDirectory(run.root, "89abcdef-s0").new_attempt()
    path = add_checkpoint(attempt)
    assert run.attempt_of(path) is None
    attempt.config.write_text("{}\n")
    assert run.attempt_of(path) == attempt
    monkeypatch.chdir(attempt.checkpoints)
    assert run.attempt_of(Path("last.ckpt")) == attempt
    (attempt.path / "last.ckpt").touch()
    assert run.attempt_of(attempt.path / "last.ckpt") is None


def test_files_of_an_attempt_have_their_contract_names():
    attempt = Attempt(Path("a"))
    files = (attempt.config, attempt.metrics, attempt.result, attempt.partition, attempt.checkpoints)
    assert [file.name for file in files] == [
        "config.yaml",
        "metrics.jsonl",
        "result.json",
        "partition.json",
        "checkpoints",
    ]
    assert {file.parent for file in files} == {Path("a")}


def test_reader_sees_the_old_or_the_new_content_and_a_failed_write_leaves_no_trace(tmp_path):
    path = tmp_path / "new" / "result.json"
    write_json(path, {"accuracy": 0.1 + 0.2})
    assert json.loads(path.read_text()) == {"accuracy": 0.1 + 0.2}
    with atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        assert json.loads(path.read_text()) == {"accuracy": 0.1 + 0.2}
    assert path.read_bytes() == b"half"

    def fail():
        with atomic_write(path) as file:
            file.write(b"new")
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        fail()
    assert path.read_bytes() == b"half"
    assert list(path.parent.iterdir()) == [path]


def test_planted_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path):
    path, victim = tmp_path / "result.json", tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".result.json.tmp").symlink_to(victim)
    write_text(path, "new")
    assert (path.read_text(), path.is_symlink(), victim.read_text()) == ("new", False, "mine")


def test_content_is_on_disk_before_its_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    write_text(tmp_path / "config.yaml", "a: ü\n")
    assert calls == [str(tmp_path / ".config.yaml.tmp"), "replace", str(tmp_path)]
    assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == "a: ü\n"


def test_environment_record_names_versions_and_commit(tmp_path, monkeypatch):
    record = describe_environment()
    assert record["git_commit"] is None
    assert set(record) == {"python", "torch", "lightning", "fl_lightning", "platform", "git_commit"}
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *command], check=True)
    commit = describe_environment()["git_commit"]
    assert len(bytes.fromhex(commit)) == 20
    (tmp_path / "file").touch()
    subprocess.run(["git", "add", "file"], check=True)
    assert describe_environment()["git_commit"] == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert describe_environment()["git_commit"] is None


@pytest.mark.parametrize("link", ["runs/mine", "runs"])
def test_a_link_to_a_missing_folder_is_named(link, tmp_path):
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to("/nowhere/scratch")
    root = tmp_path / "runs" / "mine"
    with pytest.raises(ConfigurationError) as error:
        RunDirectory(root, "1234-s0").new_attempt()
    assert str(error.value) == (
        f"{root / '1234-s0'} cannot be written: {tmp_path / link} is a link to /nowhere/scratch, which does not exist; "
        "free space or choose another folder"
    )
