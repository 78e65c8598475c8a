"""A process of :class:`benchmarks.compute.Compute`: forward and backward passes on one thread."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.recipe import BATCH_SIZE, make_model


class Passes:
    """Forward and backward passes of a model on one prepared batch.

    Args:
        model_name: A name of ``recipe.MODELS``.

    Attributes:
        gradients: Gradients of all parameters from the last pass.
    """

    def __init__(self, model_name: str) -> None:
        self.model = make_model(model_name).train()
        self.parameters = list(self.model.parameters())
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(BATCH_SIZE, 3, 32, 32, generator=generator)
        self.images = images.to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (BATCH_SIZE,), generator=generator)
        self.gradients: tuple[Tensor, ...] = ()

    def loss(self) -> Tensor:
        """Return the model's loss on the batch."""
        return F.cross_entropy(self.model(self.images), self.labels)

    def run(self, times: int) -> None:
        """Compute the loss and the gradients of all parameters ``times`` times."""
        for _ in range(times):
            self.gradients = torch.autograd.grad(self.loss(), self.parameters)


class CompiledPasses(Passes):
    """Passes with a compiled model and loss; the first pass compiles."""

    def __init__(self, model_name: str) -> None:
        super().__init__(model_name)
        self.loss = torch.compile(self.loss, dynamic=False)  # type: ignore[method-assign]  # the same, compiled


@dataclass
class Convolution:
    """A convolution layer with the input and the output gradient of one pass.

    Attributes:
        layer: The layer.
        inputs: The layer's input.
        gradients: Gradient of the loss with respect to the layer's output.
        reaches_images: Whether the input is the batch of images. Its gradient is then not computed.
    """

    layer: nn.Conv2d
    inputs: Tensor
    gradients: Tensor
    reaches_images: bool

    def forward(self) -> Tensor:
        """Return the layer's output."""
        layer = self.layer
        padding: Any = layer.padding
        return F.conv2d(
            self.inputs, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups
        )

    def backward(self) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return the gradients with respect to input, weight and bias.

        The first is None if the input is the batch of images, the last if the layer has no bias.
        """
        layer = self.layer
        found: tuple[Tensor | None, Tensor, Tensor | None] = torch.ops.aten.convolution_backward(
            self.gradients,
            self.inputs,
            layer.weight,
            None if layer.bias is None else list(layer.bias.shape),
            layer.stride,
            layer.padding,
            layer.dilation,
            False,
            [0] * len(layer.stride),
            layer.groups,
            [not self.reaches_images, True, layer.bias is not None],
        )
        return found


class Convolutions:
    """The convolutions of :class:`Passes` alone, forward and backward.

    The inputs and gradients come from one pass of the whole model, which is run in advance.

    Args:
        model_name: A name of ``recipe.MODELS``.

    Attributes:
        parts: The convolutions in the order of the forward pass.
        gradients: Gradients of the weights in the same order, from the last pass.
    """

    def __init__(self, model_name: str) -> None:
        passes = Passes(model_name)
        self.parts: list[Convolution] = []
        layers = [layer for layer in passes.model.modules() if isinstance(layer, nn.Conv2d)]
        handles = [layer.register_forward_hook(self._watch) for layer in layers]
        passes.run(1)
        for handle in handles:
            handle.remove()
        self.gradients: list[Tensor] = []

    def _watch(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        part = Convolution(layer, inputs[0].detach(), output, not inputs[0].requires_grad)
        self.parts.append(part)
        output.register_hook(  # type: ignore[no-untyped-call]  # torch gives it no types
            lambda gradient: setattr(part, "gradients", gradient)
        )

    @torch.no_grad()
    def run(self, times: int) -> None:
        """Compute all convolutions and, in reverse order, their gradients, ``times`` times."""
        for _ in range(times):
            for part in self.parts:
                part.forward()
            self.gradients = [part.backward()[1] for part in reversed(self.parts)][::-1]


KINDS: dict[str, type[Passes] | type[Convolutions]] = {
    "compute": Passes,
    "convolutions": Convolutions,
    "compute_compiled": CompiledPasses,
}
"""Kinds of passes that a process can run."""


def _serve(kind: str, model_name: str) -> None:
    """Run passes on request: each line of the standard input is a number of passes."""
    torch.set_num_threads(1)
    passes = KINDS[kind](model_name)
    passes.run(2)  # warm-up: the first passes allocate memory and may compile
    print("ready", flush=True)
    for line in sys.stdin:
        passes.run(int(line))
        print("done", flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
