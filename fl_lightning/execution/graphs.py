"""The executor that replays each client's passes as a CUDA graph."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torchmetrics import Metric

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.clients.task import ClientTask
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import CannotVectorize, doing
from fl_lightning.execution.base import Executor
from fl_lightning.execution.cuda_graphs import LANES, CudaGraphs, NotRecordable, cause_of
from fl_lightning.execution.sequential import SequentialExecutor
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.randomness import derive_seed

_log = logging.getLogger("fl_lightning")

_TRIALS = 2
"""Number of first uses of a graph in which its results are compared with computed results."""

_TOLERANCE = 0.01
"""Largest accepted difference between replayed and computed results, relative to their norm."""

_SCALARS = {bool, int, float, str}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}

_MOST_GRAPHS = 8
"""Largest number of graphs of a row. All graphs are dropped if there are more."""


@dataclass
class _Graph:
    replay: Callable[[], None]
    loss: Tensor
    lane: int
    draws: bool
    unused: list[str]
    logged: dict[str, Tensor]
    keep: Callable[[Sequence[int], Mapping[str, Tensor]], None]
    uses: int = 0


class _Client(NamedTuple):
    """A client that takes the local step, with its batch at a fixed place in memory."""

    row: int
    batch: Any
    key: Any


class GraphExecutor(SequentialExecutor):
    """Executor that records each client's passes once as a CUDA graph, and replays the graph.

    A local step of a small model consists of hundreds of short GPU operations. Python submits them
    more slowly than a GPU computes them. A graph submits all of them at once. The graphs of up to
    eight clients run at the same time.

    A graph repeats the same operations on the same memory. Python code of the model runs only while
    a graph is recorded. There is one graph for each client of the round, shape of the batch, and
    mode of the layers. The first two results of a graph are compared with computed results. If the
    results differ, or an operation cannot be recorded, a warning names the reason, and
    ``VectorizedExecutor`` computes the run. On a CPU, this executor equals ``SequentialExecutor``.

    Random numbers from PyTorch's generator of the GPU are the numbers of ``SequentialExecutor``.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, executor=GraphExecutor())
    """

    recorder: Callable[[torch.device], Any] = CudaGraphs
    device_type = "cuda"

    def __init__(self) -> None:
        super().__init__(compile=False)
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without graphs, because a copy records its own graphs."""
        return vars(GraphExecutor())

    def close(self) -> None:
        """Drop all graphs, and try to record graphs in the next run."""
        self._instead: Executor | None = None
        self._drop()

    def _drop(self) -> None:
        self._lanes: Any = None
        self._graphs: dict[Any, _Graph] = {}
        self._places: dict[Any, list[Tensor]] = {}
        self._blocks: list[Tensor] = []
        self._losses: Tensor | None = None
        self._room = 0

    def clients_together(self, clients: int) -> int | None:
        """Return None, because each client has a separate pass, unless graphs were not possible."""
        return self._instead.clients_together(clients) if self._instead else None

    def backward(
        self, task: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: Sequence[int]
    ) -> Tensor:
        """Compute a local step, see :meth:`~fl_lightning.execution.base.Executor.backward`."""
        if task.device.type != self.device_type:
            return super().backward(task, cohort, batch, rows)
        if self._instead is None:
            try:
                return self._replayed(task, cohort, batch, list(rows))
            except (NotRecordable, CannotVectorize, torch.OutOfMemoryError) as error:
                reason = str(error).partition("\n")[0]
            self._drop()
            torch.cuda.empty_cache()
            self._instead = VectorizedExecutor(where_possible=True)
            _log.warning("no CUDA graphs, VectorizedExecutor computes the local steps: %s", reason)
        return self._instead.backward(task, cohort, batch, rows)

    def _replayed(self, task: ClientTask, cohort: RoundCohort, batch: BatchStack, rows: list[int]) -> Tensor:
        self._use(cohort)
        clients = self._fill(cohort, batch, rows, self._conditions(task, cohort))
        # record and compare before any client takes the step: a failure must leave all rows unchanged
        for client in clients:
            if client.key not in self._graphs:
                self._graphs[client.key] = self._record(task, cohort, client)
            if self._graphs[client.key].uses < _TRIALS:
                self._compare(task, cohort, client)
        graphs = [self._graphs[client.key] for client in clients]
        for client, graph in zip(clients, graphs, strict=True):
            self._replay(task, cohort, client, graph)
        self._lanes.join(sorted({graph.lane for graph in graphs}))
        for client, graph in zip(clients, graphs, strict=True):
            graph.uses += 1
            # clone: the next replay writes to the same memory
            graph.keep([cohort.client_ids[client.row]], {n: x.clone() for n, x in graph.logged.items()})
            if graph.unused:
                cohort.skip([client.row], graph.unused)
        assert self._losses is not None
        return self._losses[cohort.index(rows)]

    def _use(self, cohort: RoundCohort) -> None:
        """Drop all graphs if there are too many, or the cohort's tensors are in other memory than before."""
        blocks = [x for rows in (cohort.params, cohort.grads, cohort.buffers) for x in rows.blocks.values()]
        moved = [x.data_ptr() for x in blocks] != [x.data_ptr() for x in self._blocks]
        if moved or len(self._graphs) > _MOST_GRAPHS * self._room:
            self._drop()
            self._blocks = blocks  # keep the old memory from being reused under the same addresses
            # a later cohort may have more clients, up to all rows of the memory
            self._room = blocks[0].untyped_storage().nbytes() // blocks[0][0].nbytes
        if self._lanes is None:
            self._lanes = self.recorder(blocks[0].device)

    def _conditions(self, task: ClientTask, cohort: RoundCohort) -> Any:
        """Return everything outside of the rows and batches that the Python code of a pass may read."""
        weights = task.loss.buffers() if isinstance(task.loss, nn.Module) else ()
        read = (value for part in _parts(task) for value in _settings(part))
        return tuple(cohort.trained_names), *read, *(weight.data_ptr() for weight in weights)

    def _fill(
        self, cohort: RoundCohort, batch: BatchStack, rows: list[int], conditions: Any
    ) -> list[_Client]:
        try:
            stacks = [(rows, batch.stack())]
        except CannotVectorize:
            pairs = zip(rows, batch.batches(), strict=True)
            stacks = [([row], BatchStack(batches=[each]).stack()) for row, each in pairs]
        clients = []
        for members, stack in stacks:
            leaves, tree = tree_flatten(stack)
            key = (tree, *((leaf.shape[1:], leaf.dtype) for leaf in leaves))
            if key not in self._places:
                self._places[key] = [leaf.new_empty(self._room, *leaf.shape[1:]) for leaf in leaves]
            for place, leaf in zip(self._places[key], leaves, strict=True):
                place[cohort.index(members)] = leaf
            for row in members:
                fixed = tree_unflatten([place[row] for place in self._places[key]], tree)
                clients.append(_Client(row, fixed, (row, key, conditions)))
        return clients

    def _record(self, task: ClientTask, cohort: RoundCohort, client: _Client) -> _Graph:
        """Compute a client's passes once, as a warm-up, and then record the passes."""
        row = client.row
        with _unchanged(cohort, client):
            self._lanes.seed(_seed(task, cohort, row))
            loss, logged = task.pass_in_slots(cohort, row, client.batch)
            keep = task.keeper()
            if (reason := task.cannot_replay()) is not None:
                raise NotRecordable(reason)
            draws, held = self._lanes.has_drawn(), _held(task)
            if self._losses is None:
                self._losses = loss.new_empty(self._room)
            places = [self._losses[row], *(x.clone() for x in logged.values())]
            # graphs that draw cannot overlap, because the generator's seed is at one place in memory
            lane = 0 if draws else row % LANES
            try:
                replay = self._lanes.record(partial(self._fixed, task, cohort, client, places), lane)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise NotRecordable(cause_of(task.model, error)) from error
            for part, name, *_ in sorted(_held(task) - held)[:1]:
                raise NotRecordable(f"the forward pass writes the attribute {name!r} of {part}")
        named = dict(zip(logged, places[1:], strict=True))
        return _Graph(replay, places[0], lane, draws, cohort.skipped(row), named, keep)

    def _fixed(self, task: ClientTask, cohort: RoundCohort, client: _Client, places: list[Tensor]) -> None:
        """Compute a client's passes, and write the loss and the logged values to fixed places."""
        loss, logged = task.pass_in_slots(cohort, client.row, client.batch)
        for place, value in zip(places, [loss, *logged.values()], strict=True):
            place.copy_(value)

    def _replay(self, task: ClientTask, cohort: RoundCohort, client: _Client, graph: _Graph) -> None:
        with self._lanes.lane(graph.lane):
            if graph.draws:
                self._lanes.seed(_seed(task, cohort, client.row))
            graph.replay()

    def _compare(self, task: ClientTask, cohort: RoundCohort, client: _Client) -> None:
        """Compare a replay with a computation, for the current batch and state."""
        graph = self._graphs[client.key]
        with _unchanged(cohort, client):
            self._lanes.seed(_seed(task, cohort, client.row))
            with doing(f"computing {task.named(cohort.client_ids[client.row])}"):
                loss, logged = task.pass_in_slots(cohort, client.row, client.batch)
            computed = [("losses", loss), *((f"{n!r}", x) for n, x in logged.items())]
            computed += [(n, x.clone()) for n, x in _results(cohort, client.row)]
        with _unchanged(cohort, client):
            self._replay(task, cohort, client, graph)
            self._lanes.join([graph.lane])
            replayed = [("losses", graph.loss.clone()), *((n, x.clone()) for n, x in graph.logged.items())]
            replayed += [(n, x.clone()) for n, x in _results(cohort, client.row)]
        norm = max(float(x.double().norm()) for name, x in computed if name == "gradients")
        for (name, first), (_, second) in zip(computed, replayed, strict=True):
            first, second = first.double(), second.double()
            same = (first == second) | (first.isnan() & second.isnan())
            off = float(torch.where(same, 0.0, first - second).norm())
            if not off <= _TOLERANCE * float(first.norm()) + 1e-4 * norm * (name == "gradients"):
                raise NotRecordable(
                    f"{name} of a replayed local step of {type(task.model).__name__} differ from computed ones"
                )


def _seed(task: ClientTask, cohort: RoundCohort, row: int) -> int:
    return derive_seed(task.seed, "model", cohort.round, cohort.client_ids[row], cohort.step)


def _parts(task: ClientTask) -> list[Any]:
    """Return the loss, and the layers without metric objects, which a pass resets."""
    layers = [layer for layer in task.model.modules() if not isinstance(layer, Metric)]
    return [*layers, task.loss, getattr(task.loss, "__self__", None)]


def _settings(part: Any) -> Iterator[Any]:
    """Yield a layer's or loss's type, its hooks, its public settings, and the addresses of tensors."""
    yield id(part) if inspect.isroutine(part) else type(part)
    for name, value in getattr(part, "__dict__", {}).items():
        if name in _HOOKS:
            yield from map(id, value.values())
        elif type(value) in _SCALARS and not name.startswith("_"):
            yield value
        elif type(value) in (tuple, list) and not name.startswith("_"):
            yield _plain(value)
        elif isinstance(value, Tensor) and value.grad_fn is None:  # with grad_fn, a pass has made it
            yield value.data_ptr()


def _plain(value: Any) -> Any:
    if type(value) in (tuple, list):
        return tuple(map(_plain, value))
    # the identity of a tensor: the CPU would wait for its values
    return value if type(value) in _SCALARS else id(value)


def _held(task: ClientTask) -> set[tuple[Any, ...]]:
    """Return what attributes hold, except for tensors that a pass makes, which a replay makes as well."""
    return {
        (type(part).__name__, name, id(part), *map(_plain, tree_leaves(value)))
        for part in [*task.written_by_steps, *_parts(task)]
        for name, value in getattr(part, "__dict__", {}).items()
        if not isinstance(value, Tensor) or value.grad_fn is None
    }


def _results(cohort: RoundCohort, row: int) -> Iterator[tuple[str, Tensor]]:
    for name, rows in {
        "gradients": cohort.grads,
        "buffers": cohort.buffers,
        "parameters": cohort.params,
    }.items():
        yield from ((name, block[row]) for block in rows.blocks.values())


@contextmanager
def _unchanged(cohort: RoundCohort, client: _Client) -> Iterator[None]:
    state = [x for name, x in _results(cohort, client.row) if name != "gradients"]
    saved = [(x, x.clone()) for x in (*state, *tree_leaves(client.batch))]
    try:
        yield
    finally:
        for place, value in saved:
            place.copy_(value)
