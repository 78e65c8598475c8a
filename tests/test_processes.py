"""Clients spread over processes: the sequential executor's numbers, bit for bit, and its manners when something fails."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from command_line import rows, run, write_config
from helpers import ArrayClient, States, blobs, fit, small_cnn
from test_contract import EVERY_ROW
from test_contract import run as run_method
from torch import nn

from fl_lightning import (
    ConfigurationError,
    FederatedCallback,
    FederatedDataModule,
    FederatedModule,
    ProcessExecutor,
    SequentialExecutor,
    processes,
)
from fl_lightning.processes import shares_of
from fl_lightning.staging import Staging

STARTS = pytest.mark.parametrize("start", ["fork", "spawn"])
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def states(executor, data=None, model=None, rounds=3, module=FederatedModule, **settings):
    """The server's state after each round."""
    seen = States()
    settings = {"client_optimizer": MOMENTUM, "local_steps": 2, **settings}
    fit(module(model or small_cnn(), executor=executor, **settings), data or blobs(), rounds, [seen])
    return seen.states


def assert_same(first, second):
    assert len(first) == len(second) > 0
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


@EVERY_ROW
@STARTS
def test_every_method_runs_alike_in_processes_bit_for_bit(row, start):
    one, several = States(), States()
    run_method(row, extra=[one], executor=SequentialExecutor())
    run_method(row, extra=[several], executor=ProcessExecutor(2, start=start))
    assert_same(one.states, several.states)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, None])
def test_the_number_of_workers_changes_no_bit(workers):
    reference = states(SequentialExecutor())
    assert_same(reference, states(ProcessExecutor(workers)))


def test_partial_participation_and_clients_that_finish_early_change_no_bit():
    settings = {"participation": 3, "local_steps": None, "local_epochs": 1}
    data = partial(blobs, 5, (16, 32, 24, 16))
    reference = states(SequentialExecutor(), data(), rounds=5, **settings)
    assert_same(reference, states(ProcessExecutor(2), data(), rounds=5, **settings))


def test_batches_of_different_shape_and_dropout_change_no_bit():
    generator = torch.Generator().manual_seed(0)

    def data():
        clients = [
            ArrayClient(
                torch.randn(24, 2, 6, 6, dtype=torch.float64, generator=generator.manual_seed(i)),
                torch.arange(24) % 3,
                size,
            )
            for i, size in enumerate((4, 8, 6, 12))
        ]
        return FederatedDataModule(clients, clients[0])

    def model():
        return small_cnn(dropout=0.3)

    assert_same(states(SequentialExecutor(), data(), model()), states(ProcessExecutor(2), data(), model()))


class Weighted(FederatedModule):
    """A loss of its own, as a subclass may have."""

    scale = 1.0

    def client_loss(self, batch):
        return self.scale * super().client_loss(batch) + sum(
            p.square().sum() for p in self.model.parameters()
        )


def test_a_loss_of_ones_own_runs_in_the_workers():
    reference = states(SequentialExecutor(), module=Weighted)
    assert_same(reference, states(ProcessExecutor(2), module=Weighted))
    assert not same(reference[-1], states(ProcessExecutor(2))[-1])


class WeightedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("by_class", torch.ones(3, dtype=torch.float64))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, self.by_class)


class Changes(FederatedCallback):
    """Changes what is no part of a cohort while the run goes on."""

    def on_round_start(self, trainer, pl_module, cohort):
        pl_module.scale = 1.0 / cohort.round
        for layer in pl_module.model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 0.5 / cohort.round
        if isinstance(pl_module.loss, WeightedLoss):
            pl_module.loss.by_class[0] = cohort.round


class RoundInTheLoss(Weighted):
    def client_loss(self, batch):
        return self.round * super().client_loss(batch)


@STARTS
def test_numbers_that_callbacks_change_reach_the_workers(start):
    def run(executor):
        seen = States()
        loss = WeightedLoss() if start == "fork" else None
        module = RoundInTheLoss(small_cnn(), MOMENTUM, local_steps=2, executor=executor, loss=loss)
        fit(module, blobs(), 3, [Changes(), seen])
        return seen.states

    assert_same(run(SequentialExecutor()), run(ProcessExecutor(2, start=start)))


class Noisy(nn.Module):
    """Draws from torch's global generator, as stochastic depth does."""

    def forward(self, x):
        return x * (1 + 0.1 * torch.rand(len(x), 1, 1, 1, dtype=x.dtype))


class Scales(nn.Module):
    """Scales its input by numbers that a user keeps in a list, a dict, a tensor that is no buffer, and another object."""

    def __init__(self):
        super().__init__()
        self.scales, self.named, self.loose = [1.0, 1.0], {"all": 1.0}, torch.ones(1, dtype=torch.float64)
        self.function = torch.nn.functional.relu

    def forward(self, x):
        return self.function(x * self.scales[0] * self.named["all"] * self.loose + 0.1)


class ChangesInside(FederatedCallback):
    """Changes one of them, and the loss, from the second round on."""

    def __init__(self, what):
        self.what = what

    def on_round_start(self, trainer, pl_module, cohort):
        scale = pl_module.model[0]
        if cohort.round > 1:
            match self.what:
                case "list":
                    scale.scales[0] = 2.0
                case "dict":
                    scale.named["all"] = 3.0
                case "tensor":
                    scale.loose.fill_(2.0)
                case "function":
                    scale.function = torch.tanh
                case "loss":
                    pl_module.loss = nn.CrossEntropyLoss(label_smoothing=0.3)


@STARTS
@pytest.mark.parametrize("what", ["list", "dict", "tensor", "function", "loss"])
def test_what_callbacks_change_inside_the_model_reaches_the_workers(what, start):
    def run(executor, changed):
        model = nn.Sequential(Scales(), nn.Flatten(), nn.Linear(72, 3))
        nn.init.constant_(model[2].weight, 0.01)
        nn.init.zeros_(model[2].bias)
        seen = States()
        loss = nn.CrossEntropyLoss()
        module = FederatedModule(model, MOMENTUM, local_steps=2, executor=executor, loss=loss)
        fit(module, blobs(), 3, [ChangesInside(changed), seen])
        return seen.states

    reference = run(SequentialExecutor(), what)
    assert_same(reference, run(ProcessExecutor(2, start=start), what))
    assert not same(reference[-1], run(SequentialExecutor(), "nothing")[-1])


def test_random_numbers_of_a_model_are_those_of_its_client():
    def model():
        return nn.Sequential(Noisy(), small_cnn())

    assert_same(states(SequentialExecutor(), model=model()), states(ProcessExecutor(3), model=model()))


class Keeps(nn.Module):
    """Keeps what it computed last, as models do that explain themselves."""

    def forward(self, x):
        self.last = x.relu()
        return self.last


def test_what_a_model_keeps_of_its_forward_pass_starts_no_new_workers(monkeypatch):
    started = []
    crew = processes._Crew.__init__

    def watched(self, *args):
        started.append(self)
        crew(self, *args)

    def run(executor):
        torch.manual_seed(0)
        return states(executor, model=nn.Sequential(Keeps(), nn.Flatten(), nn.Linear(72, 3)))

    reference = run(SequentialExecutor())
    monkeypatch.setattr(processes._Crew, "__init__", watched)
    assert_same(reference, run(ProcessExecutor(2)))
    assert len(started) == 1


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


class Threads(FederatedCallback):
    """Looks how many threads there are inside rounds and outside."""

    def __init__(self):
        self.inside, self.outside = set(), set()

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.inside.add(torch.get_num_threads())

    def on_round_end(self, trainer, pl_module, cohort):
        self.inside.add(torch.get_num_threads())

    def on_train_epoch_end(self, trainer, pl_module):
        self.outside.add(torch.get_num_threads())


def test_a_round_has_one_thread_and_evaluations_have_those_that_torch_was_told():
    torch.set_num_threads(2)  # of this test: the next one begins with one
    for executor, inside in ((ProcessExecutor(2), {1}), (SequentialExecutor(), {2})):
        threads = Threads()
        module = FederatedModule(small_cnn(), MOMENTUM, local_steps=2, executor=executor)
        fit(module, blobs(), 2, [threads])
        assert (threads.inside, threads.outside) == (inside, {2})
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("rows_", "parts", "expected"),
    [
        ([0, 1, 2, 3, 4], 2, [[0, 1, 2], [3, 4]]),
        ([1, 4, 6], 3, [[1], [4], [6]]),
        ([2], 3, [[2], [], []]),
        (list(range(7)), 3, [[0, 1, 2], [3, 4], [5, 6]]),
    ],
)
def test_rows_are_shared_out_evenly(rows_, parts, expected):
    assert shares_of(rows_, parts) == expected


class Fails(nn.Module):
    def forward(self, x):
        if os.environ.get("FAILS_IN") != str(os.getpid()):
            raise ZeroDivisionError("a bug of one's own")
        return x


@STARTS
def test_a_bug_in_a_worker_is_raised_with_the_workers_traceback(start, monkeypatch):
    monkeypatch.setenv("FAILS_IN", str(os.getpid()))
    with pytest.raises(RuntimeError, match=r"worker process(.|\n)*in forward(.|\n)*a bug of one's own"):
        states(ProcessExecutor(2, start=start), model=nn.Sequential(Fails(), small_cnn()))
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
            os.kill(pl_module.executor._crew.workers[0].process.pid, signal.SIGKILL)


@STARTS
def test_a_worker_that_is_killed_ends_the_run_in_one_line_and_the_next_run_works(start):
    executor = ProcessExecutor(2, start=start)
    module = FederatedModule(small_cnn(), MOMENTUM, local_steps=2, executor=executor)
    with pytest.raises(
        ConfigurationError, match=r"a worker process ended in round 2 .*want of memory.*num_workers"
    ):
        fit(module, blobs(), 3, [Kills()])
    assert_same(states(SequentialExecutor()), states(executor))


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
            seen.append([worker.process for worker in executor._crew.workers])

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


def test_batches_come_to_the_workers_in_their_memory_format():
    staging = Staging()
    images = torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    batches = [(images, torch.arange(4)), (images + 1, torch.arange(4))]
    staged = staging.put(batches)
    assert torch.equal(staged.leaves[0][1], images + 1)
    assert staged.leaves[0][0].is_contiguous(memory_format=torch.channels_last)
    assert staging.put(batches[:1]).leaves is None
    unequal = [(images, torch.arange(4)), (images[:2], torch.arange(2))]
    assert staging.put(unequal) == unequal


def test_the_command_line_takes_it_by_name_and_leaves_no_process(tmp_path):
    write_config()
    reference = run("--name", "one")
    script = textwrap.dedent("""
        import sys
        from fl_lightning.cli import main
        if __name__ == "__main__":
            main(sys.argv[1:])
    """)
    Path("script.py").write_text(script)
    arguments = ["fit", "--config", "tiny.yaml", "--name", "two", "--model.executor", "ProcessExecutor"]
    done = subprocess.run(
        [sys.executable, "script.py", *arguments, "--model.executor.num_workers", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = Path("runs/two").iterdir()
    assert rows(type(reference.attempt)(folder)) == rows(reference.attempt)
    assert done.stderr == ""


@STARTS
def test_a_worker_takes_no_signal_from_its_first_moment_on(start):
    seen = []

    class Looks(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            (worker,) = pl_module.executor._crew.workers
            status = Path(f"/proc/{worker.process.pid}/status").read_text().split()
            seen.append([int(status[status.index(f"{kind}:") + 1], 16) for kind in ("SigBlk", "SigIgn")])

    executor = ProcessExecutor(2, start=start)
    fit(FederatedModule(small_cnn(), MOMENTUM, local_steps=1, executor=executor), blobs(), 1, [Looks()])
    for blocked_or_ignored in seen[0]:
        for number in (signal.SIGINT, signal.SIGTERM):
            assert blocked_or_ignored & 1 << number - 1
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


class Listens(FederatedCallback):
    """What files of the working directory the workers hold open."""

    held: ClassVar[list[str]] = []

    def on_round_end(self, trainer, pl_module, cohort):
        (worker,) = pl_module.executor._crew.workers
        folder = Path(f"/proc/{worker.process.pid}/fd")
        here = str(Path.cwd().resolve())
        own = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        assert any(name.startswith(here) for name in own)  # the run's lock
        self.held += [
            name for name in map(str, map(Path.readlink, folder.iterdir())) if name.startswith(here)
        ]


def test_a_forked_worker_keeps_no_file_of_the_run_open():
    write_config({"trainer.callbacks": [{"class_path": "test_processes.Listens"}]})
    Listens.held.clear()
    run("--model.executor", "ProcessExecutor", "--model.executor.num_workers", "2")
    assert Listens.held == []


@STARTS
def test_a_run_that_is_killed_leaves_no_worker_behind(start):
    script = f"""
import os, sys, torch
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from functools import partial
from helpers import blobs, fit, small_cnn
from fl_lightning import FederatedCallback, FederatedModule, ProcessExecutor

class Tells(FederatedCallback):
    def on_round_end(self, trainer, pl_module, cohort):
        print(*(worker.process.pid for worker in pl_module.executor._crew.workers), flush=True)
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    module = FederatedModule(small_cnn(), partial(torch.optim.SGD, lr=0.1), local_steps=1, executor=ProcessExecutor(3, start={start!r}))
    fit(module, blobs(), 2, [Tells()])
"""
    Path("script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=False
    )
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
