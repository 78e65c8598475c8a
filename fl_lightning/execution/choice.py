"""What computes a run whose configuration does not say it: how many ranks, and which executor."""

import os
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fl_lightning.execution.base import ClientTask, Executor
from fl_lightning.execution.fork import cannot_fork
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.ranks import Ranks

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Choice(NamedTuple):
    """An executor and why it was chosen.

    Attributes:
        executor: The executor.
        reason: Why, to be printed after it.
    """

    executor: Executor
    reason: str


def choose_executor(module: ClientTask, num_clients: int) -> Choice:
    """The executor that is likely to be the fastest for a run, with results that depend on the choice by rounding alone.

    On a GPU all clients at once, one after the other where the model or its batches do not allow it; else one after the other.

    Args:
        module: The federated module, on its device.
        num_clients: Clients in a round.
    """
    if module.device.type == "cuda":
        reason = f"{num_clients} clients at once on {module.device}"
        return Choice(VectorizedExecutor(where_possible=True), reason)
    threads = torch.get_num_threads()
    ranks = module.trainer.world_size if getattr(module, "_trainer", None) is not None else 1
    reason = f"{ranks} rank{'s' * (ranks > 1)}, {threads} thread{'s' * (threads > 1)}{' each' * (ranks > 1)}"
    return Choice(SequentialExecutor(), reason)


def decide_compilation(
    task: ClientTask,
    executor: Executor,
    ranks: Ranks,
    client_steps: int,
    batch: Callable[[], Any],
    before: bool | None,
) -> bool:
    """Let an executor decide whether it compiles: if one rank cannot, no rank does.

    Args:
        task: The federated module.
        executor: The executor, whose ``compilation`` is set.
        ranks: The processes of the run.
        client_steps: Local steps of all clients in the whole run.
        batch: Gives a client's first batch.
        before: The decision up to the run's checkpoint, None for a run from the start.

    Returns:
        The decision, which the run keeps for its resumption.
    """
    found = ranks.exchange(lambda: executor.decide_compilation(task, client_steps, batch, before))
    executor.compilation = next((each for each in found if not each.compiled), found[0])
    return executor.compilation.compiled


def cpu_ranks() -> int:
    """The most ranks that a run on CPUs has unless it is told: one for each core that it may use."""
    return 1 if cannot_fork() else cores_of_a_run()


def cores_of_a_run() -> int:
    """What ``OMP_NUM_THREADS`` says, at most :func:`usable_cores`."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(usable_cores(), int(told)) if told.isdecimal() and int(told) else usable_cores()


def usable_cores() -> int:
    """Cores that this process may use: those it may run on, at most what a container's quota of processor time amounts to."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(allowed, ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or no quota, which is "max"
        return allowed
