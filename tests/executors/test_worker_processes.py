"""Worker processes: how they start, end and fail."""

import gc
import os
import re
import signal
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers import ArrayClient, States, blobs, fit, small_cnn
from outcomes import MOMENTUM, assert_same, same, states
from torch import nn

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
    ProcessExecutor,
    SequentialExecutor,
)
from fl_lightning.executors import processes


def children():
    """The processes that this one has started and that it has not waited for."""
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }


class Looks(FederatedCallback):
    """Which workers there are in each round, and what they say of themselves."""

    def __init__(self):
        self.before, self.seen, self.status = children(), [], []

    def on_round_end(self, trainer, pl_module, cohort):
        self.seen.append(children() - self.before)
        self.status += [Path(f"/proc/{pid}/status").read_text().split() for pid in self.seen[-1]]


def with_workers(count=2, **settings):
    settings = {"local_steps": 1, **settings}
    return FederatedModule(small_cnn(), MOMENTUM, executor=ProcessExecutor(count), **settings)


def test_each_round_has_workers_of_its_own_and_a_run_leaves_none():
    looks = Looks()
    module = with_workers(3)
    for _ in range(2):
        fit(module, blobs(), 2, [looks])
        assert children() == looks.before
    assert [len(pids) for pids in looks.seen] == [2] * 4
    assert len(set.union(*looks.seen)) == 8


class FailsLater(FederatedCallback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise RuntimeError("outside of the round")


def test_workers_of_a_run_that_failed_outside_a_round_end_with_its_module():
    before, module = children(), with_workers()
    with pytest.raises(RuntimeError, match="outside"):
        fit(module, blobs(), 2, [FailsLater()])
    assert len(children() - before) == 1
    module.executor = SequentialExecutor()
    gc.collect()
    assert children() == before


class Fails(nn.Module):
    def forward(self, x):
        if os.environ.get("FAILS_IN") != str(os.getpid()):
            raise ZeroDivisionError("a bug of one's own")
        return x


def test_a_bug_in_a_worker_is_raised_with_the_workers_traceback(monkeypatch):
    monkeypatch.setenv("FAILS_IN", str(os.getpid()))
    before = children()
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug of one's own") as failure:
        states(ProcessExecutor(2), model=nn.Sequential(Fails(), small_cnn()))
    assert failure.value.__notes__[1:] == ["computing client 2", "round 1, local step 1"]
    assert re.search(
        r"worker process(.|\n)*in forward(.|\n)*a bug of one's own", str(failure.value.__cause__)
    )
    assert children() == before
    assert_same(states(SequentialExecutor()), states(ProcessExecutor(2)))


class Unprintable(Exception):
    def __str__(self):
        raise ZeroDivisionError


class FailsSilently(Fails):
    def forward(self, x):
        if os.environ.get("FAILS_IN") != str(os.getpid()):
            raise Unprintable
        return x


def test_an_error_that_cannot_be_printed_is_told_by_its_type(monkeypatch):
    monkeypatch.setenv("FAILS_IN", str(os.getpid()))
    with pytest.raises(RuntimeError, match="Unprintable"):
        states(ProcessExecutor(2), model=nn.Sequential(FailsSilently(), small_cnn()))


def test_workers_that_somebody_else_has_waited_for_end_no_run():
    reference, before = states(SequentialExecutor()), signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert_same(reference, states(ProcessExecutor(3)))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_mistake_that_a_worker_finds_is_one_line():
    clients = [
        ArrayClient(torch.randn(4, 2, 5, 5, dtype=torch.float64), torch.arange(4) % 3, size)
        for size in (2, 1)
    ]
    model = nn.Sequential(nn.Conv2d(2, 3, 5), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 3))
    with pytest.raises(ConfigurationError, match="batch") as mistake:
        states(ProcessExecutor(2), FederatedDataModule(clients, clients[0]), model)
    assert "\n" not in str(mistake.value)


class Sends(FederatedCallback):
    """Sends a signal to the worker in the middle of the second round."""

    def __init__(self, number):
        self.number, self.before = number, children()

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if cohort.round == 2 and step == 0:
            (worker,) = children() - self.before
            os.kill(worker, self.number)


def test_a_worker_that_is_killed_ends_the_run_in_one_line_and_the_next_run_works():
    module = with_workers(local_steps=2)
    with pytest.raises(
        ConfigurationError, match=r"a worker process ended in round 2 .*want of memory.*num_workers"
    ):
        fit(module, blobs(), 3, [Sends(signal.SIGKILL)])
    assert_same(states(SequentialExecutor()), states(module.executor))


def test_a_worker_that_is_stopped_ends_the_run_in_one_line(monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE", 1)
    callback = Sends(signal.SIGSTOP)
    with pytest.raises(ConfigurationError, match=r"has not answered for 1 s in round 2; .*kill -CONT"):
        fit(with_workers(local_steps=2), blobs(), 3, [callback])
    assert children() == callback.before


def test_a_worker_takes_no_signal_from_its_first_moment_on():
    looks = Looks()
    fit(with_workers(), blobs(), 1, [looks])
    (status,) = looks.status
    for kind in ("SigBlk", "SigIgn"):
        bits = int(status[status.index(f"{kind}:") + 1], 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert bits & 1 << number - 1
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_worker_behind():
    script = f"""
import os, sys, torch
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1] / "support")!r}]
from helpers import blobs, fit
from test_worker_processes import Looks, with_workers

class Tells(Looks):
    def on_round_end(self, trainer, pl_module, cohort):
        super().on_round_end(trainer, pl_module, cohort)
        print(*self.seen[-1], flush=True)
        os.kill(os.getpid(), 9)

fit(with_workers(3), blobs(), 2, [Tells()])
"""
    Path("script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    workers = [int(number) for number in done.stdout.split()[-2:]]
    assert len(workers) == 2
    for _ in range(100):
        alive = [number for number in workers if Path(f"/proc/{number}").exists() and _runs(number)]
        if not alive:
            return
        signal.sigtimedwait([], 0.1)
    pytest.fail(f"workers {alive} live on")


def _runs(process):
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


class Copies(FederatedCallback):
    """Copies the module in the middle of a run, as an average of models does."""

    def on_round_end(self, trainer, pl_module, cohort):
        if cohort.round == 2:
            self.copy = deepcopy(pl_module)


def test_a_copy_of_a_module_in_training_trains_with_workers_of_its_own():
    copies = Copies()
    fit(with_workers(local_steps=2), blobs(), 3, [copies])
    assert copies.copy.executor.num_workers == 2
    fit(copies.copy, blobs(), 3)
    alone = FederatedModule(small_cnn(), MOMENTUM, local_steps=2, executor=SequentialExecutor())
    seen = States()
    fit(alone, blobs(), 3, [seen])
    alone.load_state_dict(seen.states[2])
    fit(alone, blobs(), 3)
    assert same(copies.copy.state_dict(), alone.state_dict())


def test_shared_memory_that_is_too_small_is_said_before_it_is_used(monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(processes.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(ConfigurationError, match=r"needs 0 MB of shared memory.*--shm-size"):
        states(ProcessExecutor(2))


def test_fewer_than_one_worker_is_refused():
    with pytest.raises(ConfigurationError, match=r"ProcessExecutor\.num_workers: 0 must be at least 1"):
        ProcessExecutor(0)


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (processes.sys, "platform", "darwin", "processes cannot be copied on darwin"),
        (torch.cuda, "is_available", lambda: True, "a process cannot be copied where it sees a GPU"),
    ],
)
def test_where_a_process_cannot_be_copied_is_said(monkeypatch, owner, name, value, reason):
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ConfigurationError, match=f"ProcessExecutor: {reason}; use VectorizedExecutor on"):
        states(ProcessExecutor(2))
