"""Which executor computes a run whose configuration names none."""

from types import FunctionType
from typing import NamedTuple

from fl_lightning.executors.base import ClientTask, Executor
from fl_lightning.executors.processes import (
    ProcessExecutor,
    cannot_fork,
    cores_of_a_run,
    shared_memory_left,
)
from fl_lightning.executors.sequential import SequentialExecutor
from fl_lightning.executors.vectorized import VectorizedExecutor

_KNOWN = ("fl_lightning", "callbacks", "torch", "torchvision", "torchmetrics", "lightning")
"""Packages whose classes keep nothing that a process of its own would miss."""

_WORTH_A_FORK = 20
"""Local steps of all clients in a round; in a shorter one the start of processes takes longer than they save."""


class Choice(NamedTuple):
    """An executor and why it was chosen.

    Attributes:
        executor: The executor.
        reason: Why, to be printed after it.
    """

    executor: Executor
    reason: str


def choose_executor(module: ClientTask, num_clients: int, client_steps: int) -> Choice:
    """The executor that is likely to be the fastest for a run, with results that depend on the choice by rounding alone.

    On a GPU all clients at once, one after the other where the model or its batches do not allow it. On a CPU one process
    for each core (``OMP_NUM_THREADS``, where it is set, is the number of cores to use), but only where a round is long enough
    and the model, the loss and the callbacks are of this project, torch and Lightning: what code of one's own keeps or changes,
    a process could miss.

    Args:
        module: The federated module, on its device.
        num_clients: Clients in a round.
        client_steps: Local steps of all of them in a round.
    """
    if module.device.type == "cuda":
        reason = f"{num_clients} clients at once on {module.device}"
        return Choice(VectorizedExecutor(where_possible=True), reason)
    row = sum(x.nbytes for x in 2 * [*module.model.parameters()] + [*module.model.buffers()])
    cores = cores_of_a_run()
    workers = min(cores, num_clients)
    if module.device.type != "cpu":
        reason = f"for {module.device}"
    elif workers == 1:
        reason = "one client" if num_clients == 1 else "one core"
    elif client_steps < _WORTH_A_FORK:
        reason = f"{client_steps} local steps a round"
    elif blocked := cannot_fork():
        reason = blocked
    elif own := _of_ones_own(module):
        reason = f"{own} is your own, and worker processes could miss what it keeps or changes"
    elif num_clients * row > shared_memory_left():
        reason = f"little shared memory, {shared_memory_left() / 1e6:,.0f} MB"
    else:
        return Choice(ProcessExecutor(workers), f"{num_clients} clients on {cores} cores")
    return Choice(SequentialExecutor(), reason)


def _of_ones_own(module: ClientTask) -> str | None:
    """The class of something that computes or changes clients' losses and is nobody's whose code is known; None without."""
    if "client_loss" in vars(module):
        return type(module).__name__
    # ``trainer`` raises where there is none
    callbacks = module.trainer.callbacks if getattr(module, "_trainer", None) is not None else []  # type: ignore[attr-defined]  # set in a helper of the trainer
    for thing in (module, *module.model.modules(), module.loss, *callbacks):
        kind = thing if isinstance(thing, FunctionType) else type(thing)
        if (kind.__module__ or "").partition(".")[0] not in _KNOWN:
            return kind.__name__
    return None
