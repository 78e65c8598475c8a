"""Graphs without a GPU: the ATen calls of a function, recorded with their tensors and replayed without Python code."""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_lightning import GraphExecutor
from fl_lightning.randomness import seed_global

_aten = torch.ops.aten
_NOT_PERMITTED = "operation not permitted when stream is capturing"
_WAITS = {
    _aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim,
    _aten.unique_consecutive, _aten.bincount, _aten.equal, _aten.repeat_interleave,
}  # fmt: skip
_TO_CPU = {"cpu", "numpy", "tolist", "__repr__", "__format__", "__array__"}
_TO_GPU = {"to", "cuda", "type_as"}
_DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli"}
_MAKES = {"tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "linspace", "eye"}


class OfGPU(TorchFunctionMode):
    """Takes tensors for tensors of a GPU, except what is made without a device."""

    def __init__(self):
        super().__init__()
        self.on_cpu = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_cpu = [x for x in tensors if any(x is y for y in self.on_cpu)]
        without_device = not tensors and kwargs.get("device") is None
        on_gpu = len(on_cpu) < len(tensors)
        copies = (name in _TO_GPU and on_cpu) or (name in _TO_CPU and on_gpu)
        if copies or (name in _DRAWS and without_device):
            raise RuntimeError(_NOT_PERMITTED)
        if on_gpu and any(x.dim() for x in on_cpu):
            raise RuntimeError("Expected all tensors to be on the same device")
        result = function(*args, **kwargs)
        if not on_gpu and (tensors or (name in _MAKES and without_device)):
            self.on_cpu.append(result)
        return result


class _Recording(TorchDispatchMode):
    """Records ATen calls. What a GPU cannot record fails as on a GPU."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        chosen = function.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_) and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if function.overloadpacket in _WAITS or chosen:
            raise RuntimeError(_NOT_PERMITTED)
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
        with _Recording() as recording, OfGPU():
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
    recorded = 0

    def _record(self, *args):
        self.recorded += 1
        return super()._record(*args)
