"""Whether the passes of a run's clients are compiled (``torch.compile``), and that they can be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.base import ClientTask, Compilation

_WORTH_IT = 1.5e11
"""Values that pass BN layers in a run. Compiled, each takes about 3 ns less on one thread: ten times the 40 s of compiling."""

_FEWEST_STEPS = 1000
"""Local steps of a run below which the values in one of them are not even counted."""

_KNOWN = ("fl_lightning", "torch", "torchvision", "timm")
"""Packages whose layers compute in each step what they did in the one before."""

_MOST_GRAPHS = 64
"""Shapes and modes for which a model is compiled before it is taken for one that changes in each step."""


def decide(
    setting: bool | Literal["auto"],
    module: ClientTask,
    client_steps: int,
    batch: Callable[[], Any],
    before: bool | None,
) -> Compilation:
    """Whether passes are compiled: a function of the plan and the machine's compiler, never of clocks.

    It does not ask how many processes share the work, so that their number changes no number.

    Args:
        setting: What the user wants.
        module: The federated module, with its slots.
        client_steps: Local steps of all clients in the whole run.
        batch: Gives a client's first batch.
        before: What the run has done up to its checkpoint, None for a run from the start.

    Raises:
        ConfigurationError: It is wanted and does not work here.
    """
    if setting is False:
        return Compilation(False)
    # Autograd starts its threads at its first use: if that is after the compiler has named a GPU, there or not, one of them is
    # for it, and no copy of this process (fork) could compute gradients.
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    if setting == "auto":
        found = _worth_it(module, client_steps, batch) if before is None else Compilation(before, "as before")
    else:
        found = Compilation(setting)
    trouble = _trouble() if found.compiled and module.device.type == "cpu" else None
    if trouble is None:
        return found
    if setting != "auto":
        raise ConfigurationError(
            f"SequentialExecutor.compile: {setting} does not work here: {trouble}; install a C++ compiler (g++, with Python's "
            "headers) or set compile to auto"
        )
    return Compilation(False, trouble)


def _worth_it(module: ClientTask, client_steps: int, batch: Callable[[], Any]) -> Compilation:
    if module.device.type != "cpu":
        return Compilation(False, f"never measured on {module.device.type}")
    if client_steps < _FEWEST_STEPS:
        return Compilation(False, f"it would not pay: {client_steps:,} local steps in all")
    kinds = [type(layer) for layer in module.model.modules()]
    own = next((kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] not in _KNOWN), None)
    if own is not None:
        return Compilation(False, f"{own} is your own and may change in each step")
    values = _count(module, batch())
    if values is None:
        return Compilation(False, f"{type(module.model).__name__} asks for numbers on its way")
    compiled = client_steps * (values.normalised - 2 * values.pooled) >= _WORTH_IT
    words = f"{client_steps:,} local steps with {values.normalised:,} values in BN layers"
    words += f", {values.pooled:,} in max pooling" if values.pooled else ""
    return Compilation(compiled, words if compiled else f"it would not pay: {words}")


class _Values(NamedTuple):
    """Values that pass BN layers and max pooling in a forward pass. Compiled, BN is faster and max pooling slower, twice as much."""

    normalised: int
    pooled: int


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.normalised = self.pooled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "batch_norm" in func.name():
            self.normalised += args[0].numel()
        elif "max_pool" in func.name():
            self.pooled += args[0].numel()
        return func(*args, **(kwargs or {}))


def _count(module: ClientTask, batch: Any) -> _Values | None:
    """Count in a forward pass of tensors without numbers; None where the model cannot run without."""
    state = dict([*module.model.named_parameters(), *module.model.named_buffers()])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), _Counting() as counting:
        fake = {name: mode.from_tensor(value) for name, value in state.items()}
        try:
            with module.slots.filled(fake):
                module.client_loss(batch)
        except Exception:  # noqa: BLE001  # a mistake of the user's is explained in the first step
            return None
    return _Values(counting.normalised, counting.pooled)


def _trouble() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    # takes a second, and few runs need it
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.cpp_builder import get_cpp_compiler

    AsyncCompile.pool.cache_clear()  # a rank may be a copy of a process that has compiled: a pool without its threads
    try:
        get_cpp_compiler()
        _try()
    except Exception as error:  # noqa: BLE001  # no compiler, one without headers, a cache that cannot be written
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


@cache
def _try() -> None:
    """Compile something small; what that prepares is kept for the model."""
    torch.compile(torch.square)(torch.ones(8))


@contextmanager
def compiled_calls(model: torch.nn.Module, compiled: Callable[..., Any]) -> Iterator[None]:
    """Let calls of the model run compiled code, one for each shape: which one does not depend on those met before.

    Raises:
        ConfigurationError: The model changes in each step.
    """
    # beyond its usual limit torch goes on without compiling, at another place in a resumed run
    settings = {
        "recompile_limit": _MOST_GRAPHS,
        "accumulated_recompile_limit": 1_000_000,
        "fail_on_recompile_limit_hit": True,
    }
    eager_draws = {"fallback_random": True}  # a model's own random numbers are those that it draws otherwise
    before = model._compiled_call_impl
    model._compiled_call_impl = compiled
    try:
        with torch._dynamo.config.patch(settings), torch._inductor.config.patch(eager_draws):
            yield
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise ConfigurationError(
            f"SequentialExecutor.compile: model {type(model).__name__} was compiled {_MOST_GRAPHS} times, for batches of other "
            "shapes or because something of it changes; set compile: false"
        ) from error
    finally:
        model._compiled_call_impl = before
