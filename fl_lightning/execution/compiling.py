"""Use of ``torch.compile`` for the clients' forward and backward passes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal
from warnings import catch_warnings, filterwarnings

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.clients.task import ClientTask
from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.base import Compilation

_WORTH_IT = 1.5e11
"""Smallest number of values in BN layers for which compiling saves time in a run.

At about 3 ns per value, one thread processes these values in 400 s. Compiling takes 40 s.
"""

_FEWEST_STEPS = 1000
"""Smallest number of local steps for which compiling can save time in a run."""

_KNOWN = ("fl_lightning", "torch", "torchvision", "timm")
"""Packages whose layers do not change during a run. Such layers are safe to compile."""

_MOST_GRAPHS = 64
"""Largest number of compiled graphs of a model.

A model that needs more graphs probably changes in each step.
"""


def decide(
    setting: bool | Literal["auto"],
    task: ClientTask,
    client_steps: int,
    batch: Callable[[], Any],
    before: bool | None,
) -> Compilation:
    """Decide whether to compile the clients' passes.

    The decision does not depend on timings or on the number of ranks. Results are therefore
    reproducible.

    Args:
        setting: The executor's setting ``compile``.
        task: The federated task.
        client_steps: Number of local steps of all clients in the run.
        batch: Function that returns a client's first batch.
        before: Decision in the checkpoint of a resumed run; None for a new run.

    Raises:
        ConfigurationError: ``setting`` is true, and compiling fails on this machine.
    """
    if setting is False:
        return Compilation(False)
    # start autograd before the compiler, or autograd gets a GPU thread that breaks forks
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    if setting != "auto":
        choice = Compilation(setting)
    elif before is not None:
        choice = Compilation(before, "as before")
    else:
        choice = _worth_it(task, client_steps, batch)
    trouble = _trouble() if choice.compiled and task.device.type == "cpu" else None
    if trouble is None:
        return choice
    if setting != "auto":
        raise ConfigurationError(
            f"SequentialExecutor.compile: {setting} does not work here: {trouble}; install a C++ compiler (g++, with Python's "
            "headers) or set compile to auto"
        )
    return Compilation(False, trouble)


def _worth_it(task: ClientTask, client_steps: int, batch: Callable[[], Any]) -> Compilation:
    if task.device.type != "cpu":
        return Compilation(False, f"no saving of time is known on {task.device.type}")
    if client_steps < _FEWEST_STEPS:
        return Compilation(False, f"it would save no time: {client_steps:,} local steps in all")
    if custom := custom_layer(task.model):
        return Compilation(False, f"{custom} is a custom layer and may change in each step")
    values = _count(task, batch())
    if values is None:
        return Compilation(False, f"{type(task.model).__name__} depends on values in its forward pass")
    compiled = client_steps * (values.normalised - 2 * values.pooled) >= _WORTH_IT
    words = f"{client_steps:,} local steps with {values.normalised:,} values in BN layers"
    words += f", {values.pooled:,} in max pooling" if values.pooled else ""
    return Compilation(compiled, words if compiled else f"it would save no time: {words}")


def custom_layer(model: nn.Module) -> str | None:
    """Return the class of a layer that may change during a run, or None if there is no such layer."""
    return next((type(layer).__name__ for layer in model.modules() if is_custom(layer)), None)


def is_custom(part: Any) -> bool:
    """Return whether an object or function comes from none of the packages in ``_KNOWN``."""
    return str(part.__module__).partition(".")[0] not in _KNOWN


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Number of input values of BN layers and of max pooling in a forward pass.

    Compiling saves time in BN layers, but costs twice as much time per value in max pooling.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.normalised = self.pooled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "batch_norm" in func.name():
            self.normalised += args[0].numel()
        elif "max_pool" in func.name():
            self.pooled += args[0].numel()
        return func(*args, **(kwargs or {}))


def _count(task: ClientTask, batch: Any) -> _Counting | None:
    """Count the values in a forward pass with fake tensors, which have shapes but no data.

    Return None if the pass fails.
    """
    state = dict([*task.model.named_parameters(), *task.model.named_buffers()])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), _Counting() as counting:
        fake = {name: mode.from_tensor(value) for name, value in state.items()}
        try:
            with task.slots.filled(fake):
                task.client_loss(batch)
        except Exception:  # noqa: BLE001  # the first local step explains a mistake of the user
            return None
    return counting  # type: ignore[no-any-return]  # torch gives the mode no types


def _trouble() -> str | None:
    """Return the reason why compiling fails on this machine, or None if compiling works."""
    # imported here, because the import takes a second and few runs need it
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.cpp_builder import get_cpp_compiler

    AsyncCompile.pool.cache_clear()  # a fork inherits the pool, but no threads
    try:
        get_cpp_compiler()
        _try()
    except Exception as error:  # noqa: BLE001  # no compiler, no headers, or a read-only cache
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


@cache
def _try() -> None:
    torch.compile(torch.square)(torch.ones(8))


@contextmanager
def compiled_calls(compiled: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Run compiled code in all calls of some models within the ``with`` block.

    Each batch shape has a separate graph, which does not depend on the shapes of earlier batches.
    """
    # with torch's default limit, a resumed run would stop compiling at a different step
    settings = {
        "recompile_limit": _MOST_GRAPHS,
        "accumulated_recompile_limit": 1_000_000,
        "fail_on_recompile_limit_hit": True,
    }
    draws = {"fallback_random": True}  # draw the same random numbers as without compilation
    before = [model._compiled_call_impl for model, _ in compiled]
    for model, call in compiled:
        model._compiled_call_impl = call
    try:
        with torch._dynamo.config.patch(settings), torch._inductor.config.patch(draws), catch_warnings():
            # the compiler itself reads this attribute, and fails if warnings are errors
            filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise ConfigurationError(
            f"SequentialExecutor.compile: model {type(compiled[0][0]).__name__} was compiled {_MOST_GRAPHS} times, for other shapes of "
            "batches or because the model changes; set compile: false"
        ) from error
    finally:
        for (model, _), call in zip(compiled, before, strict=True):
            model._compiled_call_impl = call
