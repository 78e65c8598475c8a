"""Choice of the default executor."""

from typing import NamedTuple

import torch

from fl_lightning.clients.task import ClientTask
from fl_lightning.execution.base import Executor
from fl_lightning.execution.compiling import custom_layer, is_custom
from fl_lightning.execution.graphs import GraphExecutor
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor


class ExecutorChoice(NamedTuple):
    """The default executor of a run, with the reason for the choice.

    Attributes:
        executor: The executor.
        reason: Reason for the choice, which is printed after the executor's name.
        plain: Whether a single process computes one client after the other on a CPU.
    """

    executor: Executor
    reason: str
    plain: bool = False


def choose_executor(task: ClientTask, num_clients: int) -> ExecutorChoice:
    """Choose the executor that is probably fastest.

    On a GPU, the choice is ``GraphExecutor``. If layers, their hooks or the loss are the user's own
    code, which may do something else in each step, the choice is ``VectorizedExecutor``. On a CPU,
    the choice is ``SequentialExecutor``. The results of all executors differ only by rounding.

    Args:
        task: The federated task, on its device.
        num_clients: Number of clients in a round.
    """
    if task.device.type == "cuda":
        if (custom := _custom_code(task)) is None:
            return ExecutorChoice(GraphExecutor(), f"each client's passes are a CUDA graph on {task.device}")
        reason = f"{num_clients} clients at once on {task.device}; no CUDA graphs of {custom}"
        return ExecutorChoice(VectorizedExecutor(where_possible=True), reason)
    threads = torch.get_num_threads()
    trainer = getattr(task.run, "_trainer", None)
    ranks = trainer.world_size if trainer is not None else 1
    reason = f"{ranks} rank{'s' * (ranks > 1)}, {threads} thread{'s' * (threads > 1)}{' each' * (ranks > 1)}"
    return ExecutorChoice(SequentialExecutor(), reason, plain=ranks == 1)


def _custom_code(task: ClientTask) -> str | None:
    """Describe code of the user's own in a client's passes. Return None if there is no such code."""
    if (name := custom_layer(task.model)) is not None:
        return f"the custom layer {name}"
    for layer in task.model.modules():
        if any(map(is_custom, (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()))):
            return f"a custom hook of a layer {type(layer).__name__}"
    if is_custom(task.loss) or is_custom(type(task).client_loss):
        return "a custom loss"
    return None
