"""A process of :class:`benchmarks.compute.Compute`: forward and backward passes on one thread, as many as it is told."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.recipe import BATCH_SIZE, make_model


class Passes:
    """Forward and backward passes of a model on one batch that lies ready.

    Args:
        model_name: A name of ``recipe.MODELS``.

    Attributes:
        gradients: Those of the last pass.
    """

    def __init__(self, model_name: str) -> None:
        self.model = make_model(model_name).train()
        self.parameters = list(self.model.parameters())
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(BATCH_SIZE, 3, 32, 32, generator=generator)
        self.images = images.to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (BATCH_SIZE,), generator=generator)
        self.gradients: tuple[Tensor, ...] = ()

    def run(self, times: int) -> None:
        """Compute the loss and the gradients of all parameters again and again."""
        for _ in range(times):
            loss = F.cross_entropy(self.model(self.images), self.labels)
            self.gradients = torch.autograd.grad(loss, self.parameters)


def _serve(model_name: str) -> None:
    """Run as many passes as each line of the input says, until it ends."""
    torch.set_num_threads(1)
    passes = Passes(model_name)
    passes.run(2)  # the first ones prepare what later ones find ready
    print("ready", flush=True)
    for line in sys.stdin:
        passes.run(int(line))
        print("done", flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
