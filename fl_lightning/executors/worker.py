"""A worker process: it fills its rows of a cohort that lies in shared memory, one local step at a time."""

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from fl_lightning.executors.module_state import Attributes, common_tensors

END = "end"
"""The request after which a worker ends: other processes may hold the connection open."""


@dataclass(frozen=True)
class InitMessage:
    """Everything that a worker needs before the first local step.

    Attributes:
        module: The federated module; for another process pickled together with its precision plugin.
        rows: Layout and shared blocks of parameters, gradients and buffers.
        losses: Where the losses go, shared, shape ``[C]``.
        common: What :func:`~fl_lightning.executors.module_state.common_tensors` gives, shared.
        compile: Whether the model is compiled.
        matmul_precision: As ``torch.get_float32_matmul_precision()`` gives it.
        deterministic: Whether PyTorch is to use deterministic algorithms, and whether only to warn.
    """

    module: Any
    rows: Sequence[tuple[Any, dict[str, Tensor]]]
    losses: Tensor
    common: Sequence[Tensor]
    compile: bool
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: tuple[bool, bool] = field(
        default_factory=lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
    )


@dataclass(frozen=True)
class StagedBatches:
    """Batches that lie in shared memory.

    Attributes:
        spec: The structure of a batch.
        leaves: The tensors of all batches, ``[rows, ...]``; None where they are those of the step before.
    """

    spec: TreeSpec
    leaves: list[Tensor] | None


@dataclass(frozen=True)
class StepMessage:
    """One local step.

    Attributes:
        round: The communication round.
        step: The local step, from 0.
        client_ids: All clients of the cohort.
        trained: The parameter blocks that are trained.
        attributes: What :func:`~fl_lightning.executors.module_state.attributes_of` finds, ``training`` among it; None where it is that of the step before.
        rows: The rows to fill.
        batches: One batch for each of ``rows``.
    """

    round: int
    step: int
    client_ids: list[int]
    trained: list[str]
    attributes: list[Attributes] | None
    rows: list[int]
    batches: StagedBatches | list[Any]


def serve(connection: "Connection[Any, Any]", load: InitMessage | None = None) -> None:
    """Answer requests until the other end is gone.

    Every answer is ``("done", None)``, ``("refused", text)`` for a mistake of the user's, ``("failed", (text, notes,
    traceback))``, or, to ``load``, ``("cannot fork", text)``.

    Args:
        connection: Where requests (:class:`InitMessage`, :class:`StepMessage`, or None to let go of everything) come from.
        load: The first request, of a worker that is a copy of the process at the other end.
    """
    # whoever stops a run lets it finish its round: the end of the connection is the end of a worker
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    work: _Work | None = None
    request: InitMessage | StepMessage | str | None
    while True:
        try:
            request, load = (load, None) if load is not None else (connection.recv(), None)
        except (EOFError, ConnectionError):
            return
        if isinstance(request, str):  # END
            return
        answer = _answer(request, work)
        if isinstance(answer, _Work) or request is None:
            work = answer
            answer = ("done", None)
        try:
            connection.send(answer)
        except ConnectionError:
            return


def _answer(request: InitMessage | StepMessage | None, work: "_Work | None") -> Any:
    from fl_lightning.errors import ConfigurationError

    try:
        if isinstance(request, InitMessage):
            try:
                leaf = torch.ones((), requires_grad=True)
                torch.autograd.grad(2 * leaf, leaf)
            except RuntimeError as error:  # autograd has threads that were not copied
                return "cannot fork", str(error).splitlines()[0]
            return _Work(request)
        if isinstance(request, StepMessage):
            assert work is not None
            work.step(request)
            return "done", None
    except ConfigurationError as error:
        return "refused", str(error)
    except BaseException as error:  # noqa: BLE001  # the other process raises it again
        said = f"{type(error).__name__}: {error}"
        return "failed", (said, getattr(error, "__notes__", []), traceback.format_exc())
    return None


class _Work:
    """A module and its rows in this process."""

    def __init__(self, load: InitMessage) -> None:
        import pickle

        from fl_lightning.cohort.client_rows import ClientRows
        from fl_lightning.cohort.rows import Rows
        from fl_lightning.cohort.slots import StateSlots
        from fl_lightning.executors.sequential import SequentialExecutor

        torch.set_float32_matmul_precision(load.matmul_precision)
        torch.use_deterministic_algorithms(load.deterministic[0], warn_only=load.deterministic[1])
        if isinstance(load.module, bytes):
            self.module, precision = pickle.loads(load.module)
            self.module.slots = StateSlots(self.module.model)
            stacked = {name for layout, _ in load.rows for block in layout.values() for name in block.shapes}
            for own, shared in zip(common_tensors(self.module, stacked), load.common, strict=True):
                own.data = shared
        else:
            self.module, precision = load.module, load.module.trainer.precision_plugin
        # all that there is of a trainer here: a copy of the run's own would stand still
        self.trainer = SimpleNamespace(precision_plugin=precision)
        self.module._trainer = self.trainer
        self.rows = ClientRows(*(Rows(layout, blocks) for layout, blocks in load.rows))
        self.losses = load.losses
        self.executor = SequentialExecutor(load.compile)
        self.leaves: list[Tensor] = []

    def step(self, request: StepMessage) -> None:
        from fl_lightning.client_data.cohort_batch import CohortBatch

        rows = self.rows
        rows.round, rows.step, rows.client_ids = request.round, request.step, request.client_ids
        if request.trained != rows.trained_blocks:
            rows.train_blocks(request.trained)
        self.trainer.current_epoch = self.trainer.global_step = request.round - 1
        if request.attributes is not None:
            for part, held in zip(self.module.modules(), request.attributes, strict=True):
                vars(part).update(held)
        batches = request.batches
        if isinstance(batches, StagedBatches):
            self.leaves = batches.leaves if batches.leaves is not None else self.leaves
            batches = [
                tree_unflatten([leaf[i] for leaf in self.leaves], batches.spec)
                for i in range(len(request.rows))
            ]
        losses = self.executor.backward(self.module, rows, CohortBatch(batches=batches), request.rows)
        self.losses[request.rows] = losses.to(self.losses.dtype)
