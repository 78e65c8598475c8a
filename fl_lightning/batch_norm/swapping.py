"""Other forward passes for BN layers, swapped by type: the only way in which a method changes one; and other modes for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.batch_norm.layers import batch_norm_layers, require_batch_norm
from fl_lightning.errors import ConfigurationError


class SwappedBatchNorm(_BatchNorm):
    """A BN layer whose forward pass belongs to a method: the base of the mixins of :func:`swap_batch_norm`.

    Attributes:
        method: Name of the method's callback.
        scratch: Names of what the mixin adds in :meth:`prepare`: attributes, or non-persistent buffers, which start each
            round as the server's, are stacked like any buffer, and are never sent or saved.
        original: The class that the layer came with.
    """

    method: ClassVar[str]
    scratch: ClassVar[tuple[str, ...]] = ()
    original: ClassVar[type[_BatchNorm]]

    def prepare(self) -> None:
        """Set the attributes of ``scratch``; here as non-persistent buffers ``[channels]`` of zeros."""
        assert self.running_mean is not None
        for name in self.scratch:
            self.register_buffer(name, torch.zeros_like(self.running_mean), persistent=False)


def swap_batch_norm(
    model: nn.Module, forward: type[SwappedBatchNorm], *, momentum: bool = False
) -> list[Any]:
    """Give every BN layer of a model another forward pass, by type and in place; parameters and buffers stay.

    Args:
        model: The model.
        forward: A mixin with the ``forward`` of the method.
        momentum: Whether the method averages with the layers' momentum.

    Returns:
        The layers, which are now instances of ``forward`` and of the class that they had.

    Raises:
        ConfigurationError: The model has no BN layer, one without running statistics or momentum, or one that another
            method has already swapped.
    """
    layers = require_batch_norm(model, forward.method, momentum=momentum)
    for name, layer in layers.items():
        if not isinstance(layer, forward):
            kind = type(layer)
            if isinstance(layer, SwappedBatchNorm):
                raise ConfigurationError(
                    f"callbacks {layer.method} and {forward.method} cannot be combined: both change the forward pass of BN "
                    "layers"
                )
            if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise ConfigurationError(
                    f"{forward.method}: BN layer {name!r} is a {kind.__name__} with a forward pass of its own, which this method "
                    "would replace; use torch's BatchNorm layers and put what comes after them in a module of its own"
                )
            layer.__class__ = type(f"{forward.__name__}{kind.__name__}", (forward, kind), {"original": kind})
        layer.prepare()  # type: ignore[operator]  # a method of the mixin
    return list(layers.values())


def restore_batch_norm(model: nn.Module) -> None:
    """Undo :func:`swap_batch_norm`: the layers get back the class and the buffers that they came with."""
    for layer in batch_norm_layers(model).values():
        if isinstance(layer, SwappedBatchNorm):
            for name in layer.scratch:
                delattr(layer, name)
            layer.__class__ = layer.original  # type: ignore[assignment]  # the class that it came with


@contextmanager
def batch_statistics(layers: Sequence[_BatchNorm]) -> Iterator[None]:
    """Let BN layers normalise with the statistics of their input, whatever forward pass a method has given them."""
    before = [(layer.__class__, layer.training, layer.track_running_stats) for layer in layers]
    try:
        for layer in layers:
            if isinstance(layer, SwappedBatchNorm):
                layer.__class__ = layer.original  # type: ignore[assignment]  # the class that it came with
            layer.training, layer.track_running_stats = True, False
        yield
    finally:
        for layer, (kind, training, tracking) in zip(layers, before, strict=True):
            layer.__class__ = kind
            layer.training, layer.track_running_stats = training, tracking


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode; afterwards every module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training
