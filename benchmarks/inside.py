"""Clocks around the compute inside rounds; the rest of the time is the framework's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.stopwatch import Stopwatch
from fl_lightning.datamodules.images import TrainImages
from fl_lightning.execution import sequential, vectorized
from fl_lightning.execution.base import client_losses
from fl_lightning.optimizers.client import ClientOptimizer


@dataclass
class Inside:
    """Time of the compute inside rounds.

    Attributes:
        steps: Time of forward and backward passes, augmentation and the steps of the client
            optimizers.
        once_a_round: Time of the reset of the client optimizers' state and of the server
            optimizer's step; in a strict reading both belong to the framework's own time.
    """

    steps: Stopwatch = field(default_factory=Stopwatch)
    once_a_round: Stopwatch = field(default_factory=Stopwatch)


@contextmanager
def compute_watched() -> Iterator[Inside]:
    """Time forward and backward passes, augmentation and optimizer arithmetic of all rounds until the block ends.

    The calls are timed inside the rounds, so caches are in their real state; the time of the clocks
    themselves belongs to the framework. Of nested calls only the outermost is timed: a client's
    loss is part of ``vmap``, and a client optimizer's call of ``torch.optim.SGD.step`` is part of
    its own step, so only the server's ``SGD.step`` remains.
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
            (sequential, "client_losses", timed(client_losses)),
            (vectorized, "client_losses", timed(client_losses)),
            (torch.func, "vmap", timed_vmap),
            (torch.autograd, "grad", timed(torch.autograd.grad)),
            (TrainImages, "batch", timed(TrainImages.batch)),
            (ClientOptimizer, "restart", timed(ClientOptimizer.restart, inside.once_a_round)),
            (ClientOptimizer, "step", timed(ClientOptimizer.step)),
            (torch.optim.SGD, "step", timed(torch.optim.SGD.step, inside.once_a_round)),
        ):
            patches.enter_context(patch.object(owner, name, replacement))
        yield inside
