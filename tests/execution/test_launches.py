"""Runs whose ranks somebody else has started, and runs that go on with another number of ranks."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import attempts, rows, run, write_config

from benchmarks.faults import same
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.directory import Attempt

ROOT = Path(__file__).parents[2]
FAULT = """
import os, time
from fl_lightning import ConfigurationError, FederatedCallback

class Fault(FederatedCallback):
    def __init__(self, what: str, ranks: list[int]):
        self.what, self.ranks = what, ranks

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if pl_module.ranks.rank in self.ranks and cohort.round == 2:
            match self.what:
                case "mistake":
                    raise ConfigurationError("my own mistake")
                case "kill":
                    os.kill(os.getpid(), 9)

class Slow(FederatedCallback):
    def on_local_step_end(self, trainer, pl_module, cohort, step):
        time.sleep(0.1)
"""
SGD = {"class_path": "SGD", "init_args": {"lr": 0.05, "momentum": 0.9}}
METHODS = [
    {"trainer.callbacks": [{"class_path": "fl_lightning.callbacks.FedBN"}]},
    {"trainer.callbacks": [{"class_path": "SCAFFOLD"}]},
    {
        "trainer.callbacks": [{"class_path": "MaintainedMomentum", "init_args": {"scope": "local"}}],
        "model.client_optimizer": SGD,
    },
    {
        "trainer.callbacks": [
            {"class_path": "SlidingWindowFixBN", "init_args": {"window": 2, "threshold": 0.5}}
        ]
    },
]


def final_state(attempt):
    """What ``last.ckpt`` holds of a run: all but times, and what a new attempt says of its origin."""
    checkpoint = AtomicCheckpointIO().load_checkpoint(attempt.checkpoints / "last.ckpt")
    record = checkpoint["fl_lightning"]["record"]
    for name in ("seconds", "continued_from"):
        record.pop(name)
    record["metrics"] = {name: x for name, x in record["metrics"].items() if not name.startswith("time/")}
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["trainer.callbacks"][0]["class_path"])
def test_a_run_that_changes_its_number_of_ranks_ends_like_one_that_does_not(method, capsys):
    write_config({**method, "trainer.max_epochs": 5, "model.participation": 2})
    whole = run("--trainer.devices", 2, "--checkpoint.keep_rounds", "[1, 3]").attempt
    path = whole.checkpoints / "round_1.ckpt"
    for ranks, kept in ((3, "round_3.ckpt"), (1, "last.ckpt")):
        settings = ("--trainer.devices", ranks, "--checkpoint.keep_rounds", "[1, 3]")
        attempt = run("--ckpt_path", path, *settings).attempt
        path = attempt.checkpoints / kept
    assert attempts() == [whole.path.name, f"{whole.path.name}.2", f"{whole.path.name}.3"]
    assert rows(attempt) == rows(whole)
    assert same(final_state(attempt), final_state(whole))
    assert "computed differently" not in capsys.readouterr().out


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


class Launched:
    """Processes of one run, each in its own folder.

    Args:
        folders: A folder for each.
        commands: What is before ``-m fl_lightning``, for each.
        arguments: What is after it.
        environments: Variables for each.
    """

    def __init__(self, folders, commands, *arguments, environments=None):
        environments = environments or [{}] * len(folders)
        paths = f"{ROOT}{os.pathsep}{Path.cwd()}"
        config = ["-m", "fl_lightning", "fit", "--config", str(Path("tiny.yaml").resolve())]
        self.processes = []
        for folder, command, own in zip(folders, commands, environments, strict=True):
            Path(folder).mkdir(exist_ok=True)
            self.processes.append(
                subprocess.Popen(
                    [*command, *config, *map(str, arguments)],
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": paths, **own},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )

    def ended(self, seconds=120):
        """Exit status, output and errors of each."""
        try:
            said = [process.communicate(timeout=seconds) for process in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return [(process.returncode, *texts) for process, texts in zip(self.processes, said, strict=True)]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO_RANKS = [*TORCHRUN, "--nproc-per-node", "2"]


def own_lines(errors):
    """What this project has said there; the rest is torchrun's."""
    starts = ("error:", "stopp", "Warning", "UserWarning", "fl_lightning:")
    return [line for line in errors.splitlines() if line.startswith(starts)]


def only_attempt(folder):
    (path,) = Path(folder).glob("runs/*/*")
    return Attempt(path)


def assert_like(folder, reference):
    attempt = only_attempt(folder)
    assert rows(attempt) == rows(reference)
    assert same(final_state(attempt), final_state(reference))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ranks_of_torchrun_are_one_run_with_the_numbers_of_one_process():
    write_config()
    reference = run("--trainer.devices", 1).attempt
    ((status, said, errors),) = Launched(["launched"], [TWO_RANKS]).ended()
    assert (status, own_lines(errors)) == (0, [])
    for line in ("loading PyTorch", "State of the model", "2 ranks, 1 thread each", "Result", "round 4/4"):
        assert said.count(line) == 1
    assert_like("launched", reference)


def nodes(port):
    there = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    return [[*TORCHRUN, *map(str, there), "--node-rank", str(rank)] for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_machines_without_a_shared_file_system_go_on_with_a_run_of_the_first():
    write_config()
    longer = ("--ckpt_path", "last", "--trainer.max_epochs", 6)
    run("--trainer.devices", 1, "--run_root", "first/runs")
    run("--trainer.devices", 1)
    reference = run("--trainer.devices", 1, *longer).attempt
    (first, second) = Launched(["first", "second"], nodes(free_port()), *longer).ended()
    assert (first[0], own_lines(first[2])) == (0, [])
    assert second[:2] == (0, "")
    assert_like("first", reference)
    assert list(Path("second").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_machines_that_copy_their_own_ranks_give_the_numbers_of_one_process():
    write_config()
    reference = run("--trainer.devices", 1).attempt
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = ("--trainer.num_nodes", 2, "--trainer.devices", 2)
    both = Launched(
        ["first", "second"],
        [[sys.executable]] * 2,
        *settings,
        environments=[{**place, "NODE_RANK": str(rank)} for rank in range(2)],
    ).ended()
    assert [(status, errors) for status, _, errors in both] == [(0, "")] * 2
    assert "4 ranks, 1 thread each" in both[0][1]
    assert both[1][1] == ""
    assert_like("first", reference)
    assert list(Path("second").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("tasks_per_node", [1, 2])
def test_tasks_of_slurm_are_one_run_with_the_numbers_of_one_process(tasks_per_node):
    write_config()
    reference = run("--trainer.devices", 1).attempt
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "job.sh",
        "SLURM_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
    }
    job |= {"SLURM_NTASKS_PER_NODE": str(tasks_per_node), "MASTER_PORT": str(free_port())}
    tasks = []
    for task in range(2):
        node, local = divmod(task, tasks_per_node)
        names = {"SLURM_PROCID": task, "SLURM_NODEID": node, "SLURM_LOCALID": local}
        tasks.append({**job, **{name: str(number) for name, number in names.items()}})
    settings = ("--trainer.num_nodes", 2 // tasks_per_node, "--trainer.devices", tasks_per_node)
    both = Launched(["first", "second"], [[sys.executable]] * 2, *settings, environments=tasks).ended()
    assert [(status, own_lines(errors)) for status, _, errors in both] == [(0, [])] * 2
    assert "2 ranks, 1 thread each" in both[0][1]
    assert both[1][1] == ""
    assert_like("first", reference)
    assert list(Path("second").iterdir()) == []


def fault(what, ranks):
    Path("faults.py").write_text(FAULT)
    callback = {"class_path": "faults.Fault", "init_args": {"what": what, "ranks": ranks}}
    write_config({"trainer.callbacks": [callback]})


# rank 0 finds that rank 1 has ended, or torchrun stops rank 0 first
LOST = "rank 1 has ended|stopped by SIGTERM; .* keeps round 1"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("what", "ranks", "lines"),
    [
        ("mistake", [1], ["rank 1: my own mistake", LOST]),
        ("mistake", [0, 1], ["my own mistake"]),
        ("kill", [1], [LOST]),
    ],
)
def test_a_failure_under_torchrun_is_told_once_and_the_run_stays_whole(what, ranks, lines):
    fault(what, ranks)
    started = time.monotonic()
    ((status, _, errors),) = Launched(["launched"], [TWO_RANKS]).ended()
    assert status != 0
    assert time.monotonic() - started < 90
    told = [line for line in own_lines(errors) if not line.startswith("stopping after this round")]
    assert len(told) == len(lines)
    for line, expected in zip(told, lines, strict=True):
        assert re.search(expected, line)
    assert [row["round"] for row in rows(only_attempt("launched"))] == [0, 1]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_mistake_before_the_ranks_have_met_is_one_line():
    write_config()
    ((status, _, errors),) = Launched(["launched"], [TWO_RANKS], "--ckpt_path", "last").ended()
    assert status != 0
    assert len(own_lines(errors)) == 1
    assert "ckpt_path 'last' found no last.ckpt" in own_lines(errors)[0]
    assert not Path("launched/runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_torchrun_finishes_the_round(number):
    Path("faults.py").write_text(FAULT)
    write_config({"trainer.callbacks": [{"class_path": "faults.Slow"}], "trainer.max_epochs": 100})
    launched = Launched(["launched"], [TWO_RANKS])
    until = time.monotonic() + 90
    while time.monotonic() < until and not list(Path("launched").glob("runs/*/*/checkpoints/last.ckpt")):
        time.sleep(0.1)
    os.killpg(launched.processes[0].pid, number)
    ((status, _, errors),) = launched.ended()
    assert status != 0
    (asked, stopped) = own_lines(errors)
    reached = rows(only_attempt("launched"))[-1]["round"]
    assert asked.startswith("stopping after this round")
    assert f"keeps round {reached}; the same command with --ckpt_path last resumes the run" in stopped
