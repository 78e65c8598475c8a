"""A local step's forward and backward pass as a CUDA graph: captured once, then replayed with one launch.

A replayed graph reads and writes the same memory each time and runs no Python. So its batch is copied to where the
captured one lay, a cohort's rows stay where they are from round to round, and what Python decides (which rows, which
parameters are trained, numbers that layers hold, such as momentum) is part of what a capture is found by.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from fl_lightning.cohort.client_rows import ClientRows
from fl_lightning.errors import ConfigurationError
from fl_lightning.executors.base import ClientTask
from fl_lightning.executors.module_state import ModuleState, ModuleStateReader

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records a computation: gives what computes it again, and its result, which lies where it is each time."""

_MOST = 16  # captured steps at a time: each has memory of its own
_WARM_UP = 3  # libraries choose their algorithms and take their memory in the first runs


def capture_cuda_graph(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record a computation on the current CUDA device; it runs a few times before that.

    Args:
        compute: Computes on the current stream, without waiting for the device.

    Raises:
        ConfigurationError: It does what a graph cannot hold, such as reading a number from the device.
    """
    own = torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch gives it no types
    stream.wait_stream(own)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            compute()
    own.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            found = compute()
    except RuntimeError as error:
        first: BaseException = error
        while first.__context__ is not None:  # the end of a capture that has failed fails as well
            first = first.__context__
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        raise ConfigurationError(
            f"VectorizedExecutor.cuda_graph: true, but a local step cannot be captured ({str(first).splitlines()[0]}); the "
            "model and the loss must not read numbers from the GPU; set cuda_graph: false"
        ) from first
    return graph.replay, found


class StepGraph:
    """A captured step of some clients.

    Args:
        compute: Their losses from a batch, shape ``[n]``; it also writes to ``written``.
        batch: A batch; later ones have its shapes.
        written: What ``compute`` writes to. Recording leaves it as it is, even where it fails.
        capture: How to capture.

    Attributes:
        kept: What else the captured operations read: it lives as long as they do.
    """

    kept: Sequence[Tensor] = ()

    def __init__(
        self, compute: Callable[[Any], Tensor], batch: Any, written: Sequence[Tensor], capture: Capture
    ) -> None:
        self.batch = tree_map(torch.clone, batch)
        before = [tensor.clone() for tensor in written]
        try:
            self.replay, self.losses = capture(lambda: compute(self.batch))
        finally:
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)

    def run(self, batch: Any) -> Tensor:
        """The losses of a batch."""
        for own, new in zip(tree_flatten(self.batch)[0], tree_flatten(batch)[0], strict=True):
            own.copy_(new, non_blocking=True)
        self.replay()
        return self.losses.clone()


class StepGraphs:
    """The captured steps of a cohort.

    Args:
        capture: How to capture a step.
    """

    def __init__(self, capture: Capture = capture_cuda_graph) -> None:
        self.capture = capture
        self._cohort: ClientRows | None = None
        self._state_reader = ModuleStateReader()
        self._state: ModuleState | None = None
        self._graphs: list[tuple[Any, StepGraph]] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy captures for itself."""
        return vars(StepGraphs(self.capture))

    def run(
        self,
        module: ClientTask,
        cohort: ClientRows,
        rows: list[int],
        batch: Any,
        compute: Callable[[Any], Tensor],
    ) -> Tensor:
        """The losses of some rows, from a captured step where there is one for such rows and batches.

        Args:
            module: The federated module.
            cohort: The cohort, whose gradients and buffers ``compute`` writes.
            rows: The rows.
            batch: Their batches, stacked.
            compute: Their losses from a batch, shape ``[len(rows)]``.
        """
        state = self._state_reader.read(module)
        if self._cohort is not cohort or not state.has_objects_of(self._state):
            self._graphs = []
            self._cohort, self._state = cohort, state
        leaves, spec = tree_flatten(batch)
        shapes = [(leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves]
        device = module.device.type
        casts = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = (rows, spec, shapes, cohort.trained_blocks, casts, state.attributes)
        for known, graph in self._graphs:
            if known == key:
                return graph.run(batch)
        written = [*cohort.grads.blocks.values(), *cohort.buffers.blocks.values()]
        graph = StepGraph(compute, batch, written, self.capture)
        graph.kept = [*cohort.indices(), *cohort.params.orders(), *cohort.buffers.orders()]
        self._graphs = [*self._graphs[1 - _MOST :], (key, graph)]
        self._state = self._state_reader.read(module)  # a model may have kept something of its forward pass
        return graph.run(batch)

    def clear(self) -> None:
        """Let go of all of them, and of their memory."""
        self._cohort, self._state, self._graphs = None, None, []
        self._state_reader = ModuleStateReader()
