"""Worker processes: how they start, end and fail, and what they hold."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from copy import deepcopy
from multiprocessing import resource_sharer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from command_line import run, write_config
from helpers import ArrayClient, States, blobs, fit, small_cnn
from outcomes import MOMENTUM, STARTS, assert_same, same, states
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


class Sleeper(FederatedCallback):
    """Starts a process of its own while there are workers, which inherits this process's ends of their connections."""

    def on_round_end(self, trainer, pl_module, cohort):
        if cohort.round == 1:
            self.process = multiprocessing.get_context("fork").Process(
                target=time.sleep, args=(60,), daemon=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks beside threads
                self.process.start()


def test_workers_end_while_another_child_of_the_process_lives():
    sleeper, started, before = Sleeper(), time.monotonic(), set(multiprocessing.active_children())
    module = FederatedModule(small_cnn(), MOMENTUM, local_steps=1, executor=ProcessExecutor(2))
    try:
        fit(module, blobs(), 2, [sleeper])
        assert time.monotonic() - started < 30
        assert set(multiprocessing.active_children()) - before == {sleeper.process}
    finally:
        sleeper.process.kill()
        sleeper.process.join(5)


class FailsLater(FederatedCallback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise RuntimeError("outside of the round")


def test_workers_of_a_run_that_failed_outside_a_round_end_with_its_module():
    before = set(multiprocessing.active_children())
    module = FederatedModule(small_cnn(), MOMENTUM, local_steps=1, executor=ProcessExecutor(2, start="fork"))
    with pytest.raises(RuntimeError, match="outside"):
        fit(module, blobs(), 2, [FailsLater()])
    assert len(set(multiprocessing.active_children()) - before) == 1
    module.executor = SequentialExecutor()
    gc.collect()
    assert set(multiprocessing.active_children()) == before


class Fails(nn.Module):
    def forward(self, x):
        if os.environ.get("FAILS_IN") != str(os.getpid()):
            raise ZeroDivisionError("a bug of one's own")
        return x


@STARTS
def test_a_bug_in_a_worker_is_raised_with_the_workers_traceback(start, monkeypatch):
    monkeypatch.setenv("FAILS_IN", str(os.getpid()))
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug of one's own") as failure:
        states(ProcessExecutor(2, start=start), model=nn.Sequential(Fails(), small_cnn()))
    assert failure.value.__notes__[1:] == ["computing client 2", "round 1, local step 1"]
    assert re.search(
        r"worker process(.|\n)*in forward(.|\n)*a bug of one's own", str(failure.value.__cause__)
    )
    assert_same(states(SequentialExecutor()), states(ProcessExecutor(2, start=start)))


def test_a_mistake_that_a_worker_finds_is_one_line():
    clients = [
        ArrayClient(torch.randn(4, 2, 5, 5, dtype=torch.float64), torch.arange(4) % 3, size)
        for size in (2, 1)
    ]
    model = nn.Sequential(nn.Conv2d(2, 3, 5), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 3))
    with pytest.raises(ConfigurationError, match="batch") as mistake:
        states(ProcessExecutor(2), FederatedDataModule(clients, clients[0]), model)
    assert "\n" not in str(mistake.value)


class Kills(FederatedCallback):
    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if cohort.round == 2:
            os.kill(pl_module.executor._pool.workers[0].process.pid, signal.SIGKILL)


@STARTS
def test_a_worker_that_is_killed_ends_the_run_in_one_line_and_the_next_run_works(start):
    executor = ProcessExecutor(2, start=start)
    module = FederatedModule(small_cnn(), MOMENTUM, local_steps=2, executor=executor)
    with pytest.raises(
        ConfigurationError, match=r"a worker process ended in round 2 .*want of memory.*num_workers"
    ):
        fit(module, blobs(), 3, [Kills()])
    assert_same(states(SequentialExecutor()), states(executor))


def test_a_folder_for_temporary_files_whose_path_is_too_long_for_a_socket_is_named(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(folder))
    monkeypatch.setattr(resource_sharer, "_resource_sharer", resource_sharer._ResourceSharer())
    module = FederatedModule(small_cnn(), MOMENTUM, local_steps=2, executor=ProcessExecutor(2, start="fork"))
    with pytest.raises(ConfigurationError, match=r"cannot be sent its work .*path too long.*TMPDIR"):
        fit(module, blobs(), 1)


def test_what_cannot_be_pickled_is_named_and_needs_no_pickling_where_processes_fork():
    settings = {"loss": lambda outputs, targets: outputs.square().mean() + 0 * targets.sum()}
    with pytest.raises(
        ConfigurationError, match=r"cannot be sent to worker processes .*lambda.*SequentialExecutor"
    ):
        states(ProcessExecutor(2, start="spawn"), **settings)
    assert_same(
        states(SequentialExecutor(), **settings), states(ProcessExecutor(2, start="fork"), **settings)
    )


def test_a_process_whose_copy_cannot_compute_gradients_starts_new_ones(monkeypatch):
    def threads(*args, **kwargs):
        raise RuntimeError("Unable to handle autograd's threading in combination with fork")

    reference, here, grad = states(SequentialExecutor()), os.getpid(), torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **kw: (grad if os.getpid() == here else threads)(*args, **kw)
    )
    assert_same(reference, states(ProcessExecutor(2)))
    with pytest.raises(ConfigurationError, match=r"start: fork: Unable to handle autograd.*use spawn"):
        states(ProcessExecutor(2, start="fork"))


def test_a_start_that_does_not_exist_is_named():
    with pytest.raises(
        ConfigurationError, match=r"ProcessExecutor\.start: 'thread' must be one of fork, spawn"
    ):
        ProcessExecutor(2, start="thread")


@STARTS
def test_workers_end_with_the_run_or_wait_for_the_next(start):
    executor = ProcessExecutor(3, start=start)
    seen = []

    class Looks(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            seen.append([worker.process for worker in executor._pool.workers])

    for _ in range(2):
        fit(FederatedModule(small_cnn(), MOMENTUM, local_steps=1, executor=executor), blobs(), 1, [Looks()])
    first, second = seen
    assert len(first) == len(second) == 2
    if start == "fork":
        assert not any(process.is_alive() for process in (*first, *second))
    else:
        assert {process.pid for process in first} == {process.pid for process in second}


def test_shared_memory_that_is_too_small_is_said_before_it_is_used(monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(processes.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(ConfigurationError, match=r"needs 0 MB of shared memory.*--shm-size"):
        states(ProcessExecutor(2))


def test_fewer_than_one_worker_is_refused():
    with pytest.raises(ConfigurationError, match=r"ProcessExecutor\.num_workers: 0 must be at least 1"):
        ProcessExecutor(0)


@STARTS
def test_a_worker_takes_no_signal_from_its_first_moment_on(start):
    seen = []

    class Looks(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            (worker,) = pl_module.executor._pool.workers
            status = Path(f"/proc/{worker.process.pid}/status").read_text().split()
            seen.append([int(status[status.index(f"{kind}:") + 1], 16) for kind in ("SigBlk", "SigIgn")])

    executor = ProcessExecutor(2, start=start)
    fit(FederatedModule(small_cnn(), MOMENTUM, local_steps=1, executor=executor), blobs(), 1, [Looks()])
    for blocked_or_ignored in seen[0]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert blocked_or_ignored & 1 << number - 1
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class Listens(FederatedCallback):
    """What files of the working directory the workers hold open."""

    held: ClassVar[list[str]] = []

    def on_round_end(self, trainer, pl_module, cohort):
        (worker,) = pl_module.executor._pool.workers
        folder = Path(f"/proc/{worker.process.pid}/fd")
        here = str(Path.cwd().resolve())
        own = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        assert any(name.startswith(here) for name in own)  # the run's lock
        self.held += [
            name for name in map(str, map(Path.readlink, folder.iterdir())) if name.startswith(here)
        ]


def test_a_forked_worker_keeps_no_file_of_the_run_open():
    write_config({"trainer.callbacks": [{"class_path": "test_worker_processes.Listens"}]})
    Listens.held.clear()
    run("--model.executor", "ProcessExecutor", "--model.executor.num_workers", "2")
    assert Listens.held == []


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_leaves_no_worker_behind(start):
    script = f"""
import os, sys, torch
sys.path[:0] = [{str(Path(__file__).parents[1] / "support")!r}]
from multiprocessing import process
from functools import partial
from helpers import blobs, fit, small_cnn
from fl_lightning import FederatedCallback, FederatedModule, ProcessExecutor

class Tells(FederatedCallback):
    def on_round_end(self, trainer, pl_module, cohort):
        print(*(worker.process.pid for worker in pl_module.executor._pool.workers), flush=True)
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    module = FederatedModule(small_cnn(), partial(torch.optim.SGD, lr=0.1), local_steps=1, executor=ProcessExecutor(3, start={start!r}))
    fit(module, blobs(), 2, [Tells()])
"""
    Path("script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    workers = [int(number) for number in done.stdout.split()[-2:]]
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
    fit(
        FederatedModule(small_cnn(), MOMENTUM, local_steps=2, executor=ProcessExecutor(2)),
        blobs(),
        3,
        [copies],
    )
    fit(copies.copy, blobs(), 3)
    alone = FederatedModule(small_cnn(), MOMENTUM, local_steps=2, executor=SequentialExecutor())
    seen = States()
    fit(alone, blobs(), 3, [seen])
    alone.load_state_dict(seen.states[2])
    fit(alone, blobs(), 3)
    assert same(copies.copy.state_dict(), alone.state_dict())
