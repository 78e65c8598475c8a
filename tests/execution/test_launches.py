"""Runs whose ranks somebody else has started, and runs that go on with another number of ranks.

A launch starts two to four interpreters. Two launches stay in CI: torchrun on two machines, which resumes a run of the
first, and two machines that copy their own ranks. Other launchers and failures are nightly. The variables of a launcher are
tested without processes: the rank, the machines, repeated signals and errors.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.faults import same
from fl_lightning import ConfigurationError
from fl_lightning.cli import print_errors
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.experiments.run import interruption
from fl_lightning.experiments.run.trainer import make_trainer
from fl_lightning.experiments.run_directory.checkpoint_io import AtomicCheckpointIO
from fl_lightning.experiments.run_directory.directory import Attempt
from fl_lightning.launched import launched_rank
from fl_lightning.ranks import LostRank
from tests.support.command_line import attempts, rows, run, write_config
from tests.support.slurm_cluster import needs_slurm

ROOT = Path(__file__).parents[2]
FAULT = """
import os, time
from pathlib import Path
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
                case "kill once" if not Path("killed").exists():
                    Path("killed").touch()
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


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RUN_ID": "7", "RANK": "1", "SLURM_PROCID": "3"}, 1),
        ({"TORCHELASTIC_RUN_ID": "7", "RANK": "0", "LOCAL_RANK": "1"}, 0),
        ({"RANK": "1"}, 0),
        ({"SLURM_PROCID": "2"}, 2),
        ({"NODE_RANK": "1"}, 1),
        ({"NODE_RANK": "1", "LOCAL_RANK": "3"}, 3),
    ],
)
def test_the_rank_is_that_of_the_launcher(environment, rank, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == rank


def test_torchrun_decides_the_ranks_and_machines_of_a_trainer(monkeypatch):
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
    }
    for name, value in {
        **place,
        "TORCHELASTIC_RUN_ID": "7",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer({"accelerator": "cpu"})
    assert (trainer.num_nodes, trainer.num_devices, trainer.world_size) == (3, 2, 6)
    assert isinstance(trainer.strategy, CohortStrategy)


@pytest.mark.parametrize(
    ("file", "url", "variables"),
    [("ranks", "file://ranks", ["lo", None]), (None, "env://", [None, "127.0.0.1"])],
)
def test_copies_on_one_machine_meet_at_a_file_and_others_at_an_address(file, url, variables, monkeypatch):
    def meet(place, *_, **__):
        assert place == url
        assert [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR")] == variables
        raise RuntimeError

    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr("fl_lightning.execution.strategy.rendezvous", meet)
    strategy = make_trainer({"accelerator": "cpu", "devices": 2}).strategy
    strategy.meeting_place = file
    with pytest.raises(LostRank):
        strategy._join()


def test_a_notebook_may_have_ranks_but_not_many_more_than_cores(monkeypatch):
    monkeypatch.setattr("fl_lightning.execution.strategy.usable_cores", lambda: 2)
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    assert make_trainer({"accelerator": "cpu", "devices": 10}).world_size == 10
    with pytest.raises(ConfigurationError, match=r"11 ranks are too many for 2 CPU cores.*use 2, at most 10"):
        make_trainer({"accelerator": "cpu", "devices": 11})


@pytest.mark.parametrize(
    ("rank", "line"), [(0, "error: my own mistake"), (1, "error: rank 1: my own mistake")]
)
def test_a_rank_of_torchrun_names_itself_after_the_first_one_had_time_to(rank, line, monkeypatch, capfd):
    waits = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(print_errors, "_let_the_first_rank_speak", lambda: waits.append(rank))
    with pytest.raises(SystemExit):
        print_errors.fail(ConfigurationError("my own mistake"))
    assert capfd.readouterr().err.splitlines() == [line]
    assert waits == [1] * rank


def test_a_signal_that_torchrun_repeats_within_two_seconds_counts_once(monkeypatch):
    times = iter([10.0, 11.9, 12.1])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setattr(interruption, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with interruption.stoppable():
        interruption.FinishRound().on_train_start(None, None)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(interruption.Stopped):
            signal.raise_signal(signal.SIGTERM)


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
        return str(place.getsockname()[1])


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

    def ended(self, seconds=300):
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


@pytest.mark.nightly
def test_ranks_of_torchrun_are_one_run_with_the_numbers_of_one_process():
    write_config()
    reference = run("--trainer.devices", 1).attempt
    ((status, said, errors),) = Launched(["launched"], [TWO_RANKS]).ended()
    assert (status, own_lines(errors)) == (0, [])
    for line in ("loading PyTorch", "State of the model", "2 ranks, 1 thread each", "Result", "round 4/4"):
        assert said.count(line) == 1
    assert_like("launched", reference)


def torchrun(place):
    there = ["--nnodes", "2", "--nproc-per-node", "1"]
    there += ["--master-addr", place["MASTER_ADDR"], "--master-port", place["MASTER_PORT"]]
    return [[*TORCHRUN, *there, "--node-rank", str(rank)] for rank in range(2)], (), None


def copies(place):
    environments = [{**place, "NODE_RANK": str(rank)} for rank in range(2)]
    return [[sys.executable]] * 2, ("--trainer.num_nodes", 2, "--trainer.devices", 2), environments


def slurm(place, tasks_per_node):
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "job.sh",
        "SLURM_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "MASTER_PORT": place["MASTER_PORT"],
    }
    tasks = []
    for task in range(2):
        node, local = divmod(task, tasks_per_node)
        names = {"SLURM_PROCID": task, "SLURM_NODEID": node, "SLURM_LOCALID": local}
        tasks.append({**job, **{name: str(number) for name, number in names.items()}})
    settings = ("--trainer.num_nodes", 2 // tasks_per_node, "--trainer.devices", tasks_per_node)
    return [[sys.executable]] * 2, settings, tasks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks", "goes_on"),
    [
        pytest.param(copies, 4, False, id="copies"),
        pytest.param(torchrun, 2, True, id="torchrun that goes on"),
        pytest.param(partial(slurm, tasks_per_node=1), 2, False, id="slurm", marks=pytest.mark.nightly),
        pytest.param(partial(slurm, tasks_per_node=2), 2, False, id="two tasks", marks=pytest.mark.nightly),
    ],
)
def test_machines_without_a_shared_file_system_give_the_numbers_of_one_process(launcher, ranks, goes_on):
    """The run that goes on is on the first machine alone."""
    write_config()
    longer = ("--ckpt_path", "last", "--trainer.max_epochs", 6) if goes_on else ()
    if goes_on:
        run("--trainer.devices", 1, "--run_root", "first/runs")
        run("--trainer.devices", 1)
    reference = run("--trainer.devices", 1, *longer).attempt
    commands, settings, environments = launcher({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()})
    both = Launched(["first", "second"], commands, *settings, *longer, environments=environments).ended()
    assert [(status, own_lines(errors)) for status, _, errors in both] == [(0, [])] * 2
    assert launcher is not copies or [errors for *_, errors in both] == ["", ""]
    assert goes_on or f"{ranks} ranks, 1 thread each" in both[0][1]  # a resumed run prints no plan
    assert both[1][1] == ""
    assert_like("first", reference)
    assert list(Path("second").iterdir()) == []


def fault(what, ranks):
    Path("faults.py").write_text(FAULT)
    callback = {"class_path": "faults.Fault", "init_args": {"what": what, "ranks": ranks}}
    write_config({"trainer.callbacks": [callback]})


# rank 0 finds that rank 1 has ended, or torchrun stops rank 0 first
LOST = "rank 1 has ended|stopped by SIGTERM; .* keeps round 1"


@pytest.mark.nightly
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
    ((status, _, errors),) = Launched(["launched"], [TWO_RANKS]).ended()
    assert status != 0
    told = [line for line in own_lines(errors) if not line.startswith("stopping after this round")]
    assert len(told) == len(lines)
    for line, expected in zip(told, lines, strict=True):
        assert re.search(expected, line)
    assert [row["round"] for row in rows(only_attempt("launched"))] == [0, 1]


@pytest.mark.nightly
def test_torchrun_restarts_a_run_after_a_rank_is_killed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    fault("kill once", [1])
    reference = run("--trainer.devices", 1).attempt
    restarting = [*TWO_RANKS, "--max-restarts", "1"]
    ((status, said, errors),) = Launched(["launched"], [restarting], "--ckpt_path", "auto").ended(300)
    assert (status, Path("launched/killed").exists()) == (0, True), errors
    assert said.count("Result") == 1
    assert_like("launched", reference)


@pytest.mark.nightly
def test_two_tasks_of_srun_give_the_numbers_of_one_process():
    needs_slurm()
    write_config()
    reference = run("--trainer.devices", 1).attempt
    ((status, said, errors),) = Launched(
        ["launched"], [["srun", "--ntasks-per-node=2", sys.executable]], "--trainer.devices", 2
    ).ended(300)
    assert (status, own_lines(errors)) == (0, []), errors
    assert "2 ranks, 1 thread each" in said
    assert_like("launched", reference)


@pytest.mark.nightly
def test_a_mistake_before_the_ranks_have_met_is_one_line():
    write_config()
    ((status, _, errors),) = Launched(["launched"], [TWO_RANKS], "--ckpt_path", "last").ended()
    assert status != 0
    assert len(own_lines(errors)) == 1
    assert "ckpt_path 'last' found no last.ckpt" in own_lines(errors)[0]
    assert not Path("launched/runs").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_torchrun_finishes_the_round(number):
    Path("faults.py").write_text(FAULT)
    write_config({"trainer.callbacks": [{"class_path": "faults.Slow"}], "trainer.max_epochs": 100})
    launched = Launched(["launched"], [TWO_RANKS])
    until = time.monotonic() + 300
    while time.monotonic() < until and not list(Path("launched").glob("runs/*/*/checkpoints/last.ckpt")):
        time.sleep(0.1)
    os.killpg(launched.processes[0].pid, number)
    ((status, _, errors),) = launched.ended()
    assert status != 0
    (asked, stopped) = own_lines(errors)
    reached = rows(only_attempt("launched"))[-1]["round"]
    assert asked.startswith("stopping after this round")
    assert f"keeps round {reached}; the same command with --ckpt_path last resumes the run" in stopped
