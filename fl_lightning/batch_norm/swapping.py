"""Replacement of BN layers' forward passes, and temporary modes of a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.batch_norm.layers import batch_norm_layers, require_batch_norm
from fl_lightning.errors import ConfigurationError


class SwappedBatchNorm(_BatchNorm):
    """Base class of BN layers with the forward pass of a method. See :func:`swap_batch_norm`.

    Attributes:
        method: Name of the method's callback.
        scratch: Names of attributes or non-persistent buffers that :meth:`prepare` adds. At the
            start of a round, each client gets a copy of the server's buffers. The copies are never
            sent or saved.
        linear: Whether training moves running statistics linearly, with the layer's momentum.
        original: Class of the layer before the swap.

    Example:
        >>> class HalvedNorm(SwappedBatchNorm):
        ...     method = "Halved"
        ...
        ...     def forward(self, inputs):
        ...         return super().forward(inputs) / 2
        >>> model = nn.Sequential(nn.BatchNorm1d(3))
        >>> layers = swap_batch_norm(model, HalvedNorm)
        >>> isinstance(model[0], HalvedNorm)
        True
    """

    method: ClassVar[str]
    scratch: ClassVar[tuple[str, ...]] = ()
    linear: ClassVar[bool] = True
    original: ClassVar[type[_BatchNorm]]

    def prepare(self) -> None:
        """Add the attributes or buffers that are named in ``scratch``.

        The base class adds buffers ``[channels]`` of zeros.
        """
        assert self.running_mean is not None
        for name in self.scratch:
            self.register_buffer(name, torch.zeros_like(self.running_mean), persistent=False)

    def values(self, inputs: Tensor) -> Tensor:
        """Return inputs ``[b, channels, ...]`` as values ``[channels, n]``. Refuse a single value.

        Raises:
            ValueError: n is 1, as in PyTorch's BN.
        """
        values = inputs.transpose(0, 1).flatten(1).to(self.get_buffer("running_mean").dtype)
        if values.shape[1] == 1:
            raise ValueError("expected more than 1 value per channel")
        return values

    def scaled(self, inputs: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Return ``gamma (inputs * scale + shift) + beta``.

        Args:
            inputs: Inputs ``[b, channels, ...]``.
            scale: Factor of each channel, ``[channels]``.
            shift: Term of each channel, ``[channels]``.
        """
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        shape = (-1, *(1,) * (inputs.dim() - 2))
        return inputs * scale.to(inputs.dtype).view(shape) + shift.to(inputs.dtype).view(shape)


def swap_batch_norm(
    model: nn.Module, forward: type[SwappedBatchNorm], *, momentum: bool = False, **settings: Any
) -> list[Any]:
    """Replace the forward pass of every BN layer. Parameters and buffers do not change.

    Args:
        model: The model.
        forward: A subclass of :class:`SwappedBatchNorm` with the method's ``forward``.
        momentum: Whether the method uses the layers' momentum.
        **settings: Attributes of the layers until :func:`restore_batch_norm`.

    Returns:
        The layers, which are now instances of both ``forward`` and their original class.

    Raises:
        ConfigurationError: The model has no BN layer, or a layer cannot be swapped. A layer needs
            running statistics, PyTorch's forward pass, and a momentum if ``momentum`` is True.
    """
    layers = require_batch_norm(model, forward.method, momentum=momentum)
    for name, layer in layers.items():
        kind = layer.original if isinstance(layer, forward) else type(layer)
        if not isinstance(layer, forward):
            if isinstance(layer, SwappedBatchNorm):
                raise ConfigurationError(
                    f"callbacks {layer.method} and {forward.method} cannot be combined: both change the forward pass of BN "
                    "layers"
                )
            if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise ConfigurationError(
                    f"{forward.method}: BN layer {name!r} is a {kind.__name__} with a custom forward pass, which this method "
                    "would replace; use torch's BatchNorm layers and put the additional operations in a separate module"
                )
        attributes = {"original": kind, **settings}
        layer.__class__ = type(f"{forward.__name__}{kind.__name__}", (forward, kind), attributes)
        layer.prepare()  # type: ignore[operator]  # a method of the mixin
    return list(layers.values())


def restore_batch_norm(model: nn.Module) -> None:
    """Undo :func:`swap_batch_norm`: restore every layer's class, and remove its ``scratch``."""
    for layer in batch_norm_layers(model).values():
        if isinstance(layer, SwappedBatchNorm):
            for name in layer.scratch:
                delattr(layer, name)
            layer.__class__ = layer.original  # type: ignore[assignment]  # a class that assignment allows


@contextmanager
def batch_statistics(layers: Sequence[_BatchNorm], *, track: bool = False) -> Iterator[None]:
    """Let BN layers use batch statistics until the ``with`` block ends.

    Swapped layers also use batch statistics.

    Args:
        layers: The BN layers.
        track: Whether the layers update their running statistics.
    """
    before = [(layer.__class__, layer.training, layer.track_running_stats) for layer in layers]
    try:
        for layer in layers:
            if isinstance(layer, SwappedBatchNorm):
                layer.__class__ = layer.original  # type: ignore[assignment]  # a class that assignment allows
            layer.training, layer.track_running_stats = True, track
        yield
    finally:
        for layer, (kind, training, tracking) in zip(layers, before, strict=True):
            layer.__class__ = kind
            layer.training, layer.track_running_stats = training, tracking


def overriding_train(module: nn.Module) -> list[nn.Module]:
    """Return the modules that override ``train``, without modules inside of such a module."""
    if getattr(module.train, "__func__", None) is not nn.Module.train:
        return [module]
    return [layer for child in module.children() for layer in overriding_train(child)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Set a model to eval mode until the ``with`` block ends, then restore every module's mode.

    If a module overrides ``train``, the mode is restored by a call of ``train``. Such a module may
    also change tensors. For example, LoRA layers merge weights in eval mode. These tensors are
    restored bit for bit.

    Yield the original values of the changed tensors by name.
    """
    modes = {module: module.training for module in model.modules()}
    overriding = overriding_train(model)
    tensors = [*model.named_parameters(), *model.named_buffers()] if overriding else []
    before = [(name, x, x.data, x.detach().clone()) for name, x in tensors]
    merged = []
    try:
        model.eval()
        merged = [each for each in before if not torch.equal(each[1].nan_to_num(), each[3].nan_to_num())]
        yield {name: value for name, _, _, value in merged}
    finally:
        for module in overriding:
            module.train(modes[module])
        for module, training in modes.items():
            module.training = training
        for _, tensor, place, value in merged:
            tensor.data = place.copy_(value)
