"""Clocks around the compute inside running rounds: what is left of a round's time is the framework's own."""

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
        steps: Forward and backward passes, augmentation and the steps of the client optimizers.
        once_a_round: The rest of the optimizer arithmetic: the reset of the client optimizers' state and the server
            optimizer's step, which a strict reader counts as the framework's own.
    """

    steps: Stopwatch = field(default_factory=Stopwatch)
    once_a_round: Stopwatch = field(default_factory=Stopwatch)


@contextmanager
def compute_watched() -> Iterator[Inside]:
    """Time forward and backward passes, augmentation and optimizer arithmetic of all rounds until the block ends.

    They are timed where they happen, with the caches as the round leaves them; the clocks themselves count as the
    framework's. Of calls within each other only the outermost counts: under ``vmap`` a client's loss is part of it, and
    what a client optimizer has ``torch.optim.SGD`` do is a step of its own, so that the server's is what is left.
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
