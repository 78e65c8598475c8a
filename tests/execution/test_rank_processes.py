"""Ranks that are copies of a process: how they start, end, fail and drift apart."""

import gc
import os
import re
import signal
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule, FederatedModule
from fl_lightning.execution import fork
from fl_lightning.execution.strategy import CohortStrategy
from tests.support.helpers import ArrayClient, blobs, fit, small_cnn
from tests.support.outcomes import MOMENTUM, assert_same, states


def children():
    """The processes that this one has started and that it has not waited for."""
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }


class Looks(FederatedCallback):
    """Which other ranks there are after each round, and what the system says of them."""

    def __init__(self):
        self.before, self.seen, self.status = children(), [], []

    def on_round_end(self, trainer, pl_module, cohort):
        if pl_module.ranks.rank == 0:
            self.seen.append(children() - self.before)
            self.status += [Path(f"/proc/{pid}/status").read_text().split() for pid in self.seen[-1]]


def train(ranks, *callbacks, rounds=3, **trainer):
    module = FederatedModule(small_cnn(), MOMENTUM, local_steps=2)
    fit(module, blobs(), rounds, callbacks, **{"devices": ranks, "strategy": "cohort", **trainer})
    return module


def test_a_run_has_the_same_ranks_in_every_round_and_leaves_none():
    looks = Looks()
    for _ in range(2):
        train(3, looks)
        assert children() == looks.before
    assert [len(pids) for pids in looks.seen] == [2] * 6
    assert len(set.union(*looks.seen)) == 4


class Fails(FederatedCallback):
    """Raises on one rank, in a hook."""

    def __init__(self, hook, error, rank=1):
        self.rank, self.error = rank, error
        setattr(self, hook, self.fail)

    def fail(self, trainer, pl_module, *_):
        if pl_module.ranks.rank == self.rank and pl_module.round == 2:
            raise self.error


HOOKS = ["on_after_local_backward", "on_before_aggregate", "on_train_epoch_end"]
CELLS = [
    pytest.param(hook, rank, marks=() if rank == HOOKS.index(hook) else pytest.mark.nightly)
    for hook, rank in product(HOOKS, range(3))
]


@pytest.mark.parametrize(("hook", "rank"), CELLS)
def test_a_rank_that_raises_ends_all_with_its_own_line(hook, rank):
    before = children()
    with pytest.raises(ConfigurationError, match="my own mistake"):
        train(3, Fails(hook, ConfigurationError("my own mistake"), rank))
    with pytest.raises((RuntimeError, ZeroDivisionError), match="a bug of one's own") as failure:
        train(3, Fails(hook, ZeroDivisionError("a bug of one's own"), rank))
    if rank:
        assert re.search(rf"in rank {rank}:(.|\n)*in fail", str(failure.value.__cause__))
    assert children() == before


class Decides(FederatedCallback):
    """Asks all ranks, and is late at the end on another rank than the first."""

    def on_round_end(self, trainer, pl_module, cohort):
        for rank in range(2):
            decided = trainer.strategy.reduce_boolean_decision(pl_module.ranks.rank == rank)
            assert decided == (rank == 0)

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == 1:
            time.sleep(0.5)
            Path("late").touch()


def test_the_first_rank_decides_for_all_and_waits_for_all_at_the_end():
    train(2, Decides(), rounds=1)
    assert Path("late").exists()


class Broken(nn.Module):
    def forward(self, x):
        if os.environ.get("LOCAL_RANK"):
            raise ZeroDivisionError("a bug of one's own")
        return x


def test_a_bug_in_the_model_says_where_it_was():
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug of one's own") as failure:
        states(2, model=nn.Sequential(Broken(), small_cnn()), check_first_steps=False)
    assert failure.value.__notes__[1:] == ["computing client 2", "round 1, local step 1"]
    assert_same(states(), states(2))


class Unprintable(Exception):
    def __str__(self):
        raise ZeroDivisionError


def test_an_error_that_cannot_be_printed_is_told_by_its_type():
    with pytest.raises(RuntimeError, match="Unprintable"):
        train(2, Fails("on_local_step_end", Unprintable()))


@pytest.mark.timeout(60)
def test_an_error_longer_than_a_pipe_holds_ends_the_run():
    with pytest.raises(RuntimeError, match="ValueError: xxx"):
        train(2, Fails("on_round_start", ValueError("x" * 100_000)))


def test_only_a_rank_that_was_killed_is_said_to_want_memory():
    class Leaves(FederatedCallback):
        def on_round_end(self, trainer, pl_module, cohort):
            if pl_module.ranks.rank == 1:
                os._exit(7)

    with pytest.raises(ConfigurationError, match=r"rank 1 .* has ended, exit code 7$"):
        train(2, Leaves())


def test_ranks_that_somebody_else_has_waited_for_end_no_run():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert_same(states(), states(3))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_mistake_that_a_rank_finds_in_its_data_is_one_line():
    clients = [
        ArrayClient(torch.randn(4, 2, 5, 5, dtype=torch.float64), torch.arange(4) % 3, size)
        for size in (2, 1)
    ]
    model = nn.Sequential(nn.Conv2d(2, 3, 5), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 3))
    with pytest.raises(ConfigurationError, match="batch") as mistake:
        states(2, FederatedDataModule(clients, clients[0]), model)
    assert "\n" not in str(mistake.value)


class Sends(FederatedCallback):
    """Sends a signal to rank 1 in the middle of the second round."""

    def __init__(self, number):
        self.number, self.before = number, children()

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if pl_module.ranks.rank == 0 and cohort.round == 2 and step == 0:
            os.kill(min(children() - self.before), self.number)


@pytest.mark.timeout(60)
def test_a_rank_that_is_killed_ends_the_run_in_one_line_and_the_next_run_works():
    with pytest.raises(ConfigurationError, match=r"rank 1 \(process \d+\) has ended.*memory was short"):
        train(3, Sends(signal.SIGKILL))
    assert_same(states(), states(3))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("met", [False, True], ids=["before the others", "among the others"])
@pytest.mark.parametrize("raises", [False, True], ids=["killed", "raises"])
def test_a_rank_that_ends_before_it_has_met_the_others_ends_the_run(met, raises, monkeypatch):
    join, before = CohortStrategy._join, children()

    def end(strategy):
        if met or strategy.global_rank != 1:
            join(strategy)
        if strategy.global_rank == 1:
            if raises:
                raise ConfigurationError("my own mistake")
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(CohortStrategy, "_join", end)
    expected = "my own mistake" if raises else r"rank 1 \(process \d+\) has ended.*memory was short"
    with pytest.raises(ConfigurationError, match=expected):
        train(3)
    assert children() == before
    monkeypatch.undo()
    assert_same(states(), states(3))


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_run_in_one_line():
    callback = Sends(signal.SIGSTOP)
    strategy = CohortStrategy(timeout=timedelta(seconds=3))
    with pytest.raises(ConfigurationError, match=r"rank 1 has not answered for 3 s.*kill -CONT"):
        train(2, callback, strategy=strategy)
    assert children() == callback.before


class Late(FederatedCallback):
    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if pl_module.ranks.rank == 1:
            time.sleep(0.3)


@pytest.mark.slow
def test_a_late_rank_changes_no_bit():
    assert_same(states(), states(2, callbacks=[Late()]))


class Drifts(FederatedCallback):
    """Keeps or changes something that is not the same on every rank."""

    def __init__(self, what):
        self.what, self.kept = what, 0.0

    def on_round_end(self, trainer, pl_module, cohort):
        if cohort.round == 2:
            match self.what:
                case "clock":
                    self.kept = time.monotonic()
                case "process":
                    next(pl_module.model.parameters()).data.mul_(1 + 1e-9 * pl_module.ranks.rank)
                case "optimizer":
                    trainer.optimizers[0].param_groups[0]["lr"] = 1.0 - 0.1 * pl_module.ranks.rank

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        if self.what == "own rows":
            self.kept += float(cohort.grads["0.weight"].sum())

    def state_dict(self):
        return {"kept": self.kept}


@pytest.mark.parametrize(
    ("what", "key", "round_number"),
    [
        ("clock", "Drifts.kept", 2),
        ("process", "server model['0.weight']", 2),
        ("optimizer", "server optimizer['param_groups'][0]['lr']", 2),
        ("own rows", "Drifts.kept", 1),
    ],
)
def test_ranks_that_drift_apart_are_told(what, key, round_number):
    told = f"round {round_number}: rank 1 has another {key} than rank 0;"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(told)}"):
        train(2, Drifts(what))


def test_other_ranks_take_no_signal_from_their_first_moment_on():
    looks = Looks()
    train(2, looks, rounds=1)
    (status,) = looks.status
    bits = int(status[status.index("SigBlk:") + 1], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert bits & 1 << number - 1
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_run_that_is_killed_leaves_no_rank():
    class Dies(Looks):
        def on_round_end(self, trainer, pl_module, cohort):
            super().on_round_end(trainer, pl_module, cohort)
            if pl_module.ranks.rank == 0:
                os.write(tell, " ".join(map(str, self.seen[-1])).encode())
                os.kill(os.getpid(), signal.SIGKILL)

    told, tell = os.pipe()
    if not (run := os.fork()):
        try:
            train(3, Dies())
        finally:
            os._exit(1)
    _, status = os.waitpid(run, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    ranks = [int(number) for number in os.read(told, 1000).split()]
    os.close(told), os.close(tell)
    assert len(ranks) == 2
    for _ in range(100):
        alive = [number for number in ranks if Path(f"/proc/{number}").exists() and _runs(number)]
        if not alive:
            break
        signal.sigtimedwait([], 0.1)
    else:
        pytest.fail(f"ranks {alive} live on")


def _runs(process):
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (fork.sys, "platform", "darwin", "processes cannot be copied on darwin"),
        (torch.cuda, "is_initialized", lambda: True, "a process that uses a GPU cannot be copied"),
    ],
)
def test_where_a_process_cannot_be_copied_is_said(monkeypatch, owner, name, value, reason):
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(
        ConfigurationError, match=f"trainer.devices: 2: {reason}; start the ranks by torchrun"
    ):
        train(2)


def test_a_fork_never_frees_what_it_was_born_with(monkeypatch):
    """An earlier run's process group would wait for its threads, which a fork lacks."""

    class Kept:
        def __init__(self):
            self.cycle, self.process = self, os.getpid()

        def __del__(self):
            if os.getpid() != self.process:
                Path("freed").touch()

    def fork(really=os.fork):
        Kept()
        pid = really()
        if pid == 0:
            gc.set_threshold(1)
        return pid

    monkeypatch.setattr(os, "fork", fork)
    train(2, rounds=1)
    assert not Path("freed").exists()
    assert gc.isenabled()
