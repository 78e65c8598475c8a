"""A CUDA device without a GPU: its tensors have shapes, types and a device, and no numbers.

Operations that mix devices fail as they would on a GPU, and whatever the CPU would wait for is seen. What is computed is
not, and backward passes are not run: that needs a GPU (``test_gpu.py``).
"""

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin as KnowsItsDevice
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loops import evaluation_loop, fit_loop
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torchmetrics import Metric

from fl_lightning import GraphExecutor
from fl_lightning.execution import graphs

CUDA = torch.device("cuda:0")
# torch counts devices when it computes its first gradient: after a fake one it would start a thread for it, and nothing
# could fork from then on
_one = torch.ones((), requires_grad=True)
torch.autograd.grad(2 * _one, _one)
FREE = 10**12  # bytes of its memory
ROOT = f"{Path(__file__).parents[2]}/"

_aten = torch.ops.aten
_READ, _PIN, _COPY_TO, _COPY = (
    each.default for each in (_aten._local_scalar_dense, _aten._pin_memory, _aten._to_copy, _aten.copy_)
)
_INDEX = _aten.index.Tensor
_DEVICE = torch.ops.prim.device.default


class FakeGPU(TorchDispatchMode):
    """Operations on the CPU are real, on the GPU they are not, and what comes back from there is 2 or True.

    Attributes:
        waits: Lines of the project's code, as ``"module.py:12"``, at which the CPU would have waited for the GPU.
    """

    def __init__(self):
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits = []

    def __enter__(self):
        self._fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is _DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        places = {_device(tensor).type for tensor in _tensors((*args, *kwargs.values()))}
        if asked:
            places.add(torch.device(asked).type)
        if "cuda" not in places:
            with unset_fake_temporarily():
                return args[0].clone() if function is _PIN else function(*args, **kwargs)
        if function is _READ:
            self.waits.append(_line())
            return True if args[0].dtype == torch.bool else 2
        if function is _INDEX and [each.dtype for each in args[1] if each is not None] == [torch.bool]:
            self.waits.append(_line())
            return args[0].flatten(0, args[1][0].ndim - 1)  # as if all were chosen
        if function in (_COPY_TO, _COPY) and "cpu" in places:
            if not (kwargs.get("non_blocking") or args[2:] == (True,)):
                self.waits.append(_line())
            if function is _COPY_TO and torch.device(asked).type == "cpu":
                with unset_fake_temporarily():
                    return torch.full(args[0].shape, 2, dtype=kwargs.get("dtype") or args[0].dtype)
            if function is _COPY and args[0].device.type == "cpu":
                with unset_fake_temporarily():
                    return args[0].fill_(2)
        return function(*args, **kwargs)


def _tensors(values):
    """The tensors among the arguments of an operation and in their lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _device(tensor):
    """``tensor.device``, which is an operation of its own where the tensor is not real."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _line():
    """Where the project's own code is at."""
    frame = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and not file.startswith(f"{ROOT}tests/"):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class _Accelerator(CPUAccelerator):
    def setup_device(self, device):
        pass

    def teardown(self):
        pass


class _Strategy(SingleDeviceStrategy):
    """Moves the module to the device that is not there."""

    def __init__(self):
        super().__init__(device=CUDA, accelerator=_Accelerator())

    def model_to_device(self):
        move(self.model)

    def teardown(self):
        pass


def move(module):
    """Move a module to the GPU, as ``module.cuda()`` would."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(value.detach().to(CUDA), value.requires_grad)
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = value.to(CUDA)
        if isinstance(part, KnowsItsDevice):
            part._device = CUDA
        if isinstance(part, Metric):
            part.to(CUDA)


class _PlainCalls:
    """Stands in for ``CudaGraphs``: a replay calls the function again."""

    def __init__(self, device):
        pass

    def record(self, passes, lane):
        return passes

    @contextmanager
    def lane(self, lane):
        yield

    def join(self, lanes):
        pass

    def seed(self, seed):
        pass

    def has_drawn(self):
        return False


class _Generator:
    def manual_seed(self, seed):
        pass


def _no_gradients(outputs, inputs, *args, **kwargs):
    return tuple(torch.empty_like(each) for each in inputs)


def _outside(function):
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@contextmanager
def fake_gpu():
    """A :class:`FakeGPU` that torch and Lightning take for a device."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(
            torch.cuda, "is_available", lambda: False
        )  # every fake tensor asks, and looks for the driver
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (FREE, 10**12))
        patch.setattr(torch.cuda, "default_generators", [_Generator()])
        patch.setattr(torch.autograd, "grad", _no_gradients)  # its engine looks for the device itself
        patch.setattr(torch, "load", _outside(torch.load))
        patch.setattr(GraphExecutor, "recorder", _PlainCalls)
        patch.setattr(graphs, "_TRIALS", 0)  # nothing to compare
        for loop in (fit_loop, evaluation_loop):  # it would read the lengths from the GPU
            patch.setattr(loop, "has_len_all_ranks", lambda *args, **kwargs: True)
        yield stack.enter_context(FakeGPU())


def fit(module, data, rounds, callbacks=(), ckpt_path=None, **settings):
    """Train on the GPU that is not there.

    Returns:
        Where the CPU would have waited for it.
    """
    with fake_gpu() as gpu:
        trainer = L.Trainer(
            max_epochs=rounds,
            strategy=_Strategy(),
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **settings,
        )
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return gpu.waits
