"""Clocks around the computation inside rounds; the rest of the time is the framework's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.stopwatch import Stopwatch
from fl_lightning.clients import ClientTask
from fl_lightning.datamodules.images import Images
from fl_lightning.optimizers.client import ClientOptimizer


@dataclass
class Inside:
    """Time of the computation inside rounds.

    Attributes:
        steps: Time of forward and backward passes, augmentation and the client optimizers' steps.
        once_a_round: Time of the reset of the client optimizers' state, plus time of the server
            optimizer's step. The measure "strict" counts both as the framework's own time.
    """

    steps: Stopwatch = field(default_factory=Stopwatch)
    once_a_round: Stopwatch = field(default_factory=Stopwatch)


@contextmanager
def compute_watched() -> Iterator[Inside]:
    """Time passes, augmentation and optimizer arithmetic of all rounds within a ``with`` block.

    The calls are timed inside real rounds, so caches are in their real state. The time that the
    clocks themselves take counts as the framework's own.

    If timed calls are nested, only the outermost call is timed. Therefore a client's loss counts as
    part of ``vmap``. A client optimizer's call of ``torch.optim.SGD.step`` counts as part of the
    client optimizer's step, so the clock of ``SGD.step`` measures only the server's steps.
    """
    inside = Inside()
    running = False

    def timed(function: Callable[..., Any], watch: Stopwatch = inside.steps) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            if running:
                return function(*args, **kwargs)
            running = True
            try:
                with watch:
                    return function(*args, **kwargs)
            finally:
                running = False

        return call

    def timed_vmap(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return timed(vmap(function, *args, **kwargs))

    vmap = torch.func.vmap
    with ExitStack() as patches:
        for owner, name, replacement in (
            (ClientTask, "losses", timed(ClientTask.losses)),
            (torch.func, "vmap", timed_vmap),
            (torch.autograd, "grad", timed(torch.autograd.grad)),
            (Images, "batch", timed(Images.batch)),
            (ClientOptimizer, "restart", timed(ClientOptimizer.restart, inside.once_a_round)),
            (ClientOptimizer, "step", timed(ClientOptimizer.step)),
            (torch.optim.SGD, "step", timed(torch.optim.SGD.step, inside.once_a_round)),
        ):
            patches.enter_context(patch.object(owner, name, replacement))
        yield inside
