"""Recording of CUDA graphs on several streams."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from fl_lightning.randomness import seed_global

LANES = 8
"""Number of streams. On an H200, more than eight save no time."""

_TORCH = str(Path(torch.__file__).parent)


class NotRecordable(Exception):
    """The reason why a client's passes cannot be replayed."""


class CudaGraphs:
    """Recorder of CUDA graphs. Graphs in different lanes (streams) run at the same time.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(LANES)]  # type: ignore[no-untyped-call]  # torch gives it no types
        # graphs that run at the same time cannot share memory
        self._pools = [torch.cuda.graph_pool_handle() for _ in self._streams]
        self._device = device
        self._generator = torch.cuda.default_generators[device.index or 0]

    def record(self, passes: Callable[[], None], lane: int) -> Callable[[], None]:
        """Record the GPU operations of a function, and return a function that replays them."""
        graph = torch.cuda.CUDAGraph()
        stream, pool = self._streams[lane], self._pools[lane]
        try:
            # thread_local: threads of data loaders may use the GPU meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                passes()
        except RuntimeError:
            # after a failure, PyTorch's generator still expects to be recorded, and could draw no number
            self._generator.graphsafe_set_state(torch.Generator(self._device).graphsafe_get_state())
            raise
        return graph.replay

    @contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        """Run the GPU operations of the ``with`` block in a lane, after all earlier operations."""
        self._streams[lane].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._streams[lane]):
            yield

    def join(self, lanes: Sequence[int]) -> None:
        """Let later GPU operations wait for the operations in some lanes."""
        for lane in lanes:
            torch.cuda.current_stream().wait_stream(self._streams[lane])

    def seed(self, seed: int) -> None:
        """Seed PyTorch's generators of the CPU and the GPU."""
        seed_global(seed, self._device)
        self._seeded = torch.default_generator.get_state()

    def has_drawn(self) -> bool:
        """Return whether random numbers of the GPU were drawn since :meth:`seed`."""
        if not torch.equal(torch.default_generator.get_state(), self._seeded):
            raise NotRecordable(
                "the forward pass draws random numbers of the CPU; draw them on the inputs' device"
            )
        return self._generator.get_offset() > 0


def cause_of(model: nn.Module, error: BaseException) -> str:
    """Describe why recording has failed: the line of code, and PyTorch's reason."""
    # find the first error: leaving the recording raises another one
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    place = [x for x in frames if not x.filename.startswith(_TORCH)][-1]
    return f"{type(model).__name__}: {place.line} ({Path(place.filename).name}, line {place.lineno}): {str(error).splitlines()[0]}"
