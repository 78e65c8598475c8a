"""Which executor computes a run whose configuration names none."""

import os
import sys
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import torch

from fl_lightning.executors import Executor, SequentialExecutor, VectorizedExecutor
from fl_lightning.processes import ProcessExecutor, shared_memory_left

if TYPE_CHECKING:
    from fl_lightning.run_module import RunModule

_SERIAL_SHARE = 0.16
"""Part of a client's step that further threads do not shorten: two threads take 0.58 of the time of one (ResNet-20, batch 20)."""


class Choice(NamedTuple):
    """An executor and why it was chosen.

    Attributes:
        executor: The executor.
        reason: Why, to be printed after it.
    """

    executor: Executor
    reason: str

    def __str__(self) -> str:
        return f"{type(self.executor).__name__}, {self.reason}; model.executor sets another"


def choose_executor(module: "RunModule", num_clients: int) -> Choice:
    """The executor that is likely to be the fastest for a run, with results that do not depend on the choice.

    On a GPU all clients at once, one after the other where the model or its batches do not allow it. On a CPU one process
    for each core (``OMP_NUM_THREADS``, where it is set, is the number of cores to use), unless the clients divide so badly
    over them that one client after the other with torch's threads is faster, or a worker process could miss something, as
    with a ``client_loss`` of one's own.

    Args:
        module: The federated module, on its device.
        num_clients: Clients in a round.
    """
    if module.device.type == "cuda":
        return Choice(
            VectorizedExecutor(where_possible=True), f"{num_clients} clients at once on {module.device}"
        )
    sequential = SequentialExecutor()
    if module.device.type != "cpu":
        return Choice(sequential, f"for {module.device}")
    cores = _usable_cores()
    workers, threads = min(cores, num_clients), min(cores, torch.get_num_threads())
    if workers == 1:
        reason = "one client" if num_clients == 1 else "one core"
    elif sys.platform != "linux" or torch.cuda.is_available():
        reason = "processes cannot start as copies of this one here"
    elif _overridden(module):
        reason = "client_loss is not the default"
    elif ceil(num_clients / workers) / num_clients > _SERIAL_SHARE + (1 - _SERIAL_SHARE) / threads:
        reason = f"{num_clients} clients on {cores} cores leave some of them waiting"
    elif _state_bytes(module, num_clients) > shared_memory_left():
        reason = f"little shared memory, {shared_memory_left() / 1e6:,.0f} MB"
    else:
        return Choice(ProcessExecutor(workers), f"{num_clients} clients on {cores} cores")
    return Choice(sequential, reason)


def _usable_cores() -> int:
    """Cores that this run may use: what ``OMP_NUM_THREADS`` says, at most those that the process may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(allowed, int(told)) if told.isdecimal() and int(told) else allowed


def _overridden(module: "RunModule") -> bool:
    """Whether clients' losses come from code that is not the framework's."""
    from fl_lightning.module import FederatedModule

    return getattr(type(module), "client_loss", None) is not FederatedModule.client_loss


def _state_bytes(module: "RunModule", num_clients: int) -> int:
    """What the stacked state of the clients takes: parameters, their gradients, buffers."""
    parameters = sum(2 * p.numel() * p.element_size() for p in module.model.parameters())
    return num_clients * (parameters + sum(b.numel() * b.element_size() for b in module.model.buffers()))
