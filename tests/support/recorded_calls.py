"""Graphs without a GPU: the ATen calls of a function, recorded with their tensors and replayed without Python code."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_lightning import GraphExecutor
from fl_lightning.randomness import seed_global


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        results = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, results in self.calls:
            again = function(*args, **kwargs)
            for place, value in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)  # the memory that later calls read


class RecordedCalls:
    """Stands in for ``CudaGraphs``."""

    def __init__(self, device):
        self.device, self.recorded, self.replayed = device, 0, 0

    def record(self, passes, lane):
        self.recorded += 1
        with _Recording() as recording:
            passes()

        def replay():
            self.replayed += 1
            recording.replay()

        return replay

    @contextmanager
    def lane(self, lane):
        yield

    def join(self, lanes):
        pass

    def seed(self, seed):
        seed_global(seed, self.device)
        self.seeded = torch.default_generator.get_state()

    def has_drawn(self):
        return not torch.equal(torch.default_generator.get_state(), self.seeded)


class RecordingExecutor(GraphExecutor):
    """A ``GraphExecutor`` that records calls on a CPU."""

    recorder = RecordedCalls
    device_type = "cpu"
